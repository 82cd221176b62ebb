"""What a report says of one layer: its shape, its size, what it costs, or why it is dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from comera_fx.candidates import Candidate
from comera_fx.errors import PlanError
from comera_fx.measure import Measured
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.plan.cost import cost_model
from comera_fx.plan.linear import plan_linear
from comera_fx.plan.lookup import plan_lookup
from comera_fx.plan.plan import Plan
from comera_fx.shapes import ModeChoice


@dataclass(frozen=True)
class LayerReport:
    """One layer that holds a weight matrix.

    What is not known, or has no meaning for the layer, is ``None``.

    Args:
        name: Qualified name.
        kind: "linear", "embedding", or the kind of a layer that is not supported.
        layout: "tt" or "ttm"; ``None`` for a dense layer, as are modes and ranks.
        in_modes: Factors of the in features, or of the rows of a table.
        out_modes: Factors of the out features, or of the columns.
        mode_balance: Largest mode over the smallest above 1: narrow modes make slow products.
        ranks: Bond ranks as they are now.
        dense_params: Numbers in the dense weight.
        tt_params: Numbers in the cores.
        ratio: ``dense_params / tt_params``; ``None`` if no rank is left.
        flops_forward: Of the plan at ``num_tokens``; 2 a multiply-add.
        flops_backward: Likewise, every gradient wanted.
        bytes: Size of the weight as it is held now.
        peak_bytes: Most that the plan of a linear layer holds at once, cores left out.
        saved_bytes: What it keeps from forward to backward.
        dense_flops_forward: Of the dense layer at ``num_tokens``; a table needs none.
        dense_flops_backward: Likewise, every gradient wanted.
        dense_saved_bytes: What a dense linear layer keeps from forward to backward: its input and
            its weight. To compare with ``saved_bytes + bytes``.
        predicted_seconds: Forward and backward of a linear layer's plan at ``num_tokens``, every
            gradient wanted.
        dense_predicted_seconds: Those of the dense layer.
        measured_seconds: What the layer took, alone; known where ``explain`` was to measure.
        dense_measured_seconds: What the dense layer took.
        prediction_error: ``predicted_seconds / measured_seconds - 1``.
        dense_prediction_error: Likewise of the dense layer.
        num_tokens: Rows of input planned for, or seen.
        init_error: Relative Frobenius error of the decomposition; ``None`` after a random start.
        reason: Why the layer is dense; empty for a TT layer.
        detail: The figures behind the reason; of a TT layer, what was asked for and not met.
    """

    name: str
    kind: str
    dense_params: int
    bytes: int
    layout: str | None = None
    in_modes: tuple[int, ...] | None = None
    out_modes: tuple[int, ...] | None = None
    mode_balance: float | None = None
    ranks: tuple[int, ...] | None = None
    tt_params: int | None = None
    ratio: float | None = None
    flops_forward: int | None = None
    flops_backward: int | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    dense_flops_forward: int | None = None
    dense_flops_backward: int | None = None
    dense_saved_bytes: int | None = None
    predicted_seconds: float | None = None
    dense_predicted_seconds: float | None = None
    measured_seconds: float | None = None
    dense_measured_seconds: float | None = None
    prediction_error: float | None = None
    dense_prediction_error: float | None = None
    num_tokens: int | None = None
    init_error: float | None = None
    reason: str = ""
    detail: str = ""


def tt_layer(
    candidate: Candidate,
    module: TTLinear | TTEmbedding,
    known: Mapping[str, Any],
    num_tokens: int,
    measured: Measured | None = None,
) -> LayerReport:
    """Report on a layer in TT form.

    Args:
        candidate: Where it is in the model.
        module: The layer.
        known: Its record: "detail".
        num_tokens: Rows of input to give the costs for.
        measured: What it was measured to take at that many.
    """
    spec = module.spec
    itemsize = module.cores[0].element_size()
    details = [known.get("detail", "")]
    figures: dict[str, Any] = {}
    if isinstance(module, TTLinear):
        figures, over = _linear_figures(module, num_tokens, measured)
        details.append(over)
    else:
        figures = _embedding_figures(module, num_tokens)
    return LayerReport(
        name=candidate.name,
        kind=module.kind,
        layout=spec.layout,
        in_modes=spec.in_modes,
        out_modes=spec.out_modes,
        mode_balance=ModeChoice(spec.in_modes, spec.out_modes).balance,
        ranks=spec.ranks,
        dense_params=module.dense_params,
        tt_params=spec.num_params,
        ratio=module.dense_params / spec.num_params if spec.num_params else None,
        bytes=spec.num_params * itemsize,
        num_tokens=num_tokens,
        init_error=module.init_error,
        detail="; ".join(filter(None, details)),
        **figures,
    )


def dense_layer(
    candidate: Candidate, reason: str | None, known: Mapping[str, Any], num_tokens: int | None
) -> LayerReport:
    """Report on a layer that is dense.

    Args:
        candidate: Where it is in the model.
        reason: Why it is dense; ``None`` if nothing was ever tried.
        known: Its record: "detail".
        num_tokens: Rows of input to give the costs for, if known.
    """
    weights = [p for p in candidate.module._parameters.values() if p is not None]
    itemsize = weights[0].dtype.itemsize if weights else 0
    costs: dict[str, Any] = {}
    if candidate.kind in ("linear", "embedding") and num_tokens is not None:
        costs = _dense_costs(candidate.kind, candidate.sizes, num_tokens, weights[0])
    return LayerReport(
        name=candidate.name,
        kind=candidate.kind,
        dense_params=candidate.num_params,
        bytes=candidate.num_params * itemsize,
        reason=reason or "comera_fx.optimize has not been applied",
        detail=known.get("detail", ""),
        num_tokens=num_tokens,
        **costs,
    )


_PLANNED = ("flops_forward", "flops_backward", "peak_bytes", "saved_bytes")


def _linear_figures(
    module: TTLinear, num_tokens: int, measured: Measured | None
) -> tuple[dict[str, Any], str]:
    """Return the costs of the plan, and what there is to say where it is over its limit."""
    sizes = module.in_features, module.out_features
    costs = _dense_costs("linear", sizes, num_tokens, module.cores[0])
    if not module.spec.num_params:
        return {**costs, **dict.fromkeys(_PLANNED, 0)}, ""
    planned, over = plan_of(module, num_tokens)
    costs.update({name: getattr(planned, name) for name in _PLANNED})
    costs["predicted_seconds"] = planned.seconds
    if measured is not None:
        dense = costs["dense_predicted_seconds"]
        costs["measured_seconds"] = measured.seconds
        costs["dense_measured_seconds"] = measured.dense_seconds
        costs["prediction_error"] = planned.seconds / measured.seconds - 1
        costs["dense_prediction_error"] = dense / measured.dense_seconds - 1
    return costs, over


def plan_of(module: TTLinear, num_tokens: int) -> tuple[Plan, str]:
    """Return the plan of a layer, and what there is to say where it is over its limit.

    Ranks loaded from a checkpoint may break a limit; the forward pass then says so too.

    Args:
        module: The layer; it has ranks left.
        num_tokens: Rows of input.
    """
    config, core = module.plan_config, module.cores[0]
    limit = config.memory_limit_bytes

    def planned(limit: int | None) -> Plan:
        return plan_linear(
            module.spec,
            num_tokens,
            config.objective,
            memory_limit_bytes=limit,
            pad_ranks=config.pad_ranks,
            itemsize=core.element_size(),
            device_type=core.device.type,
        )

    try:
        return planned(limit), ""
    except PlanError as error:
        over = f"no plan for {num_tokens:,} tokens is within memory_limit_bytes={limit}"
        return planned(None), f"{over}: {error.expected}"


def _embedding_figures(module: TTEmbedding, num_tokens: int) -> dict[str, Any]:
    spec = module.spec
    sizes = module.num_embeddings, module.embedding_dim
    forward = plan_lookup(spec, num_tokens).flops if spec.num_params else 0
    return {
        "flops_forward": forward,
        "flops_backward": 2 * forward,  # each product has the gradients of its two operands
        **_dense_costs("embedding", sizes, num_tokens, module.cores[0]),
    }


def _dense_costs(
    kind: str, sizes: tuple[int, int], num_tokens: int, weight: Tensor
) -> dict[str, Any]:
    """Return what a dense layer costs; a dense table is read, not multiplied."""
    if kind == "embedding":
        return {"dense_flops_forward": 0, "dense_flops_backward": 0}
    in_size, out_size = sizes
    itemsize = weight.dtype.itemsize
    forward = 2 * num_tokens * in_size * out_size
    costs = cost_model(weight.device.type)
    return {
        "dense_flops_forward": forward,
        "dense_flops_backward": 2 * forward,
        "dense_saved_bytes": (num_tokens + out_size) * in_size * itemsize,
        "dense_predicted_seconds": costs.dense_seconds(
            num_tokens, sizes, itemsize, needs_input_grad=True
        ),
    }
