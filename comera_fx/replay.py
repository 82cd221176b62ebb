"""Run a model on example inputs and leave it as it was: what its layers see, what it returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from comera_fx.errors import CaptureError, ConfigError

# Largest difference from the model's own output, relative to its largest entry, at which a
# replay counts as equal: kernels may add in another order, nothing else may differ.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, function: Callable[..., Any]) -> Any:
        """Call with fresh copies of the tensors: a model may write into its inputs."""
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (self.args, self.kwargs))
        return function(*args, **kwargs)

    def tensors(self) -> list[Tensor]:
        """Return every tensor among the arguments, at any depth."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass
class Calls:
    """How often a layer was called, and the rows of input of its largest call."""

    times: int = 0
    num_rows: int = 0


def as_inputs(example_inputs: object) -> Inputs | None:
    """Read ``example_inputs`` as the arguments of a call; ``None`` stays ``None``.

    Raises:
        ConfigError: If it is no tensor, tuple, list or mapping from names.
    """
    if example_inputs is None:
        return None
    if isinstance(example_inputs, Tensor):
        return Inputs((example_inputs,), {})
    if isinstance(example_inputs, (tuple, list)):
        return Inputs(tuple(example_inputs), {})
    if isinstance(example_inputs, Mapping) and all(isinstance(k, str) for k in example_inputs):
        return Inputs((), dict(example_inputs))
    raise ConfigError(
        "example_inputs cannot be turned into the arguments of a call",
        got=type(example_inputs).__name__,
        expected="a tensor, a tuple or list of arguments, or a mapping of keyword arguments",
        mend="write example_inputs=(x,) for model(x)",
    )


def run_model(model: nn.Module, inputs: Inputs, shown: str) -> tuple[list[Any], dict[str, Calls]]:
    """Run the model itself, without gradients.

    Args:
        model: The model.
        inputs: What to run it on.
        shown: Name of the model in an error.

    Returns:
        The leaves of its output, and the calls of each ``nn.Linear`` and ``nn.Embedding`` by
        qualified name; layers that were not called are missing.

    Raises:
        CaptureError: If the model fails.
    """
    calls: dict[str, Calls] = {}
    handles = [
        module.register_forward_pre_hook(_counter(calls, name), with_kwargs=True)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding)
    ]
    try:
        with untouched(model), torch.no_grad():
            return pytree.tree_leaves(inputs.call(model)), calls
    except Exception as error:
        raise CaptureError(
            f"{shown} fails on the example_inputs",
            got=f"{type(error).__name__}: {first_line(error)}",
            expected="inputs that the model accepts, as in model(*example_inputs)",
            mend="give inputs of the right number, shapes, dtypes and device",
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def difference(
    model: nn.Module, graph: Callable[..., Any], inputs: Inputs, expected: Sequence[Any]
) -> str:
    """Say how a graph that shares its weights with the model differs from it; empty if it agrees.

    The random numbers drawn are those of ``run_model``, so dropout is compared too. Objects in
    the output that are no tensors or plain values, such as caches, are not.

    Args:
        model: The model.
        graph: Called as the model is.
        inputs: What to run it on.
        expected: The leaves of the model's own output.
    """
    try:
        with untouched(model), torch.no_grad():
            output = inputs.call(graph)
    except Exception as error:  # a graph may fail in any way that its operators can
        return f"its replay fails ({first_line(error)})"
    found = known_leaves(output)
    known = [leaf for leaf in expected if is_known(leaf)]
    if len(found) == len(known) and all(map(_equal, found, known)):
        return ""
    return "its replay differs from the model's own output"


def known_leaves(output: Any) -> list[Any]:
    """Return the tensors and plain values in an output, leaving out what can hide others."""
    return [leaf for leaf in pytree.tree_leaves(output) if is_known(leaf)]


def is_known(leaf: Any) -> bool:
    """Whether a leaf of an output is a tensor or a plain value, not an object such as a cache."""
    return leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, shortened, or its class's name."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (text[:197] + "...") if len(text) > 200 else text or type(error).__name__


def value_of(gm: nn.Module, arg: object) -> object:
    """Return what a ``get_attr`` node of a graph module reads; ``None`` for all else."""
    if not isinstance(arg, fx.Node) or arg.op != "get_attr":
        return None
    value: object = gm
    for part in str(arg.target).split("."):
        value = getattr(value, part, None)
    return value


def has_no_values(tensor: Tensor) -> bool:
    """Whether a weight cannot be run: it is lazy, or on the meta device."""
    return tensor.is_meta or is_lazy(tensor)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back attributes, buffers and random number generators, whatever the body did.

    Running or tracing a model may write to it: running statistics, caches kept as attributes,
    tables renormalised by ``max_norm``. Values kept outside the model are beyond reach.
    """
    # Scripted modules keep their state elsewhere, in forms that cannot be put back.
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(vars(m), dict(vars(m))) for m in modules]
    for registry in ("_parameters", "_buffers", "_modules"):
        before += [(vars(m)[registry], dict(vars(m)[registry])) for m in modules]
    written = [b for b in model.buffers() if not has_no_values(b)]
    written += [p for m in modules if _renormalises(m) for p in m.parameters()]
    values = [(tensor, tensor.detach().clone()) for tensor in written]
    python_state = random.getstate()
    states = [(generator, generator.get_state()) for generator in _generators()]
    try:
        yield
    finally:
        random.setstate(python_state)
        for generator, state in states:
            generator.set_state(state)
        for now, then in before:
            _put_back(now, then)
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _put_back(now: dict[str, Any], then: dict[str, Any]) -> None:
    same = now.keys() == then.keys() and all(now[key] is then[key] for key in then)
    if not same:
        now.clear()
        now.update(then)


def _renormalises(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def _generators() -> list[torch.Generator]:
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.default_generators if started else ()
    return [torch.default_generator, *cuda]


def _counter(calls: dict[str, Calls], name: str) -> Callable[..., None]:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["input"]
        num_rows = given.numel()
        if isinstance(module, nn.Linear):
            num_rows //= max(1, module.in_features)
        seen = calls.setdefault(name, Calls())
        seen.times, seen.num_rows = seen.times + 1, max(seen.num_rows, num_rows)

    return count


def _equal(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return type(found) is type(expected) and bool(found == expected)
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point() or expected.numel() == 0:
        return torch.equal(found, expected)
    tolerance = _TOLERANCE.get(expected.dtype, 0.0)
    found, expected = found.double(), expected.double()
    size = float(expected.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(found, expected, rtol=0, atol=tolerance * size, equal_nan=True)
