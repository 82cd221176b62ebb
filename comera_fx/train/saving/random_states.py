"""States of the generators that a training loop draws from without naming them."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from comera_fx.train.caller import warn


def random_states() -> dict[str, Any]:
    """Return the states of this process, as ``torch.load(weights_only=True)`` reads them.

    CUDA devices are asked where CUDA is in use, NumPy where something has imported it.
    """
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on from ``random_states``; warn where there is no device for one of them."""
    torch.set_rng_state(states["torch"].cpu())
    count = torch.cuda.device_count()
    for index, state in enumerate(states["cuda"][:count]):
        torch.cuda.set_rng_state(state.cpu(), index)
    if len(states["cuda"]) > count:
        warn(
            f"the run was saved with random states of {len(states['cuda'])} CUDA devices, of "
            f"which {count} are here: what draws from the others goes on otherwise."
        )
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if states["numpy"] is not None:
        _restore_numpy(states["numpy"])


def _numpy_state() -> Any:
    if "numpy" not in sys.modules:
        return None
    import numpy as np

    return _plain(np.random.get_state(legacy=False))  # noqa: NPY002 - users' loops draw from it


def _restore_numpy(state: dict[str, Any]) -> None:
    import numpy as np

    kind = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002 - users draw from it
    if kind != state["bit_generator"]:
        warn(
            f"the run was saved with NumPy drawing from {state['bit_generator']}, and here it "
            f"draws from {kind}: its random state stays as it is."
        )
        return
    np.random.set_state(state)  # noqa: NPY002 - it is the state of this generator


def _plain(value: Any) -> Any:
    """Return numbers, text and lists for what NumPy has as arrays."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
