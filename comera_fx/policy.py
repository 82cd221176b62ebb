"""Decide per layer: the tensor-train shape it gets, or the reason why it stays dense."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import Tensor, fx, nn

from comera_fx.candidates import Candidate, find_candidates, structural_reasons
from comera_fx.config import Layout, Objective, OptimizeConfig, PlanConfig, Ranks
from comera_fx.errors import ConfigError, PlanError, SpecError
from comera_fx.modules import DEFAULT_NUM_TOKENS
from comera_fx.plan.cost import cost_model
from comera_fx.plan.linear import bucket_tokens, plan_linear
from comera_fx.plan.plan import Plan
from comera_fx.plan.shared import Form, Sizes, plan_shared
from comera_fx.shapes import MAX_MODES, TRAINABLE_MODES, choose_modes, choose_wide
from comera_fx.spec import TTSpec

T = TypeVar("T")

Reason = tuple[str, str]
"""Why a layer stays dense, equal for all layers with the same reason; and the figures behind it."""


@dataclass(frozen=True, eq=False)
class Choice:
    """What is done with one layer.

    Args:
        candidate: The layer.
        spec: Its shape in TT form, ``None`` if it stays dense.
        reason: Why it stays dense; empty if it does not.
        detail: The figures behind the reason; of a layer in TT form, the wish that was not met.
        num_tokens: Rows of input planned for.
        named: Whether ``modes``, ``ranks`` or ``targets`` name it.
    """

    candidate: Candidate
    spec: TTSpec | None
    reason: str
    detail: str
    num_tokens: int
    named: bool


def decide(
    model: nn.Module,
    config: OptimizeConfig,
    *,
    called: frozenset[str],
    num_tokens: Mapping[str, int],
    functional: Mapping[str, str],
) -> list[Choice]:
    """Choose for every layer of ``model`` that holds a weight matrix; nothing is changed.

    Args:
        model: The model.
        config: What is wanted.
        called: Names of the layers that the captured graph calls.
        num_tokens: Rows of input seen, by name; empty if the model was not run.
        functional: Weights read without a call of their layer, ``"fc.weight"`` to a node's text.

    Returns:
        One choice per layer, in the order of the model's modules.

    Raises:
        ConfigError: If a pattern matches no layer.
        SpecError: If modes or ranks that were given do not fit their layer.
    """
    candidates = find_candidates(model)
    _check_patterns(config, model, candidates)
    reasons = structural_reasons(model, candidates)
    choices = []
    for candidate in candidates:
        name = candidate.name
        tokens = num_tokens.get(name) or config.num_tokens_hint
        spec, named = None, _is_named(candidate, config)
        reason = (
            _structural_reason(name, reasons)
            or _use_reason(name, called, num_tokens, functional)
            or _wish_reason(candidate, config)
        )
        if reason is None:
            spec = _spec(candidate, config)
            if not ranks_depend_on_weights(config):
                reason = cost_reason(candidate, spec, tokens, config, named=named)
        if reason is None:
            choices.append(Choice(candidate, spec, "", "", tokens, named))
        else:
            choices.append(Choice(candidate, None, *reason, tokens, named))
    return choices


def ranks_depend_on_weights(config: OptimizeConfig) -> bool:
    """Whether ranks, and so costs, are known only once the weights have been decomposed."""
    return config.tol is not None and config.init == "decompose"


def cost_reason(
    candidate: Candidate, spec: TTSpec, num_tokens: int, config: OptimizeConfig, *, named: bool
) -> Reason | None:
    """Return why the TT form of a layer costs too much, ``None`` if it does not.

    Args:
        candidate: The layer.
        spec: Its shape in TT form.
        num_tokens: Rows of input seen or hinted.
        config: Says whether costs at run time count, and how to plan.
        named: Whether the layer was named by the user, which leaves these costs out.
    """
    if spec.num_params > candidate.num_params:
        figures = f"{spec.num_params:,} > {candidate.num_params:,}"
        return "TT form would hold more parameters than dense", figures
    if candidate.kind != "linear":
        return None
    weight = candidate.module.weight
    assert isinstance(weight, nn.Parameter), "structural reasons come first"
    reason = _limit_reason(spec, num_tokens, weight, config.plan)
    if reason is None and config.only_if_faster and not named:
        reason = _objective_reason(candidate, spec, num_tokens, weight, config.plan)
    return reason


def worth_sharing(spec: TTSpec, nodes: Sequence[fx.Node]) -> Form:
    """Return how equal-shaped TT layers are predicted to train fastest on factors made at once.

    Args:
        spec: Shape of each.
        nodes: Their ``tt_linear`` nodes.
    """
    if any(node.kwargs.get("memory_limit_bytes") is not None for node in nodes):
        return "own"  # only plans of single layers know their peak
    values = (node.all_input_nodes[0].meta.get("val") for node in nodes)
    inputs = [value for value in values if value is not None]
    rows = [value.numel() // max(value.shape[-1], 1) for value in inputs if value.dim()]
    known = [count for count in rows if isinstance(count, int)]  # not a symbol
    hint = max(int(str(n.kwargs.get("num_tokens_hint", DEFAULT_NUM_TOKENS))) for n in nodes)
    sizes = Sizes(
        spec,
        bucket_tokens(max(known, default=hint)),
        itemsize=inputs[0].element_size() if inputs else 4,
        device_type=inputs[0].device.type if inputs else "cpu",
    )
    num_layers = len({str(node.args[1]) for node in nodes})
    return plan_shared(sizes, num_layers).form(len(nodes))


def worth_batching(num_products: int, shape: tuple[int, int, int], like: Tensor) -> bool:
    """Whether equal products of weights are predicted to train faster as one batched product.

    Args:
        num_products: How many there are.
        shape: Their ``(m, n, k)``.
        like: A tensor of their dtype and device.
    """
    m, n, k = shape
    costs = cost_model(like.device.type)
    # Operands are stacked; in training their gradients and those of the results are, too.
    moved = 2 * num_products * (m * k + k * n + m * n) * like.element_size()
    saved = 3 * (num_products - 1) * costs.launch_seconds
    return moved / costs.bytes_per_second + 3 * costs.launch_seconds < saved


def refuse_if_nothing(choices: Sequence[Choice]) -> None:
    """Raise if no layer gets a TT form.

    Raises:
        ConfigError: With one entry per reason.
    """
    if any(choice.spec is not None for choice in choices):
        return
    names_of: dict[str, list[str]] = {}
    for choice in choices:
        names_of.setdefault(choice.reason, []).append(choice.candidate.shown)
    got = "; ".join(f"{_listed(names)}: {reason}" for reason, names in names_of.items())
    raise ConfigError(
        "nothing in the model would be compressed",
        got=got or "a model without weight matrices",
        expected="an nn.Linear or nn.Embedding that is supported, asked for and large enough",
        mend="change targets, exclude, min_params, max_rank or only_if_faster, as the reasons say",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{len(names)} layers ({names[0]}, ...)"


# ---- reasons ----


def _structural_reason(name: str, reasons: Mapping[str, str]) -> Reason | None:
    return (reasons[name], "") if name in reasons else None


def _use_reason(
    name: str,
    called: frozenset[str],
    num_tokens: Mapping[str, int],
    functional: Mapping[str, str],
) -> Reason | None:
    weight_name = f"{name}.weight" if name else "weight"
    if weight_name in functional:
        text = "its weight is also read without calling the layer: not supported yet"
        return text, functional[weight_name]
    if num_tokens and name not in num_tokens:
        return "not called on the example_inputs", ""
    if name not in called:
        return "no call of it is in the captured graph", ""
    return None


def _wish_reason(candidate: Candidate, config: OptimizeConfig) -> Reason | None:
    if _matches_any(config.exclude, candidate):
        return "excluded", ""
    if config.targets is not None and not _matches_any(config.targets, candidate):
        return "not among the targets", ""
    if candidate.num_params < max(config.min_params, 1):
        return f"fewer than min_params={config.min_params:,} weights", f"{candidate.num_params:,}"
    return None


def _limit_reason(
    spec: TTSpec, num_tokens: int, weight: nn.Parameter, config: PlanConfig
) -> Reason | None:
    """The limit must hold for the plan that runs, which serves more tokens than were seen."""
    if config.memory_limit_bytes is None:
        return None
    planned_tokens = bucket_tokens(num_tokens)
    try:
        _plan(spec, planned_tokens, weight, config, config.memory_limit_bytes)
    except PlanError as error:
        return f"no plan for {planned_tokens:,} tokens is within memory_limit_bytes", error.expected
    return None


_WORSE: dict[Objective, str] = {
    "time": "TT form is predicted to be slower than dense",
    "flops": "TT form would take more FLOPs than dense",
    "memory": "TT form would keep more bytes for backward than dense",
}


def _objective_reason(
    candidate: Candidate, spec: TTSpec, num_tokens: int, weight: nn.Parameter, config: PlanConfig
) -> Reason | None:
    """Compare what is minimised with the dense layer's, which has no padding."""
    planned = _plan(spec, num_tokens, weight, config, None)
    ours, dense = _compared(planned, candidate.sizes, config.objective)
    if ours <= dense:
        return None
    figures = f"{ours:,} > {dense:,}"
    if config.objective == "time":
        figures = f"{1e3 * ours:.3f} ms > {1e3 * dense:.3f} ms"
    tokens = f"{num_tokens:,} token{'s' * (num_tokens != 1)}"
    return f"{_WORSE[config.objective]} at {tokens}", figures


