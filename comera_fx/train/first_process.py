"""Directions as the first process found them: others may round otherwise, and drift apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from comera_fx.balance import Bonds, Directions
from comera_fx.train.processes import Processes


def bonds_of_first(
    bonds: Bonds, ranks: Mapping[str, Sequence[int]], processes: Processes, dtype: torch.dtype
) -> Bonds:
    """Return the bonds of the first process in every process.

    How many directions a bond has goes before what they are: it is a matter of rounding, too.

    Args:
        bonds: Those of the first process; what others give is not read.
        ranks: Layer name to inner ranks of the layers that are sent, alike in all processes.
        processes: Those that take part.
        dtype: In which the bases are sent; all processes go on from what is left of them.
    """
    sizes = [rank for inner in ranks.values() for rank in inner]
    own = [bond for name in ranks for bond in bonds[name]] if processes.is_first else []
    values = torch.zeros(sum(sizes), dtype=torch.float64)
    for row, bond in zip(torch.split(values, sizes), own, strict=False):
        row[: len(bond.values)] = bond.values  # each is above 0: what is not tells how many
    rows = torch.split(processes.broadcast(values), sizes)
    counts = [int((row > 0).sum()) for row in rows]
    lengths = [rank * count for rank, count in zip(sizes, counts, strict=True) for _ in range(2)]
    flat = torch.zeros(sum(lengths), dtype=dtype)
    if own:
        flat = torch.cat([t.flatten().to(dtype) for d in own for t in (d.into, d.out_of)])
    parts = iter(torch.split(processes.broadcast(flat).double(), lengths))
    sent = iter(
        Directions(row[:count], next(parts).view(-1, count), next(parts).view(count, -1))
        for row, count in zip(rows, counts, strict=True)
    )
    return {name: [next(sent) for _ in inner] for name, inner in ranks.items()}
