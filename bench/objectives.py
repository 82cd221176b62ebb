"""Plans of fewest FLOPs against plans of least predicted time, at full and at pruned ranks.

One training step of a layer, forward and backward, against the dense layer. Appends one row per
layer to ``bench/results/objectives.csv``. Run: ``python -m bench.objectives [THREADS]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.timing import append_rows, medians_ms
from comera_fx import PlanConfig, TTLinear, TTSpec, plan_linear

NUM_TOKENS = 2048
RESULTS = Path(__file__).parent / "results" / "objectives.csv"
Modes = tuple[int, ...]
LAYERS: dict[str, tuple[Modes, Modes, Modes]] = {
    # Layers of the demo's decoder; the pruned ranks are those that a run of it left.
    "qkv": ((8, 8, 4), (8, 12, 8), (8, 32, 32, 32, 8)),
    "qkv pruned": ((8, 8, 4), (8, 12, 8), (5, 32, 22, 28, 4)),
    "up": ((8, 8, 4), (8, 16, 8), (8, 32, 32, 32, 8)),
    "up pruned": ((8, 8, 4), (8, 16, 8), (7, 25, 20, 23, 6)),
    "down": ((8, 16, 8), (4, 8, 8), (8, 32, 32, 32, 8)),
    "down pruned": ((8, 16, 8), (4, 8, 8), (5, 17, 17, 25, 5)),
}


def rows_for(name: str, spec: TTSpec) -> dict[str, object]:
    """Return the medians of one layer, after checking that all versions agree."""
    torch.manual_seed(0)
    x = torch.randn(NUM_TOKENS, spec.in_size, requires_grad=True)
    grad = torch.randn(NUM_TOKENS, spec.out_size)
    dense = nn.Linear(spec.in_size, spec.out_size)
    layers: dict[str, nn.Module] = {"dense": dense}
    for objective in ("flops", "time"):
        config = PlanConfig(objective=objective)
        layers[objective] = TTLinear(spec, spec.in_size, spec.out_size, plan=config)
    layers["time"].load_state_dict(layers["flops"].state_dict())
    torch.testing.assert_close(layers["time"](x), layers["flops"](x), rtol=1e-3, atol=1e-4)

    def step(layer: nn.Module) -> Callable[[], object]:
        return lambda: layer(x).backward(grad)

    ms = medians_ms({name: step(layer) for name, layer in layers.items()}, repeats=20)
    by_time, by_flops = plan_linear(spec, NUM_TOKENS, "time"), plan_linear(spec, NUM_TOKENS)
    return {
        "layer": name,
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
    for name, (in_modes, out_modes, ranks) in LAYERS.items():
        rows.append(rows_for(name, TTSpec("tt", in_modes, out_modes, (1, *ranks, 1))))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    append_rows(RESULTS, rows)


if __name__ == "__main__":
    main()