def _plan(
    spec: TTSpec, num_tokens: int, weight: nn.Parameter, config: PlanConfig, limit: int | None
) -> Plan:
    """Return the plan that a layer in place of a dense one with this weight would run."""
    return plan_linear(
        spec,
        num_tokens,
        config.objective,
        memory_limit_bytes=limit,
        pad_ranks=config.pad_ranks,
        itemsize=weight.element_size(),
        device_type=weight.device.type,
    )


def _compared(plan: Plan, sizes: tuple[int, int], objective: Objective) -> tuple[float, float]:
    """Return what the plan costs, and what a dense layer of these sizes does."""
    tokens, itemsize = plan.num_tokens, plan.itemsize
    if objective == "time":
        dense = plan.costs.dense_seconds(tokens, sizes, itemsize, needs_input_grad=True)
        return plan.seconds, dense
    if objective == "flops":
        return plan.flops_forward + plan.flops_backward, 6 * tokens * math.prod(sizes)
    kept = plan.saved_bytes + plan.spec.num_params * itemsize
    return kept, (tokens * sizes[0] + math.prod(sizes)) * itemsize


# ---- patterns ----


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _matches_any(patterns: Iterable[str], candidate: Candidate) -> bool:
    return any(_matches(pattern, candidate.names) for pattern in patterns)


