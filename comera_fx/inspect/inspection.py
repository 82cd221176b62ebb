"""All that is shown of one model, found once for the page and for the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from comera_fx.capture import tokens_seen
from comera_fx.inspect.plans import SharedPlan, distinct, plans_of_model
from comera_fx.inspect.stages import Stages, stages
from comera_fx.inspect.tree import Part, tree_of
from comera_fx.modules import TTEmbedding
from comera_fx.plan.lookup import LookupPlan, plan_lookup
from comera_fx.report import LayerReport, Report, explain_model


@dataclass(frozen=True)
class Inspection:
    """What there is to see of a model.

    Args:
        tree: Its parts and their sizes.
        report: Its layers, as ``comera_fx.explain`` gives them.
        stages: Its graphs, one a pass.
        plans: Each distinct plan of its linear layers in TT form.
        lookups: By name how rows of its tables in TT form are looked up.
        device_type: Where its weights are.
    """

    tree: Part
    report: Report
    stages: Stages
    plans: tuple[SharedPlan, ...]
    lookups: Mapping[str, LookupPlan]
    device_type: str

    @property
    def timed(self) -> list[LayerReport]:
        """The layers whose time is predicted."""
        return [layer for layer in self.report.layers.values() if layer.predicted_seconds]

    @property
    def seconds(self) -> float:
        """Predicted time of forward and backward of these layers, one after the other."""
        return sum(layer.predicted_seconds or 0.0 for layer in self.timed)

    @property
    def dense_seconds(self) -> float:
        """Likewise, were they dense."""
        return sum(layer.dense_predicted_seconds or 0.0 for layer in self.timed)


def inspect_model(model: nn.Module, example_inputs: object = None) -> Inspection:
    """Return all there is to see of a model, which is not changed.

    Args:
        model: An optimised model, or any other.
        example_inputs: As for ``comera_fx.optimize``; with it plans are for the number of tokens
            that each layer sees.

    Raises:
        ConfigError: If ``model`` is no module, or ``example_inputs`` no arguments.
        CaptureError: If the model fails on ``example_inputs``.
    """
    found = stages(model, example_inputs)
    seen = tokens_seen(model, example_inputs)
    lookups = {
        name: plan_lookup(module.spec, seen.get(name) or module.num_tokens_hint)
        for name, module in model.named_modules()
        if isinstance(module, TTEmbedding) and module.spec.num_params
    }
    first = next(model.parameters(), None)
    return Inspection(
        tree=tree_of(model),
        report=explain_model(model, seen),
        stages=found,
        plans=tuple(distinct(plans_of_model(model, seen))),
        lookups=lookups,
        device_type="cpu" if first is None else first.device.type,
    )
