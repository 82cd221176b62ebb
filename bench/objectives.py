"""Plans of fewest FLOPs against plans of least predicted time, at full and at pruned ranks.

One training step of a layer, forward and backward, against the dense layer. Appends one row per
layer to ``bench/results/objectives.csv``. Run: ``python -m bench.objectives [THREADS]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from bench.options import RESULTS
from bench.steps import clear_grads, make_data, step
from bench.timing import Row, append_rows, medians_ms
from bench.workloads import DEMO, Workload
from comera_fx import PlanConfig, TTLinear, plan_linear


def row_for(workload: Workload, repeats: int = 20) -> Row:
    """Return the medians of one layer, after checking that all versions agree."""
    torch.manual_seed(0)
    spec, num_tokens = workload.spec, workload.num_tokens
    data = make_data(num_tokens, spec.in_size, [spec.out_size], trains=True)
    layers: dict[str, nn.Module] = {"dense": nn.Linear(spec.in_size, spec.out_size)}
    for objective in ("flops", "time"):
        config = PlanConfig(objective=objective)
        layers[objective] = TTLinear(spec, spec.in_size, spec.out_size, plan=config)
    layers["time"].load_state_dict(layers["flops"].state_dict())
    torch.testing.assert_close(
        layers["time"](data.x), layers["flops"](data.x), rtol=1e-3, atol=1e-4
    )

    def run_of(layer: nn.Module) -> Callable[[], object]:
        return lambda: step(layer, data)

    ms = medians_ms(
        {name: run_of(layer) for name, layer in layers.items()},
        repeats,
        prepare=lambda name: clear_grads(layers[name], data),
    )
    by_time, by_flops = (plan_linear(spec, num_tokens, each) for each in ("time", "flops"))
    return {
        "layer": workload.name,
        "ranks": "x".join(map(str, spec.ranks)),
        **{f"{version}_ms": round(value, 2) for version, value in ms.items()},
        "flops_over_time": round(ms["flops"] / ms["time"], 2),
        "dense_over_time": round(ms["dense"] / ms["time"], 2),
        "flops_mflops": by_flops.flops_forward // 10**6,
        "time_mflops": by_time.flops_forward // 10**6,
        "flops_copied_bytes": by_flops.program.copied_bytes,
        "time_copied_bytes": by_time.program.copied_bytes,
    }


def main() -> None:
    """Measure every layer, print the rows and append them."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    rows = []
    for workload in DEMO:
        rows.append(row_for(workload))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    append_rows(RESULTS / "objectives.csv", rows)


if __name__ == "__main__":
    main()
