"""Look at a model on its way to what runs: stages, pictures of graphs, a folder, a page."""
