"""What a run measured, as numbers and as the rows of its one table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import torch
from torch import nn

from comera_fx.demo.config import DemoConfig
from comera_fx.demo.train import Race, Ranks, tt_layers

DENSE_FILE, OPTIMISED_FILE, RESULTS_FILE = "dense.pt", "optimised.pt", "results.json"
COLUMNS = ("", "dense", "optimised", "against dense")
Row = tuple[str, str, str, str]


@dataclass(frozen=True)
class Results:
    """Measurements of a finished run. Losses in nats a byte, times in seconds.

    Args:
        dense_params: Parameters of the whole dense model.
        optimised_params: Parameters of the whole optimised model at the end.
        dense_layer_params: Weights of the dense layers that were compressed.
        start_layer_params: Parameters of their cores at the start.
        end_layer_params: Parameters of their cores at the end.
        steps: Steps that both took.
        optimised_steps: Steps of the optimised model at equal time.
        seconds: Training time of the dense model, as counted (``Side.counted_seconds``).
        optimised_seconds: Training time of the optimised model at equal time, likewise.
        clock_seconds: All the time that passed in steps of the dense model.
        optimised_clock_seconds: All the time that passed in steps of the optimised model.
        dense_step: Median step of the dense model.
        optimised_step: Median step of the optimised model over the same steps.
        dense_last_step: Median step of the dense model over the last quarter of them.
        optimised_last_step: Median step of the optimised model there, with most ranks shrunk.
        dense_loss: Held-out loss of the dense model.
        equal_steps_loss: Held-out loss of the optimised model after equal steps.
        equal_time_loss: Held-out loss of the optimised model after equal time.
        start_ranks: Ranks of each layer at the start.
        end_ranks: Ranks of each layer at the end.
        dense_bytes: Size of the dense model's file.
        optimised_bytes: Size of the optimised model's file.
    """

    dense_params: int
    optimised_params: int
    dense_layer_params: int
    start_layer_params: int
    end_layer_params: int
    steps: int
    optimised_steps: int
    seconds: float
    optimised_seconds: float
    clock_seconds: float
    optimised_clock_seconds: float
    dense_step: float
    optimised_step: float
    dense_last_step: float
    optimised_last_step: float
    dense_loss: float
    equal_steps_loss: float
    equal_time_loss: float
    start_ranks: Ranks
    end_ranks: Ranks
    dense_bytes: int
    optimised_bytes: int


def collect(race: Race, out: Path) -> Results:
    """Write both models' weights into ``out``, and gather what the finished race measured."""
    dense, optimised = race.dense, race.optimised
    steps = race.config.steps
    last = slice(steps - max(1, steps // 4), steps)
    return Results(
        dense_params=num_params(dense.model),
        optimised_params=num_params(optimised.model),
        dense_layer_params=sum(m.dense_params for m in tt_layers(optimised.model).values()),
        start_layer_params=race.sizes[0],
        end_layer_params=race.sizes[-1],
        steps=steps,
        optimised_steps=len(optimised.losses),
        seconds=dense.seconds,
        optimised_seconds=optimised.seconds,
        clock_seconds=sum(dense.step_seconds),
        optimised_clock_seconds=sum(optimised.step_seconds),
        dense_step=median(dense.step_seconds),
        optimised_step=median(optimised.step_seconds[:steps]),
        dense_last_step=median(dense.step_seconds[last]),
        optimised_last_step=median(optimised.step_seconds[last]),
        dense_loss=race.held_out["dense"],
        equal_steps_loss=race.held_out["optimised, equal steps"],
        equal_time_loss=race.held_out["optimised, equal time"],
        start_ranks=race.ranks[0][1],
        end_ranks=race.ranks[-1][1],
        dense_bytes=_write_weights(dense.model, out / DENSE_FILE),
        optimised_bytes=_write_weights(optimised.model, out / OPTIMISED_FILE),
    )


def write_json(results: Results, config: DemoConfig, path: Path) -> None:
    """Write settings and results for other programs to read."""
    text = json.dumps({"config": config.to_dict(), "results": asdict(results)}, indent=2)
    path.write_text(text + "\n")


def headline(r: Results) -> list[Row]:
    """Return the rows of the table that the terminal and the page both show."""
    layers = f"{r.dense_layer_params:,}"
    return [
        (
            "Parameters",
            f"{r.dense_params:,}",
            f"{r.optimised_params:,}",
            _times(r.dense_params, r.optimised_params, "fewer"),
        ),
        (
            "compressed layers, start",
            layers,
            f"{r.start_layer_params:,}",
            _times(r.dense_layer_params, r.start_layer_params, "fewer"),
        ),
        (
            "compressed layers, end",
            layers,
            f"{r.end_layer_params:,}",
            _times(r.dense_layer_params, r.end_layer_params, "fewer"),
        ),
        (
            "TT size, end / start",
            "",
            f"{r.end_layer_params / max(1, r.start_layer_params):.3f}",
            "",
        ),
        ("Ranks, start", "", rank_range(r.start_ranks), ""),
        ("Ranks, end", "", rank_range(r.end_ranks), ""),
        (
            "Training step, median",
            _milliseconds(r.dense_step),
            _milliseconds(r.optimised_step),
            _times(r.dense_step, r.optimised_step, "faster"),
        ),
        (
            "  last quarter of the steps",
            _milliseconds(r.dense_last_step),
            _milliseconds(r.optimised_last_step),
            _times(r.dense_last_step, r.optimised_last_step, "faster"),
        ),
        (
            f"Held-out loss, {r.steps} steps each",
            f"{r.dense_loss:.3f}",
            f"{r.equal_steps_loss:.3f}",
            f"{r.equal_steps_loss / r.dense_loss:.3f} x",
        ),
        (
            f"Steps in {r.seconds:.0f} s",
            f"{r.steps}",
            f"{r.optimised_steps}",
            _times(r.optimised_steps, r.steps, "more"),
        ),
        (
            f"Held-out loss, {r.seconds:.0f} s each",
            f"{r.dense_loss:.3f}",
            f"{r.equal_time_loss:.3f}",
            f"{r.equal_time_loss / r.dense_loss:.3f} x",
        ),
        (
            "File of the weights",
            _megabytes(r.dense_bytes),
            _megabytes(r.optimised_bytes),
            _times(r.dense_bytes, r.optimised_bytes, "smaller"),
        ),
    ]


def num_params(model: nn.Module) -> int:
    """Return the number of all parameters, each counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def inner_ranks(ranks: Ranks) -> list[int]:
    """Return the ranks of all bonds of all layers, without the ends, which are always 1."""
    return [rank for layer in ranks.values() for rank in layer[1:-1]]


def rank_range(ranks: Ranks) -> str:
    """Describe ranks in a few words.

    Example:
        >>> rank_range({"up": [1, 4, 32, 8, 1], "down": [1, 8, 32, 4, 1]})
        '4-32, mean 14.7'
    """
    bonds = inner_ranks(ranks)
    return f"{min(bonds)}-{max(bonds)}, mean {fmean(bonds):.1f}" if bonds else "none"


def _write_weights(model: nn.Module, path: Path) -> int:
    torch.save(model.state_dict(), path)
    return path.stat().st_size


def _times(larger: float, smaller: float, what: str) -> str:
    return f"{larger / smaller:.2f} x {what}" if smaller else ""


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
