"""Numba CUDA kernels, one a file: reference, CUDA, launch."""
