"""Whole runs in files that are never half written."""

from comera_fx.train.saving.checkpoint import SavedRun, latest_run, load_run, save_run
from comera_fx.train.saving.files import read_state, write_atomically

__all__ = ["SavedRun", "latest_run", "load_run", "read_state", "save_run", "write_atomically"]
