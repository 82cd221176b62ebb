"""Rewrite embedding tables as lookups in tensor-train matrices (TTM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from comera_fx import ops as ops  # registers the operators
from comera_fx.modules import TTEmbedding
from comera_fx.passes.match import input_of, insert_cores, replace_layers


@dataclass(frozen=True)
class EmbeddingToTTM:
    """Replace the calls of each chosen ``nn.Embedding`` by ``tt_embedding`` nodes.

    Before::

        %rows = call_module[embed](%ids)

    After::

        %embed_core_0 = get_attr[embed.core_0]()
        %embed_core_1 = get_attr[embed.core_1]()
        %rows = call_function[comera_fx.tt_embedding.default](
            %ids, [%embed_core_0, %embed_core_1], None, 'ttm', 2, 30522, 768)

    A table with a ``padding_idx`` also gets ``padding_row``, the row kept for that index.

    Numerics: changes them, by the error of the decomposition at the ranks chosen.
    Leaves alone: tables for which ``choose`` says ``None``, subclasses of ``nn.Embedding``, and
    weights with a second reader, such as a tied output head.

    Args:
        choose: Maps a table's qualified name and module to the layer that takes its place.

    Source:
        Yang et al., "CoMERA", NeurIPS 2024, section 3 (from memory).
    """

    choose: Callable[[str, nn.Embedding], TTEmbedding | None]
    keeps_numerics: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> int:
        """Rewrite ``gm`` in place and return the number of tables replaced."""
        return replace_layers(gm, nn.Embedding, self.choose, insert_tt_embedding)


def insert_tt_embedding(
    gm: fx.GraphModule, name: str, call: fx.Node, layer: TTEmbedding
) -> fx.Node:
    """Insert before ``call`` the node that looks its rows up in the cores of ``layer``.

    Args:
        gm: Graph whose submodule ``name`` already is ``layer``.
        name: Qualified name of the table.
        call: The ``call_module`` node whose ids are read.
        layer: The TT table.

    Returns:
        The new node; ``call`` still stands after it.
    """
    spec = layer.spec
    has_padding = layer.padding_idx is not None
    with gm.graph.inserting_before(call):
        cores = insert_cores(gm, name, layer)
        padding_row = gm.graph.get_attr(f"{name}.padding_row") if has_padding else None
        sizes = (spec.layout, len(spec.in_modes), layer.num_embeddings, layer.embedding_dim)
        args = (input_of(call), cores, padding_row, *sizes)
        node = gm.graph.call_function(
            torch.ops.comera_fx.tt_embedding.default, args, layer.op_settings()
        )
    node.meta = {**call.meta, "tt_spec": spec}
    return node
