"""One linear layer: TT against ideal low rank, dense, and what else people run.

A training step (a forward pass for the 4096x4096 layer, which stands for decoding), without bias.
Appends one row per workload to ``bench/results/layer.csv``.
Run: ``python -m bench.layer [--tokens 32 512 4096] [--repeats N] [--threads 2]``.
"""

from __future__ import annotations

from torch import nn

from bench.options import parse
from bench.steps import Version, compare, faster_ms, make_data, rounded_ms
from bench.timing import Row, append_rows, format_table
from bench.versions import MAKERS, PLAN, available, draw_cores, make
from bench.workloads import LAYERS, Workload
from comera_fx import plan_linear

SHOWN = (
    "workload",
    "tokens",
    "dense_ms",
    "low_rank_ms",
    "fixed_path_ms",
    "einsum_ms",
    "tltorch_ms",
    "ours_ms",
    "predicted_ms",
    "ours_over_low_rank",
    "dense_over_ours",
)


def measure(workload: Workload, names: list[str], repeats: int | None = None) -> Row:
    """Return one row: medians of all versions, after checking that they agree.

    Args:
        workload: The layer.
        names: Versions to run, of those in ``bench.versions``.
        repeats: Measured turns; by their time if ``None``.
    """
    spec = workload.spec
    cores = draw_cores(spec)
    versions = {}
    for name in names:
        layer = make(name, spec, cores)
        versions[name] = Version(layer, [layer])
    data = make_data(workload.num_tokens, spec.in_size, [spec.out_size], trains=workload.trains)
    ms, turns = compare(versions, _only, data, repeats)
    return {
        "workload": workload.name,
        "tokens": workload.num_tokens,
        "ranks": "x".join(map(str, spec.ranks)),
        **rounded_ms(ms, list(MAKERS)),
        "predicted_ms": predicted_ms(workload),
        "ours_over_low_rank": round(ms["ours"] / faster_ms("low_rank", ms), 3),
        "dense_over_ours": round(ms["dense"] / ms["ours"], 3),
        "repeats": turns,
    }


def predicted_ms(workload: Workload) -> float | None:
    """Return the milliseconds that the plan promises for forward and backward, if it trains."""
    plan = plan_linear(workload.spec, workload.num_tokens, PLAN.objective)
    return round(1e3 * plan.seconds, 4) if workload.trains else None


def _only(layers: list[nn.Module]) -> nn.Module:
    return layers[0]


def main() -> None:
    """Measure every layer, print a table and append the rows."""
    options = parse(__doc__, results="layer.csv", tokens=[w.num_tokens for w in LAYERS])
    names = available(list(MAKERS))
    chosen = [workload for workload in LAYERS if workload.num_tokens in options.tokens]
    rows = [measure(workload, names, options.repeats) for workload in chosen]
    print(format_table([{key: row[key] for key in SHOWN} for row in rows]))
    append_rows(options.results, rows)


if __name__ == "__main__":
    main()
