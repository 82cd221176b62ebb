"""Command line of the package: ``comera-fx demo``, ``plan``, ``inspect`` and ``calibrate``.

What a command needs is imported inside it, so that help and usage errors come at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from comera_fx.config import Layout, Objective, OptimizeConfig, PlanConfig
from comera_fx.demo.config import DemoConfig
from comera_fx.errors import ComeraError, ConfigError

if TYPE_CHECKING:
    from comera_fx.spec import TTSpec

MAX_MODES = 12
MOST = 1 << 31

app = typer.Typer(add_completion=False, no_args_is_help=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Rewrite PyTorch models into tensor-train form that trains faster."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    steps: Annotated[
        int | None,
        typer.Option(help="Steps that both models take.", show_default=str(DemoConfig.steps)),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Largest rank of the optimised model.", show_default=str(DemoConfig.rank)
        ),
    ] = None,
    target_ratio: Annotated[
        float | None,
        typer.Option(
            help="TT size to shrink to, as a share of the size at the start.",
            show_default=str(DemoConfig.target_ratio),
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, or cuda for a GPU.", show_default=DemoConfig.device)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights and batches.", show_default=str(DemoConfig.seed)),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the page, the weights and the checkpoint.")
    ] = Path("demo"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in the folder, with the settings it was started with.",
        ),
    ] = False,
) -> None:
    """Pre-train a small language model on Python's standard library, dense and optimised.

    Takes a few minutes on two cores. Ctrl-C leaves a checkpoint that [bold]--resume[/] continues.
    """
    from rich.console import Console

    from comera_fx.demo.run import run_demo

    given: dict[str, Any] = {
        "steps": steps,
        "rank": rank,
        "target_ratio": target_ratio,
        "device": device,
        "seed": seed,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    with _errors_shown():
        status = run_demo(settings, out, resume=resume, console=Console())
    if status:
        raise typer.Exit(status)


@app.command()
def plan(
    in_size: Annotated[int, typer.Option("--in", help="In features of the layer.")],
    out_size: Annotated[int, typer.Option("--out", help="Out features of the layer.")],
    rank: Annotated[int, typer.Option(help="Largest rank.")] = OptimizeConfig.max_rank,
    tokens: Annotated[int, typer.Option(help="Rows of input.")] = OptimizeConfig.num_tokens_hint,
    modes: Annotated[
        str | None,
        typer.Option(
            help="In modes and out modes, such as 12x8x8:12x16x16.", show_default="chosen by size"
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="tt: a core for each mode; ttm: one for each pair of modes.")
    ] = "tt",
    objective: Annotated[
        str, typer.Option(help="What the plan is best at: time, flops or memory.")
    ] = "time",
    svg: Annotated[
        Path | None, typer.Option(help="File to draw the plan into.", show_default=False)
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Set the plan beside other ways to run the layer.")
    ] = False,
) -> None:
    """Show how a linear layer in tensor-train form is contracted, forward and backward."""
    from rich.console import Console

    from comera_fx.plan.compare import compare_plans, comparison_table
    from comera_fx.plan.draw import plan_svg
    from comera_fx.plan.linear import plan_linear

    with _errors_shown():
        _check_counts({"--in": in_size, "--out": out_size, "--rank": rank, "--tokens": tokens})
        spec = _make_spec((in_size, out_size), rank, modes, layout)
        goal = PlanConfig(objective=cast("Objective", objective)).objective
        found = plan_linear(spec, tokens, goal)
        ways = compare_plans(spec, tokens) if compare else []
        if svg is not None:
            _write(plan_svg(found), svg, "the picture cannot be written", "--svg")
    typer.echo(str(found))
    if (spec.in_size, spec.out_size) != (in_size, out_size):
        typer.echo(
            f"The modes make up {spec.in_size:,} to {spec.out_size:,}: what is more than "
            f"{in_size:,} to {out_size:,} is padding, and counted in all figures, dense ones too."
        )
    if ways:
        Console().print(comparison_table(ways), highlight=False)
    if svg is not None:
        typer.echo(f"Picture: {svg}")


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A callable that returns a model, or a pair (model, example_inputs).",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(help="File to write a page into, with pictures.", show_default=False),
    ] = None,
) -> None:
    """Show a model: sizes, rewritten graph, plan and kernels of each layer, predicted times.

    Prints tables, or writes them with pictures into one page that opens without network.
    """
    from rich.console import Console

    from comera_fx.inspect.factory import load
    from comera_fx.inspect.inspection import inspect_model
    from comera_fx.inspect.page import build_page
    from comera_fx.inspect.show import show

    with _errors_shown():
        model, example_inputs = load(target)
        found = inspect_model(model, example_inputs)
        if html is not None:
            _write(build_page(found, target), html, "the page cannot be written", "--html")
    if html is None:
        show(found, target, Console())
    else:
        typer.echo(f"Page: {html}")


@app.command()
def calibrate(
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU.")] = "cpu",
) -> None:
    """Measure how fast this machine runs what plans are made of, so that they are made for it.

    Takes a few seconds, in which little else should run. Without it plans are made by the speeds
    that come with the package.
    """
    from comera_fx.lower.calibrate import calibrate as measure
    from comera_fx.plan.cost import costs_path

    start = time.perf_counter()
    with _errors_shown():
        model = measure(device)
    typer.echo(model.summary())
    typer.echo(f"Written to {costs_path(device)} in {time.perf_counter() - start:.1f} s")


@contextmanager
def _errors_shown() -> Iterator[None]:
    """Print what a user can mend without a traceback; the exit status is then 2."""
    try:
        yield
    except ComeraError as error:
        from rich.console import Console
        from rich.markup import escape

        text = f"[red]Error:[/] {escape(str(error))}"
        Console(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _check_counts(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        if not 1 <= value <= MOST:
            raise ConfigError(
                f"{name} is out of range",
                got=f"{value!r:.40}",
                expected=f"an int from 1 to {MOST:,}",
                mend=f"write {name} 32",
            )


def _make_spec(sizes: tuple[int, int], rank: int, modes: str | None, layout: str) -> TTSpec:
    """Return the shape asked for, its ranks cut to what they can use.

    Raises:
        ConfigError: If the layout is unknown, or the modes cannot be read or are too small.
        SpecError: If the modes do not fit the layout.
    """
    from comera_fx.shapes import choose_modes
    from comera_fx.spec import TTSpec

    if layout not in ("tt", "ttm"):
        raise ConfigError(
            "--layout is unknown", got=layout, expected="tt or ttm", mend="write --layout tt"
        )
    known = cast("Layout", layout)
    if modes is None:
        choice = choose_modes(*sizes, layout=known, max_rank=rank)
        sides = choice.in_modes, choice.out_modes
    else:
        sides = _read_modes(modes, sizes)
    num_cores = sum(map(len, sides)) if layout == "tt" else len(sides[0])
    return TTSpec(known, *sides, (1, *[rank] * (num_cores - 1), 1)).clipped()


def _read_modes(text: str, sizes: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not re.fullmatch(
        r"[1-9]\d{0,9}(x[1-9]\d{0,9})*:[1-9]\d{0,9}(x[1-9]\d{0,9})*", text, re.ASCII
    ):
        raise ConfigError(
            "--modes cannot be read",
            got=text,
            expected="in modes, a colon, out modes; positive ints with x between them",
            mend="write --modes 12x8x8:12x16x16",
        )
    ins, outs = (tuple(map(int, side.split("x"))) for side in text.split(":"))
    if max(len(ins), len(outs)) > MAX_MODES:
        raise ConfigError(
            "--modes are too many",
            got=f"{len(ins)} in modes and {len(outs)} out modes",
            expected=f"at most {MAX_MODES} a side: a plan names its indices by single letters",
            mend="join modes: 2x2x2 to 8",
        )
    held = prod(ins), prod(outs)
    if held[0] < sizes[0] or held[1] < sizes[1]:
        raise ConfigError(
            "--modes are too small for the layer",
            got=f"{text}, which holds {held[0]} -> {held[1]}",
            expected=f"products of at least {sizes[0]} and {sizes[1]}; what is beyond is padding",
            mend="give larger modes, or none to have them chosen",
        )
    return ins, outs


def _write(text: str, path: Path, problem: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            problem,
            got=f"{path}: {error.strerror}",
            expected="a file in a folder that is there",
            mend=f"name another with {option}",
        ) from error


def main() -> None:
    """Run the command line; the entry point of the ``comera-fx`` script."""
    app()
