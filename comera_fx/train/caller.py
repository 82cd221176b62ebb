"""Warnings that name the user's line, however many frames of ours and of torch's lie between."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

_OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, str(torch.__file__)))


def warn(message: str) -> None:
    """Warn at the nearest line that is neither in this folder nor in torch."""
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, stacklevel=stacklevel)
