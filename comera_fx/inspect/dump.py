"""A folder with all there is to see of one run of passes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import fx

from comera_fx.inspect.draw import graph_svg
from comera_fx.inspect.plans import SharedPlan, distinct, plans_of_graph
from comera_fx.passes.pipeline import Pass, copy_graph_module
from comera_fx.plan.plan import Plan
from comera_fx.report import dump_to, watched_by

PLANS, BEFORE, AFTER = "plans.txt", "before.svg", "after.svg"


@contextmanager
def dump_graphs(folder: str | os.PathLike[str], gm: fx.GraphModule) -> Iterator[None]:
    """Write what the passes that run in this context do to one graph.

    The folder then holds one diff per pass that changed the graph, as ``comera_fx.dump_to`` writes
    them; ``plans.txt``, the table of each distinct plan with the layers that run by it; and
    ``before.svg`` and ``after.svg``, the graph before the first pass and after the last. What
    passes changed is written after an error as well.

    Args:
        folder: Where to; made if it is not there.
        gm: The graph that the passes start from.

    Raises:
        ConfigError: If ``folder`` is no path.

    Example:
        >>> from comera_fx.passes.pipeline import run_pipeline
        >>> from comera_fx.report import active_watchers
        >>> gm = comera_fx.graph(model)
        >>> with dump_graphs("seen", gm):
        ...     gm = run_pipeline(gm, [], watchers=active_watchers())
        >>> sorted(path.name for path in Path("seen").iterdir())
        ['after.svg', 'before.svg', 'plans.txt']
    """
    last = before = copy_graph_module(gm)
    plans = dict(plans_of_graph(gm))

    def watch(graph_pass: Pass, old: fx.GraphModule, new: fx.GraphModule) -> None:
        nonlocal last
        last = copy_graph_module(new)
        for name, plan in plans_of_graph(new):
            plans.setdefault(name, plan)

    with dump_to(folder), watched_by(watch):
        try:
            yield
        finally:
            _write(Path(folder), before, last, plans)


def _write(
    folder: Path, before: fx.GraphModule, after: fx.GraphModule, plans: dict[str, Plan]
) -> None:
    (folder / BEFORE).write_text(graph_svg(before, "before the passes"), encoding="utf-8")
    (folder / AFTER).write_text(graph_svg(after, "after the passes"), encoding="utf-8")
    (folder / PLANS).write_text(plan_tables(distinct(plans.items())), encoding="utf-8")


def plan_tables(plans: list[SharedPlan]) -> str:
    """Return the table of each plan under the names of its layers."""
    if not plans:
        return "No linear layer in TT form.\n"
    return "\n".join(f"{', '.join(shared.names)}\n\n{shared.plan!r}\n" for shared in plans)
