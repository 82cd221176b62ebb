"""The passes between a captured graph and the one that runs, in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from comera_fx.errors import ConfigError
from comera_fx.passes.batch_chains import BatchChains
from comera_fx.passes.batch_products import BatchProducts
from comera_fx.passes.expand_attention import ExpandAttention
from comera_fx.passes.expand_plan import ExpandPlan
from comera_fx.passes.fuse_reconstruction import FuseReconstruction
from comera_fx.passes.pipeline import Pass, Watcher, run_pipeline
from comera_fx.passes.share_input import ShareInput
from comera_fx.passes.tt_module_to_op import TTModuleToOp
from comera_fx.policy import worth_batching, worth_sharing

NAMES = (
    "ExpandAttention",
    "TTModuleToOp",
    "FuseReconstruction",
    "BatchChains",
    "ShareInput",
    "ExpandPlan",
    "BatchProducts",
)


def lowering_passes(without: Collection[str] = ()) -> list[Pass]:
    """Return the passes between capture and what runs, first to run first.

    Args:
        without: Names of passes to leave out.

    Raises:
        ConfigError: If there is no pass of such a name.

    Example:
        >>> [type(each).__name__ for each in lowering_passes(without=["ExpandAttention"])][:2]
        ['TTModuleToOp', 'FuseReconstruction']
    """
    unknown = sorted(set(without) - set(NAMES))
    if unknown:
        raise ConfigError(
            "there is no such pass to leave out",
            got=", ".join(unknown),
            expected=f"names among {', '.join(NAMES)}",
            mend="correct the name",
        )
    passes: list[Pass] = [
        ExpandAttention(),
        TTModuleToOp(),
        FuseReconstruction(),
        BatchChains(worth_sharing),
        ShareInput(),
        ExpandPlan(),
        BatchProducts(worth_batching),
    ]
    return [each for each in passes if type(each).__name__ not in without]


def lower_graph(
    gm: fx.GraphModule, passes: Sequence[Pass], *, watchers: Sequence[Watcher] = ()
) -> fx.GraphModule:
    """Run passes on a graph and on the graphs that it holds, and return the copy.

    Args:
        gm: The graph. It is not changed.
        passes: First to run first.
        watchers: As of ``run_pipeline``.
    """
    lowered = run_pipeline(gm, passes, watchers=watchers)
    for name, child in list(lowered.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(lowered, name, lower_graph(child, passes, watchers=watchers))
    return lowered
