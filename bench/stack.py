"""A stack of equal linear layers: TT layer by layer, TT with sharing, low rank, dense.

With many layers and few tokens, what counts is how often something small is launched. A training
step, without bias. Appends one row per batch to ``bench/results/stack.csv``.
Run: ``python -m bench.stack [--tokens 16 128 1024] [--repeats N] [--threads 2]``.
"""

from __future__ import annotations

from torch import nn

from bench.options import parse
from bench.steps import Version, compare, faster_ms, make_data, rounded_ms
from bench.timing import Row, append_rows, format_table
from bench.versions import LOW_RANK, draw_cores, make, optimised
from bench.workloads import STACK, STACK_DEPTH, Workload

PLAIN = ("dense", *LOW_RANK, "fixed_path", "ours")
SHOWN = (
    "workload",
    "tokens",
    "dense_ms",
    "low_rank_ms",
    "fixed_path_ms",
    "ours_ms",
    "ours_shared_ms",
    "shared_over_ours",
    "shared_over_low_rank",
    "dense_over_shared",
)


def measure(workload: Workload, depth: int, repeats: int | None = None) -> Row:
    """Return one row: medians of all versions, after checking that they agree.

    Args:
        workload: One layer of the stack, whose two sizes are equal, and the batch.
        depth: Number of layers.
        repeats: Measured turns; by their time if ``None``.
    """
    spec = workload.spec
    cores = [draw_cores(spec, seed) for seed in range(depth)]
    data = make_data(workload.num_tokens, spec.in_size, [spec.out_size], trains=True)
    versions = {}
    for name in PLAIN:
        layers = [make(name, spec, numbers) for numbers in cores]
        versions[name] = Version(nn.Sequential(*layers), layers)
    shared = optimised(versions["dense"].model, data.x.detach(), spec, cores)
    versions["ours_shared"] = Version(*shared)
    ms, turns = compare(versions, lambda layers: nn.Sequential(*layers), data, repeats)
    return {
        "workload": workload.name,
        "tokens": workload.num_tokens,
        "depth": depth,
        "ranks": "x".join(map(str, spec.ranks)),
        **rounded_ms(ms, [*PLAIN, "ours_shared"]),
        "shared_over_ours": round(ms["ours_shared"] / ms["ours"], 3),
        "shared_over_low_rank": round(ms["ours_shared"] / faster_ms("low_rank", ms), 3),
        "dense_over_shared": round(ms["dense"] / ms["ours_shared"], 3),
        "repeats": turns,
    }


def main() -> None:
    """Measure every batch, print a table and append the rows."""
    options = parse(__doc__, results="stack.csv", tokens=[w.num_tokens for w in STACK])
    chosen = [workload for workload in STACK if workload.num_tokens in options.tokens]
    rows = [measure(workload, STACK_DEPTH, options.repeats) for workload in chosen]
    print(format_table([{key: row[key] for key in SHOWN} for row in rows]))
    append_rows(options.results, rows)


if __name__ == "__main__":
    main()
