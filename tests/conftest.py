"""Small tensors run faster on one thread, and the same sums in the same order every time.

Speeds that were measured on this machine are out of reach: plans are those of the shipped ones.
"""

import os
import tempfile

folder = tempfile.TemporaryDirectory(prefix="comera-fx-tests-")
os.environ["COMERA_FX_CACHE"] = folder.name

import torch  # noqa: E402 (a first plan reads the folder)

torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    folder.cleanup()
