"""The entry points ``optimize``, ``explain`` and ``graph``: they wire the stages together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from comera_fx import sharing
from comera_fx.capture import Captured, capture, tokens_seen
from comera_fx.compiled_code import note_optimised
from comera_fx.config import OptimizeConfig
from comera_fx.errors import ConfigError, WeightError
from comera_fx.lowering import lowering_passes
from comera_fx.measure import measure_layers
from comera_fx.modules import TTEmbedding, TTLinear, TTModule
from comera_fx.passes.embedding_to_ttm import EmbeddingToTTM
from comera_fx.passes.linear_to_tt import LinearToTT
from comera_fx.passes.match import layers_by_input
from comera_fx.passes.pipeline import Pass, run_pipeline
from comera_fx.policy import (
    Choice,
    cost_reason,
    decide,
    ranks_depend_on_weights,
    refuse_if_nothing,
)
from comera_fx.report import Report, active_watchers, attach_record, explain_model
from comera_fx.spec import TTSpec
from comera_fx.write_back import write_back

T = TypeVar("T")

LOOKS_UNTRAINED = 0.5
"""Share of a weight's norm that a decomposition may lose before it is worth a warning."""


def optimize(
    model: nn.Module,
    example_inputs: object = None,
    *,
    config: OptimizeConfig | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return ``model`` with its large linear layers and embedding tables in tensor-train form.

    The result is a copy of the user's own model, of the same class, with ``TTLinear`` and
    ``TTEmbedding`` modules under the old names. All checks come before any change: after an
    error the model is as it was. ``print(comera_fx.explain(result))`` says what was done to
    each layer and why others stayed dense.

    Make the optimizer after this call: the parameters are new ones.

    Args:
        model: Any ``nn.Module``.
        example_inputs: A tensor, a tuple or list of arguments, or a mapping of keyword
            arguments for one call of the model. With it the number of tokens is known, layers
            that are never called are left alone, and the captured graph is checked.
        config: What to rewrite, and into which shapes.
        inplace: Change ``model`` itself and return it, instead of a copy.

    Returns:
        The optimised model.

    Raises:
        ConfigError: If nothing would be compressed, or a setting names nothing in the model.
        SpecError: If modes or ranks that were given do not fit their layer.
        WeightError: If a weight cannot be decomposed, such as one with NaN in it.
        CaptureError: If the model fails on ``example_inputs``, or cannot be copied.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
        >>> config = OptimizeConfig(max_rank=16, init="random")
        >>> optimize(model, config=config)[0].spec.in_modes
        (8, 8, 4)
    """
    config = OptimizeConfig() if config is None else config
    _check_arguments(model, config)
    captured = capture(model, example_inputs)
    choices = decide(
        model,
        config,
        called=captured.called,
        num_tokens=captured.num_tokens,
        functional=captured.functional,
    )
    refuse_if_nothing(choices)
    choices, built = _build(choices, config)
    refuse_if_nothing(choices)
    _rewrite(captured, built)
    _warn_if_untrained(choices, built)
    result = write_back(model, built, inplace=inplace)
    # What is in TT form from before keeps its own record.
    recorded = (choice for choice in choices if choice.candidate.kind != "tt")
    layers = {choice.candidate.name: _recorded(choice) for choice in recorded}
    if config.share:
        sharing.install(result, *_that_may_share(result, captured))
    note_optimised(result.parameters())
    attach_record(result, capture=captured.kind, notes=captured.notes, layers=layers)
    return result


def explain(model: nn.Module, example_inputs: object = None, *, measure: bool = False) -> Report:
    """Report on every layer of ``model`` that holds a weight matrix.

    Args:
        model: Any model; parts of it that were optimised are found at any depth. It is not
            changed.
        example_inputs: As for ``optimize``; with it the model is run once, and costs are for the
            number of tokens that each layer sees. Otherwise, and for layers that are not called,
            they are for the number that was planned for.
        measure: Whether to run each linear layer in TT form, and its dense counterpart, alone,
            forward and backward, to set what was predicted against what it takes. Takes about
            half a second for each kind of layer.

    Returns:
        A report whose ``repr`` is a table. ``.layers[name]`` holds the figures.

    Raises:
        ConfigError: If ``model`` is no module, or ``example_inputs`` no arguments.
        CaptureError: If the model fails on ``example_inputs``.
    """
    _check_model(model, "explain")
    num_tokens = tokens_seen(model, example_inputs)
    measured = measure_layers(model, num_tokens) if measure else {}
    return explain_model(model, num_tokens, measured)


def graph(
    model: nn.Module, example_inputs: object = None, *, share: bool = False
) -> fx.GraphModule:
    """Return the FX graph of a model, each TT layer being a single operator node.

    So is each layer on a weight that the model makes from cores, by ``tt_dense``.

    Args:
        model: An optimised model, or any other.
        example_inputs: As for ``optimize``; with it the graph comes from ``torch.export``.
        share: Whether layers share in the graph what they share while the model runs: factors
            made in one batch, one product with an input that several read, where that is
            predicted to be faster in training.

    Returns:
        A graph that shares its weights with ``model``. ``meta["capture"]`` names the method
        and ``meta["notes"]`` says what the graph does not know.

    Raises:
        ConfigError: If ``model`` is no module, or ``example_inputs`` no arguments.
        CaptureError: If the model fails on ``example_inputs``.
    """
    _check_model(model, "graph")
    captured = capture(model, example_inputs)
    unwanted = ["ExpandAttention", "ExpandPlan", "BatchProducts"]
    unwanted += [] if share else ["BatchChains", "ShareInput"]
    passes = lowering_passes(without=unwanted)
    gm = run_pipeline(captured.gm, passes, watchers=active_watchers())
    gm.meta.update(capture=captured.kind, notes=list(captured.notes))
    return gm


def _check_model(model: object, verb: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{verb} works on modules",
            got=type(model).__name__,
            expected="a torch.nn.Module",
            mend="pass the model itself",
        )


def _check_arguments(model: object, config: object) -> None:
    _check_model(model, "optimize")
    if not isinstance(config, OptimizeConfig):
        raise ConfigError(
            "the config is of the wrong type",
            got=type(config).__name__,
            expected="a comera_fx.OptimizeConfig",
            mend="write config=comera_fx.OptimizeConfig(max_rank=32)",
        )
    wrapper = type(model).__name__
    if wrapper in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"):
        raise ConfigError(
            "the model is wrapped already",
            got=f"a {wrapper}, which holds on to the weights it was made with",
            expected="the plain model",
            mend="optimize first, then wrap or compile the result",
        )


# ---- making the TT layers ----


def _build(
    choices: Sequence[Choice], config: OptimizeConfig
) -> tuple[list[Choice], dict[nn.Module, TTModule]]:
    """Make the TT layers, in the model's order so that a seed means the same every time."""
    generator = torch.Generator().manual_seed(config.seed)
    decided: list[Choice] = []
    built: dict[nn.Module, TTModule] = {}
    for choice in choices:
        if choice.spec is None:
            decided.append(choice)
            continue
        layer = _make_layer(choice, choice.spec, config, generator)
        if ranks_depend_on_weights(config):
            choice = _with_ranks_met(choice, layer, config)
        decided.append(choice)
        if choice.spec is not None:
            built[choice.candidate.module] = layer
    return decided, built


def _with_ranks_met(choice: Choice, layer: TTModule, config: OptimizeConfig) -> Choice:
    """Decide on the costs of a layer whose ranks a tolerance chose."""
    spec, error = layer.spec, layer.init_error
    reason = cost_reason(choice.candidate, spec, choice.num_tokens, config, named=choice.named)
    if reason is not None:
        return replace(choice, spec=None, reason=reason[0], detail=reason[1])
    if config.tol is None or error is None or error <= config.tol:
        return choice
    rank = max(spec.ranks)
    unmet = f"tol {config.tol:g} not met at rank {rank}: error {error:#.2g}"
    return replace(choice, detail=unmet)


def _make_layer(
    choice: Choice, spec: TTSpec, config: OptimizeConfig, generator: torch.Generator
) -> TTModule:
    name, dense = choice.candidate.shown, choice.candidate.module
    weight = dense.weight
    assert isinstance(weight, nn.Parameter), "the policy chooses layers with a plain weight only"
    bounds = _bounds(name, weight)
    settings: dict[str, Any] = {
        "init": config.init,
        "tol": config.tol,
        "std": _std(weight, *bounds) if config.init == "random" else None,
        "generator": generator,
        "num_tokens_hint": choice.num_tokens,
        "name": name,
    }
    if isinstance(dense, nn.Linear):
        return TTLinear.from_linear(dense, spec, plan=config.effective_plan, **settings)
    assert isinstance(dense, nn.Embedding), "the policy chooses linear layers and embeddings only"
    return TTEmbedding.from_embedding(dense, spec, **settings)


def _bounds(name: str, weight: Tensor) -> tuple[float, float]:
    """Return the least and the greatest entry, which are finite: neither init can do without."""
    least, most = (float(bound) for bound in weight.detach().aminmax())
    if not (math.isfinite(least) and math.isfinite(most)):
        raise WeightError(
            f"the weight of {name} holds NaN or infinity",
            got=f"entries from {least} to {most}",
            expected="finite numbers, for either init",
            mend="repair or initialise the weight, or leave the layer out with exclude=",
        )
    return least, most


def _std(weight: Tensor, least: float, most: float) -> float:
    """Return the standard deviation of the weight, or a usual one where it is constant.

    A weight of zeros keeps its zero: models count on layers that start by doing nothing.
    """
    if least == most:  # where not zero, that of nn.Linear's own initialisation
        return 1 / math.sqrt(3 * weight.shape[1]) if most else 0.0
    size = max(-least, most)  # squares of entries near the largest float would overflow
    return size * float((weight.detach() / size).float().std(correction=0))


def _rewrite(captured: Captured, built: Mapping[nn.Module, TTModule]) -> None:
    """Run the passes; they and the policy must agree on what is replaced."""

    def choose_linear(name: str, dense: nn.Linear) -> TTLinear | None:
        return _one_of(TTLinear, built.get(dense))

    def choose_embedding(name: str, dense: nn.Embedding) -> TTEmbedding | None:
        return _one_of(TTEmbedding, built.get(dense))

    passes: list[Pass] = [LinearToTT(choose_linear), EmbeddingToTTM(choose_embedding)]
    rewritten = run_pipeline(captured.gm, passes, watchers=active_watchers())
    missing = set(built.values()) - set(rewritten.modules())
    assert not missing, f"the policy chose layers that no pass replaced: {missing}"


def _one_of(wanted: type[T], layer: TTModule | None) -> T | None:
    return layer if isinstance(layer, wanted) else None


def _that_may_share(model: nn.Module, captured: Captured) -> tuple[list[str], list[list[str]]]:
    """Return the names of the TT layers of a model, and of those that read one input."""
    layers = [name for name, module in model.named_modules() if isinstance(module, TTLinear)]
    readers = [] if captured.kind == "module_graph" else layers_by_input(captured.gm)
    joint = [[name for name in names if name in layers] for names in readers]
    return layers, [names for names in joint if len(names) > 1]


def _warn_if_untrained(choices: Sequence[Choice], built: Mapping[nn.Module, TTModule]) -> None:
    lost = {
        choice.candidate.shown: error
        for choice in choices
        if choice.candidate.module in built
        and (error := built[choice.candidate.module].init_error) is not None
        and error > LOOKS_UNTRAINED
    }
    if not lost:
        return
    name, worst = max(lost.items(), key=lambda item: item[1])
    warnings.warn(
        f"decomposition loses more than half of the weight in {len(lost)} of {len(built)} layers "
        f"(most in {name}: relative error {worst:.2f}); these look untrained. To train from "
        'scratch use OptimizeConfig(init="random"); to keep what the weights hold raise max_rank.',
        UserWarning,
        stacklevel=3,
    )


def _recorded(choice: Choice) -> dict[str, Any]:
    return {
        "num_tokens": choice.num_tokens,
        "reason": choice.reason,
        "detail": choice.detail,
    }
