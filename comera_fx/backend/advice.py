"""Tell of ``optimize`` where a model has nothing for the backend to plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch._dynamo.utils import counters

from comera_fx.compiled_code import function_being_compiled, is_of_optimised
from comera_fx.tt_module import TTModule

WORTH_A_WORD = 1 << 16
"""Entries of the dense matrices of a graph from which a model is told of ``optimize``."""


def tell_of_optimize(example_inputs: Sequence[Any]) -> None:
    """Warn, once, of a graph without TT layers, unless it is a part of a model that has some.

    Args:
        example_inputs: What the graph takes, parameters among it.
    """
    seen = counters["comera_fx"]
    if seen["dense_warnings"]:
        return
    parameters = [x for x in example_inputs if isinstance(x, nn.Parameter)]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    if sum(int(matrix.numel()) for matrix in matrices) < WORTH_A_WORD:
        return
    if any(map(is_of_optimised, parameters)) or any(map(_is_optimised, _models_in_use())):
        return
    seen["dense_warnings"] += 1
    shapes = ", ".join(str(tuple(matrix.shape)) for matrix in matrices[:3])
    warnings.warn(
        f"backend 'comera' got a graph without a layer in TT form; its dense weights ({shapes}"
        f"{', ...' if len(matrices) > 3 else ''}) pass through as they are. Call "
        "model = comera_fx.optimize(model) before torch.compile, and before making the optimizer.",
        UserWarning,
        stacklevel=3,
    )


def _is_optimised(model: nn.Module) -> bool:
    return any(isinstance(module, TTModule) for module in model.modules())


def _models_in_use() -> Iterator[nn.Module]:
    """Yield the modules that the function being compiled has at hand.

    A graph break leaves a graph that tells nothing of the rest of the model.
    """
    root = function_being_compiled()
    if root is None:
        return
    code, local, world = root
    for value in (*local.values(), *(world.get(name) for name in code.co_names)):
        if issubclass(type(value), nn.Module):  # the class itself: proxies may load what they hold
            yield value
