"""Command line that the benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def parse(
    description: str | None,
    *,
    results: str,
    tokens: Sequence[int] = (),
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Read ``--repeats``, ``--threads``, ``--results`` and, if there is a choice, ``--tokens``.

    Args:
        description: The benchmark's docstring.
        results: Name of its CSV file.
        tokens: Numbers of tokens to choose from; all of them, if none is named.
        extend: Adds the options that one benchmark alone has.
        arguments: Instead of those on the command line.

    Returns:
        What was given. The number of threads is set by then.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, help="measured turns; by default, by their time")
    parser.add_argument("--threads", type=int, help="threads of torch; by default, torch's choice")
    parser.add_argument("--results", type=Path, default=RESULTS / results, help="CSV file")
    if tokens:
        choices = sorted(set(tokens))
        parser.add_argument(
            "--tokens",
            type=int,
            nargs="+",
            help="batches to run",
            choices=choices,
            default=choices,
        )
    if extend is not None:
        extend(parser)
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return options
