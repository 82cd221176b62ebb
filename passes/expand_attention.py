"""Rewrite attention calls, one opaque node in dynamo graphs, as what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import fx

from comera_fx.passes.inline_body import BodyInliner


@dataclass(frozen=True)
class ExpandAttention:
    """Open up the calls of ``torch.nn.functional.multi_head_attention_forward``.

    Before::

        %w = call_function[comera_fx.tt_dense.default]([%core_0, %core_1], 'tt', 1, 8, 24)
        %attention = call_function[multi_head_attention_forward](
            %x, %x, %x, 8, 2, %w, %b, None, None, False, 0.1, %out_w, %out_b, need_weights=False)
        %y = call_function[getitem](%attention, 0)

    After::

        %w = call_function[comera_fx.tt_dense.default]([%core_0, %core_1], 'tt', 1, 8, 24)
        %linear = call_function[aten.linear.default](%x, %w, %b)
        ...
        %attended = call_function[aten.scaled_dot_product_attention.default](%q, %k, %v, None, 0.1)
        ...
        %y = call_function[aten.linear.default](%rows, %out_w, %out_b)

    The packed weight is read whole where query, key and value are one node, and through ``split``
    or ``chunk`` where they are not, so that passes on products with it find them.

    Numerics: keeps them; random numbers are drawn as before.
    Leaves alone: calls whose inputs' sizes the graph does not tell, or under a function transform.
    """

    keeps_numerics: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of calls opened up."""
        calls = [node for node in gm.graph.nodes if _is_attention(node)]
        if not calls:
            return 0
        inliner = BodyInliner(gm)
        made = [inliner.inline(call, F.multi_head_attention_forward) for call in calls]
        return sum(nodes is not None for nodes in made)


def _is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is F.multi_head_attention_forward
