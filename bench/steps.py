"""Training steps of a network in several versions: checked against float64, then timed in turns.

A network is built of linear layers: one, a chain, or three that read one input. Its reference is
the same network of dense float64 layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.timing import Row, medians_ms, repeats_within
from bench.versions import EINSUM, LOW_RANK, dense_weight

Build = Callable[[Sequence[nn.Module]], nn.Module]

SECONDS = 15.0
"""What the timed turns of one workload may take, all versions together."""
TOLERANCE = 1e-4
"""How far float32 results may be from the reference, as a share of their largest number."""
FASTER_OF = {"low_rank": LOW_RANK, "einsum": EINSUM}
"""Versions that differ in a setting that nobody would choose wrongly: the faster one counts."""
OWN_NUMBERS = ("tltorch",)
"""Versions that do not hold the numbers of the others."""


@dataclass(frozen=True)
class Version:
    """A network in one version.

    Args:
        model: The network.
        layers: Its linear layers, in the order that the network is built of.
    """

    model: nn.Module
    layers: Sequence[nn.Module]


@dataclass(frozen=True)
class Data:
    """What a step is given.

    Args:
        x: The input, which gets a gradient.
        grads: Gradient of each output; none, if the network runs forward only.
    """

    x: Tensor
    grads: tuple[Tensor, ...]

    def double(self) -> Data:
        """Return a copy in float64."""
        x = self.x.detach().double().requires_grad_(self.x.requires_grad)
        return Data(x, tuple(grad.double() for grad in self.grads))


@dataclass(frozen=True)
class Results:
    """What a step computes: outputs, gradient of the input, of each layer's dense weight."""

    outputs: tuple[Tensor, ...]
    input_grad: Tensor | None
    weight_grads: tuple[Tensor | None, ...]


def make_data(num_tokens: int, in_size: int, out_sizes: Sequence[int], *, trains: bool) -> Data:
    """Draw an input and, if the network trains, the gradients of its outputs."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, in_size, generator=generator).requires_grad_(trains)
    sizes = out_sizes if trains else ()
    return Data(x, tuple(torch.randn(num_tokens, size, generator=generator) for size in sizes))


def step(model: nn.Module, data: Data) -> tuple[Tensor, ...]:
    """Run forward and, if there are gradients of outputs, backward; return the outputs."""
    if not data.grads:
        with torch.no_grad():
            return _as_tuple(model(data.x))
    outputs = _as_tuple(model(data.x))
    torch.autograd.backward(outputs, data.grads)
    return outputs


def clear_grads(model: nn.Module, data: Data) -> None:
    """Set all gradients to ``None``, as a training loop does before a step."""
    model.zero_grad(set_to_none=True)
    data.x.grad = None


def compare(
    versions: Mapping[str, Version], build: Build, data: Data, repeats: int | None = None
) -> tuple[dict[str, float], int]:
    """Check every version, then time a step of each, gradients set to ``None`` between steps.

    Args:
        versions: What to compare; ``"dense"`` holds the numbers that the others must agree with.
        build: Makes the network of its layers.
        data: What each step is given.
        repeats: Measured turns; if ``None``, as many as fit into ``SECONDS``.

    Returns:
        Median milliseconds of each version, and the number of turns.

    Raises:
        AssertionError: If a version computes something else than the reference.
    """
    check(versions, build, data)

    def prepare(name: str) -> None:
        clear_grads(versions[name].model, data)

    def run_of(version: Version) -> Callable[[], object]:
        return lambda: step(version.model, data)

    runs = {name: run_of(version) for name, version in versions.items()}
    if repeats is None:
        repeats = repeats_within(SECONDS, runs, prepare=prepare)
    return medians_ms(runs, repeats, prepare=prepare), repeats


def rounded_ms(ms: Mapping[str, float], names: Sequence[str]) -> Row:
    """Return one column per name, ``None`` where a version is missing, and one per faster one."""
    row: Row = {f"{name}_ms": round(ms[name], 4) if name in ms else None for name in names}
    for kind, group in FASTER_OF.items():
        if set(group) & set(names):
            row[f"{kind}_ms"] = round(faster_ms(kind, ms), 4)
    return row


def faster_ms(kind: str, ms: Mapping[str, float]) -> float:
    """Return the milliseconds of the faster version of its kind, of those that ran."""
    return min(ms[name] for name in FASTER_OF[kind] if name in ms)


# ---- correctness ----


def check(versions: Mapping[str, Version], build: Build, data: Data) -> None:
    """Check the results of every version, all gradients among them.

    Raises:
        AssertionError: If one differs from the reference; its text names version and tensor.
    """
    shared = reference([dense_weight(layer) for layer in versions["dense"].layers], build, data)
    for name, version in versions.items():
        expected = shared
        if name in OWN_NUMBERS:
            expected = reference([dense_weight(layer) for layer in version.layers], build, data)
        _check_version(name, version, expected, data)
    # Gradients that are kept would be memory that the first timed steps do not have to ask for.
    for version in versions.values():
        clear_grads(version.model, data)


def reference(weights: Sequence[Tensor], build: Build, data: Data) -> Results:
    """Return what the network of dense layers with these matrices computes in float64."""
    layers = [nn.Linear(1, 1, bias=False) for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight.detach().double())
    exact = data.double()
    outputs = step(build(layers), exact)
    return Results(
        tuple(output.detach() for output in outputs),
        exact.x.grad,
        tuple(layer.weight.grad for layer in layers),
    )


def _check_version(name: str, version: Version, expected: Results, data: Data) -> None:
    clear_grads(version.model, data)
    outputs = step(version.model, data)
    for k, (output, wanted) in enumerate(zip(outputs, expected.outputs, strict=True)):
        _assert_close(f"{name}: output {k}", output.detach(), wanted)
    if not data.grads:
        return
    _assert_close(f"{name}: gradient of the input", data.x.grad, expected.input_grad)
    for k, (layer, wanted) in enumerate(zip(version.layers, expected.weight_grads, strict=True)):
        for parameter, got, grad in _parameter_grads(layer, wanted):
            _assert_close(f"{name}: gradient of {parameter} in layer {k}", got, grad)


def _parameter_grads(
    layer: nn.Module, weight_grad: Tensor | None
) -> list[tuple[str, Tensor | None, Tensor]]:
    """Return name, gradient held and gradient wanted of each parameter of a layer."""
    exact = copy.deepcopy(layer).double()
    parameters = list(exact.parameters())
    wanted = torch.autograd.grad(dense_weight(exact), parameters, weight_grad)
    held = list(layer.named_parameters())
    return [(name, p.grad, grad) for (name, p), grad in zip(held, wanted, strict=True)]


def _assert_close(what: str, got: Tensor | None, wanted: Tensor | None) -> None:
    assert got is not None, f"{what} is missing"
    assert wanted is not None, f"{what}: the reference has none"
    largest = float(wanted.abs().max())
    torch.testing.assert_close(
        got.double(),
        wanted,
        rtol=TOLERANCE,
        atol=TOLERANCE * largest,
        msg=lambda text: f"{what} is not the reference's\n{text}",
    )


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
