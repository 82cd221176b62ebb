"""The demo: pre-train a small language model, dense and optimised, side by side."""
