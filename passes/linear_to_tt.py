"""Rewrite dense linear layers as tensor-train (TT) products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from comera_fx import ops as ops  # registers the operators
from comera_fx.modules import TTLinear
from comera_fx.passes.match import input_of, insert_cores, replace_layers


@dataclass(frozen=True)
class LinearToTT:
    """Replace the calls of each chosen ``nn.Linear`` by ``tt_linear`` nodes.

    Before::

        %y = call_module[mlp.up](%x)

    After::

        %mlp_up_core_0 = get_attr[mlp.up.core_0]()
        %mlp_up_core_1 = get_attr[mlp.up.core_1]()
        %mlp_up_bias = get_attr[mlp.up.bias]()
        %y = call_function[comera_fx.tt_linear.default](
            %x, [%mlp_up_core_0, %mlp_up_core_1], %mlp_up_bias, 'tt', 1, 768, 3072)

    Numerics: changes them, by the error of the decomposition at the ranks chosen.
    Leaves alone: layers for which ``choose`` says ``None``, subclasses of ``nn.Linear``, and
    weights with a second reader, since rewriting one reader would untie them.

    Args:
        choose: Maps a layer's qualified name and module to the layer that takes its place.

    Source:
        Novikov et al., "Tensorizing Neural Networks", NeurIPS 2015, section 4 (from memory).
    """

    choose: Callable[[str, nn.Linear], TTLinear | None]
    keeps_numerics: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of layers replaced."""
        return replace_layers(gm, nn.Linear, self.choose, insert_tt_linear)


def insert_tt_linear(gm: fx.GraphModule, name: str, call: fx.Node, layer: TTLinear) -> fx.Node:
    """Insert before ``call`` the node that computes it with the cores of ``layer``.

    Args:
        gm: Graph whose submodule ``name`` already is ``layer``.
        name: Qualified name of the layer.
        call: The ``call_module`` node whose input is read.
        layer: The TT layer.

    Returns:
        The new node; ``call`` still stands after it.
    """
    spec = layer.spec
    with gm.graph.inserting_before(call):
        cores = insert_cores(gm, name, layer)
        bias = None if layer.bias is None else gm.graph.get_attr(f"{name}.bias")
        sizes = (spec.layout, len(spec.in_modes), layer.in_features, layer.out_features)
        args = (input_of(call), cores, bias, *sizes)
        node = gm.graph.call_function(
            torch.ops.comera_fx.tt_linear.default, args, layer.op_settings()
        )
    node.meta = {**call.meta, "tt_spec": spec}
    return node
