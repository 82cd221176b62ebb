"""The parts of a model with their sizes, dense and as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from comera_fx.modules import TTModule


@dataclass(frozen=True)
class Part:
    """A module, and those inside it.

    Args:
        name: Its name in its parent; the class for the model itself.
        kind: Its class; with the shape of the train if it is in TT form.
        params: Numbers that it holds with all inside it, each counted once.
        dense_params: Numbers that it would hold, were all its layers dense.
        is_tt: Whether it is a layer in TT form.
        parts: The modules inside it that hold numbers.
    """

    name: str
    kind: str
    params: int
    dense_params: int
    is_tt: bool
    parts: tuple[Part, ...]


def tree_of(model: nn.Module, name: str = "") -> Part:
    """Return the tree of a model; modules that hold no numbers are left out.

    Example:
        >>> tree = tree_of(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        >>> tree.params, [part.name for part in tree.parts]
        (9, ['0'])
    """
    params = sum(param.numel() for param in model.parameters() if not is_lazy(param))
    saved = sum(
        module.dense_params - sum(p.numel() for p in (*module.cores, *module.rank_weights))
        for module in model.modules()
        if isinstance(module, TTModule)
    )
    is_tt = isinstance(model, TTModule)
    children = () if is_tt else tuple(model.named_children())
    parts = tuple(tree_of(child, inner) for inner, child in children)
    kind = type(model).__name__
    if isinstance(model, TTModule):
        spec = model.spec
        modes, ranks = (
            "x".join(map(str, numbers)) for numbers in (spec.in_modes, spec.ranks[1:-1])
        )
        kind = f"{kind} {modes} -> {'x'.join(map(str, spec.out_modes))}, ranks {ranks or '-'}"
    kept = tuple(part for part in parts if part.params)
    return Part(name or type(model).__name__, kind, params, params + saved, is_tt, kept)
