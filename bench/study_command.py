"""The command line of a study: ``python -m bench.code_lm`` and its like."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.methods import METHODS
from bench.options import RESULTS
from bench.study import ROUNDS, SEEDS, Study
from bench.study_child import Source
from bench.study_search import RATES, RESTS
from bench.study_table import write_report
from bench.study_task import DEFAULT_RATIO

QUICK_RATES, QUICK_RESTS, QUICK_SEEDS, QUICK_ROUNDS = (3e-3,), (1.0,), (0,), 2
QUICK_RESULTS = Path("build/studies")


def main(module: str, description: str | None, arguments: Sequence[str] | None = None) -> None:
    """Run the study of a module's task and write its table and figure.

    Args:
        module: A module with ``make_task(quick, device, width)``.
        description: Its docstring.
        arguments: Instead of those on the command line.
    """
    options = _parser(description).parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quick = options.quick
    default = QUICK_RESULTS if quick else RESULTS / "studies"
    source = Source(module, quick, options.device, options.threads, options.ratio, options.width)
    study = Study(
        source,
        options.results or default,
        methods=options.only or tuple(METHODS),
        rates=options.rates or (QUICK_RATES if quick else RATES),
        rests=options.rests or (QUICK_RESTS if quick else RESTS),
        seeds=options.seeds or (QUICK_SEEDS if quick else SEEDS),
        rounds=QUICK_ROUNDS if quick else ROUNDS,
        jobs=options.jobs,
        minutes=options.minutes,
        retry=options.retry,
    )
    if not options.table_only:
        study.run()
    print(write_report(study))


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a task of seconds, in build/studies")
    parser.add_argument("--only", type=_names, help="methods to run, with commas between them")
    parser.add_argument("--seeds", type=_of(int), help="seeds to report, with commas")
    parser.add_argument("--rates", type=_of(float), help="rates to choose from, with commas")
    parser.add_argument("--rests", type=_of(float), help="rates of the rest of the model, over it")
    parser.add_argument("--jobs", type=_count, default=1, help="runs at a time; 1 by default")
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--ratio", type=float, default=DEFAULT_RATIO, help="dense over small")
    parser.add_argument("--width", type=int, help="size of the model's stream")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of torch; by default, torch's choice")
    parser.add_argument("--results", type=Path, help="folder of the files")
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} runs at a time; give 1 or more")
    return count
