"""Query, key and value of an attention block: three TT layers that read one input.

With sharing, their left factors stand side by side in one matrix product. A training step, without
bias. Appends one row per batch to ``bench/results/share.csv``.
Run: ``python -m bench.share [--tokens 32 512 4096] [--repeats N] [--threads 2]``.
"""

from __future__ import annotations

from torch import Tensor, nn

from bench.options import parse
from bench.steps import Version, compare, faster_ms, make_data, rounded_ms
from bench.timing import Row, append_rows, format_table
from bench.versions import LOW_RANK, draw_cores, make, optimised
from bench.workloads import SHARE, Workload

PLAIN = ("dense", *LOW_RANK, "ours")
SHOWN = (
    "workload",
    "tokens",
    "dense_ms",
    "low_rank_ms",
    "ours_ms",
    "ours_shared_ms",
    "shared_over_ours",
    "shared_over_low_rank",
)


class Projections(nn.Module):
    """Query, key and value of one input."""

    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v = q, k, v

    def forward(self, x_BI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors (B, O)."""
        return self.q(x_BI), self.k(x_BI), self.v(x_BI)


def measure(workload: Workload, repeats: int | None = None) -> Row:
    """Return one row: medians of all versions, after checking that they agree.

    Args:
        workload: Each of the three layers, and the batch.
        repeats: Measured turns; by their time if ``None``.
    """
    spec = workload.spec
    cores = [draw_cores(spec, seed) for seed in range(3)]
    data = make_data(workload.num_tokens, spec.in_size, [spec.out_size] * 3, trains=True)
    versions = {}
    for name in PLAIN:
        layers = [make(name, spec, numbers) for numbers in cores]
        versions[name] = Version(Projections(*layers), layers)
    shared = optimised(versions["dense"].model, data.x.detach(), spec, cores)
    versions["ours_shared"] = Version(*shared)
    ms, turns = compare(versions, lambda layers: Projections(*layers), data, repeats)
    return {
        "workload": workload.name,
        "tokens": workload.num_tokens,
        "ranks": "x".join(map(str, spec.ranks)),
        **rounded_ms(ms, [*PLAIN, "ours_shared"]),
        "shared_over_ours": round(ms["ours_shared"] / ms["ours"], 3),
        "shared_over_low_rank": round(ms["ours_shared"] / faster_ms("low_rank", ms), 3),
        "repeats": turns,
    }


def main() -> None:
    """Measure every batch, print a table and append the rows."""
    options = parse(__doc__, results="share.csv", tokens=[w.num_tokens for w in SHARE])
    chosen = [workload for workload in SHARE if workload.num_tokens in options.tokens]
    rows = [measure(workload, options.repeats) for workload in chosen]
    print(format_table([{key: row[key] for key in SHOWN} for row in rows]))
    append_rows(options.results, rows)


if __name__ == "__main__":
    main()
