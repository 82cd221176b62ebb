"""Command line of the package: ``comera-fx demo``.

What a command needs is imported inside it, so that help and usage errors come at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from comera_fx.demo.config import DemoConfig

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
    from rich.markup import escape

    from comera_fx.demo.run import run_demo
    from comera_fx.errors import ComeraError

    given: dict[str, Any] = {
        "steps": steps,
        "rank": rank,
        "target_ratio": target_ratio,
        "device": device,
        "seed": seed,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        status = run_demo(settings, out, resume=resume, console=Console())
    except ComeraError as error:
        text = f"[red]Error:[/] {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if status:
        raise typer.Exit(status)


def main() -> None:
    """Run the command line; the entry point of the ``comera-fx`` script."""
    app()
