"""What TT layers share during one forward pass of their model."""
