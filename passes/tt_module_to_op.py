"""Show the calls of TT modules as the operators they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.passes.embedding_to_ttm import insert_tt_embedding
from comera_fx.passes.linear_to_tt import insert_tt_linear
from comera_fx.passes.match import calls_by_layer, replace_call


@dataclass(frozen=True)
class TTModuleToOp:
    """Replace every call of a ``TTLinear`` or ``TTEmbedding`` by its operator.

    Before::

        %y = call_module[mlp.up](%x)

    After::

        %mlp_up_core_0 = get_attr[mlp.up.core_0]()
        %mlp_up_core_1 = get_attr[mlp.up.core_1]()
        %y = call_function[comera_fx.tt_linear.default](
            %x, [%mlp_up_core_0, %mlp_up_core_1], None, 'tt', 1, 768, 3072)

    Numerics: keeps them, exactly.
    Leaves alone: every other module.
    """

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of layers shown as operators."""
        num_rewrites = 0
        for name, calls in calls_by_layer(gm).items():
            layer = gm.get_submodule(name)
            if not isinstance(layer, (TTLinear, TTEmbedding)):
                continue
            for call in calls:
                if isinstance(layer, TTLinear):
                    new = insert_tt_linear(gm, name, call, layer)
                else:
                    new = insert_tt_embedding(gm, name, call, layer)
                replace_call(call, new)
            num_rewrites += 1
        return num_rewrites