def _first(patterns: Mapping[str, T], candidate: Candidate) -> T | None:
    found = (value for key, value in patterns.items() if _matches(key, candidate.names))
    return next(found, None)


def _is_named(candidate: Candidate, config: OptimizeConfig) -> bool:
    named = (*config.modes, *config.ranks, *(config.targets or ()))
    return _matches_any(named, candidate)


def _check_patterns(
    config: OptimizeConfig, model: nn.Module, candidates: Sequence[Candidate]
) -> None:
    names = [name for candidate in candidates for name in candidate.names]
    # A leaf without a matrix, such as a norm, may be named: there is nothing to misunderstand.
    leaves = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if next(module.children(), None) is None
    ]
    fields: dict[str, Iterable[str]] = {
        "modes": config.modes,
        "ranks": config.ranks,
        "layouts": config.layouts,
        "targets": config.targets or (),
        "exclude": config.exclude,
    }
    for field, patterns in fields.items():
        for pattern in patterns:
            if not _matches(pattern, (*names, *leaves)):
                _refuse_pattern(field, pattern, names)


def _refuse_pattern(field: str, pattern: str, names: list[str]) -> None:
    inside = f"{pattern}.*"
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
    raise ConfigError(
        f"OptimizeConfig.{field} has a pattern that matches no layer",
        got=repr(pattern),
        expected="an fnmatch pattern over qualified names; the closest are "
        + (", ".join(map(repr, close)) or "none: no layer holds a weight matrix"),
        mend=f"write {inside!r} for the layers inside"
        if _matches(inside, names)
        else "correct the name, or use a wildcard such as '*.fc1'",
    )


# ---- shapes ----


def _spec(candidate: Candidate, config: OptimizeConfig) -> TTSpec:
    default: Layout = "tt" if candidate.kind == "linear" else "ttm"
    layout = _first(config.layouts, candidate) or default
    ranks = _first(config.ranks, candidate) or config.max_rank
    is_new_table = candidate.kind == "embedding" and config.init == "random"
    has_modes = _first(config.modes, candidate) is not None
    if is_new_table and layout == "tt" and isinstance(ranks, int) and not has_modes:
        return choose_wide(*candidate.sizes, max_rank=ranks)
    in_modes, out_modes = _modes(candidate, config, layout, ranks)
    num_cores = len(in_modes) + (len(out_modes) if layout == "tt" else 0)
    asked = ranks if isinstance(ranks, tuple) else (1, *[ranks] * (num_cores - 1), 1)
    try:
        return TTSpec(layout, in_modes, out_modes, asked).clipped()
    except SpecError as error:
        raise SpecError(
            f"the shape asked for {candidate.shown} is malformed: {error.problem}",
            got=f"{error.got}, with modes {in_modes} -> {out_modes}",
            expected=error.expected,
            mend=error.mend,
        ) from error


def _modes(
    candidate: Candidate, config: OptimizeConfig, layout: Layout, ranks: Ranks
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    given = _first(config.modes, candidate)
    in_size, out_size = candidate.sizes
    if given is None:
        max_rank = max(ranks) if isinstance(ranks, tuple) else ranks
        is_new_table = layout == "ttm" and config.init == "random"
        most = TRAINABLE_MODES if is_new_table else MAX_MODES
        choice = choose_modes(in_size, out_size, layout=layout, max_rank=max_rank, most=most)
        return choice.in_modes, choice.out_modes
    spec = (tuple(given[0]), tuple(given[1]))
    for side, modes, size in zip(("in", "out"), spec, (in_size, out_size), strict=True):
        if math.prod(modes) < size:
            raise SpecError(
                f"the {side}_modes given for {candidate.shown} are too small",
                got=f"{modes}, whose product is {math.prod(modes)}",
                expected=f"a product of at least {size}, the layer's {side} size",
                mend=f"enlarge the modes; a product above {size} is padded",
            )
    return spec
