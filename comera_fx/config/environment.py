"""What the environment says: it is read here only."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder for what can be made again; ``None`` where there is no home.

    It is ``COMERA_FX_CACHE`` if that is set, and what is usual on the platform if not.
    """
    environment = os.environ
    if environment.get("COMERA_FX_CACHE"):
        return Path(os.path.expanduser(environment["COMERA_FX_CACHE"])).absolute()  # noqa: PTH111
    if sys.platform == "win32" and environment.get("LOCALAPPDATA"):
        return Path(environment["LOCALAPPDATA"])
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    if sys.platform not in ("win32", "darwin") and given.is_absolute():
        return given
    usual = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    try:
        return Path.home() / usual
    except RuntimeError:
        return None
