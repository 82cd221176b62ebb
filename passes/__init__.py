"""Graph rewrites, one a file, run by ``pipeline.run_pipeline``."""
