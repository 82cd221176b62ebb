"""Models that benchmarks and tests share, in plain PyTorch."""
