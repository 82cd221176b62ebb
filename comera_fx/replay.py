"""Run a model on example inputs and leave it as it was: what its layers see, what it returns."""

from __future__ import annotations

import keyword
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from comera_fx.errors import CaptureError, ConfigError

T = TypeVar("T")

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, set, deque)

# Largest difference from the model's own output, relative to its largest entry, at which a
# replay counts as equal: kernels may add in another order, nothing else may differ.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of a model.

    Args:
        args: The positional ones.
        kwargs: The keyword ones.
        whole: How to write what was given, should all of it be meant as one argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    whole: str = ""

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
    if isinstance(example_inputs, tuple):
        return Inputs(example_inputs, {})
    if isinstance(example_inputs, list):
        return Inputs(tuple(example_inputs), {}, whole="([x],)")
    if isinstance(example_inputs, Mapping) and all(isinstance(k, str) for k in example_inputs):
        return Inputs((), dict(example_inputs), whole='({"x": x},)')
    raise ConfigError(
        "example_inputs cannot be turned into the arguments of a call",
        got=type(example_inputs).__name__,
        expected="a tensor, a tuple or list of arguments, or a mapping of keyword arguments",
        mend="write example_inputs=(x,) for model(x)",
    )


DENSE_LAYERS = (nn.Linear, nn.Embedding)


def run_model(
    model: nn.Module,
    inputs: Inputs,
    shown: str,
    counted: Collection[type[nn.Module]] = DENSE_LAYERS,
) -> tuple[list[Any], dict[str, Calls]]:
    """Run the model itself, without gradients.

    Args:
        model: The model.
        inputs: What to run it on.
        shown: Name of the model in an error.
        counted: Classes of the layers whose calls are counted; one with ``in_features`` has rows
            of that size, others have a row for each number.

    Returns:
        The leaves of its output, and the calls of each counted layer by qualified name; layers
        that were not called are missing.

    Raises:
        CaptureError: If the model fails.
    """
    calls: dict[str, Calls] = {}
    handles = [
        module.register_forward_pre_hook(_counter(calls, name), with_kwargs=True)
        for name, module in model.named_modules()
        if type(module) in counted
    ]
    try:
        with untouched(model), torch.no_grad():
            return pytree.tree_leaves(inputs.call(model)), calls
    except Exception as error:
        raise CaptureError(
            f"{shown} fails on the example_inputs",
            got=f"{type(error).__name__}: {first_line(error)}",
            expected="inputs that the model accepts, as in model(*example_inputs)",
            mend="give inputs of the right number, shapes, dtypes and device"
            + (f"; a single dict or list argument is written {inputs.whole}" * bool(inputs.whole)),
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


VALUE_KEYS = ("example_value", "val")
"""Keys of a node's metadata that may hold a tensor like its result, without numbers."""
WEIGHT = "comera_fx_weight"
"""Key of a placeholder's metadata that holds the weight it stands for."""


def value_of(gm: nn.Module, arg: object) -> object:
    """Return what a ``get_attr`` node of a graph module reads; ``None`` for all else.

    In graphs that take their weights as inputs, the weight that a placeholder stands for.
    """
    if not isinstance(arg, fx.Node):
        return None
    if arg.op == "placeholder":
        return arg.meta.get(WEIGHT)
    return attribute_of(gm, str(arg.target)) if arg.op == "get_attr" else None


_OWNED = frozenset({*dir(fx.GraphModule), *vars(fx.GraphModule(nn.Module(), fx.Graph())), "self"})
"""Names that a graph module or its code uses, and so cannot give to a part of the model."""


def unholdable(model: nn.Module) -> list[str]:
    """Return the names of parts of a model that a graph module cannot hold as they are."""
    names = [
        *(name for name, _ in model.named_modules(remove_duplicate=False)),
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
        *(name for name, _ in model.named_buffers(remove_duplicate=False)),
    ]
    return [name for name in names if _holdable(name, "_") != name]


def graph_module(model: nn.Module, graph: fx.Graph) -> tuple[fx.GraphModule, dict[str, str]]:
    """Make a graph module of a graph over ``model``, renaming what it cannot hold.

    Args:
        model: What the targets of the graph name parts of.
        graph: The graph; its targets are changed where their names are not free.

    Returns:
        The graph module, and its targets that differ from the model's names, with those names.
    """
    reads = [node for node in graph.nodes if node.op in ("get_attr", "call_module")]
    parts = {part for node in reads for part in str(node.target).split(".")}
    suffix = "_"
    while any(f"{part}{suffix}" in parts for part in parts):
        suffix += "_"
    renamed, root = {}, {}
    for node in reads:
        name = str(node.target)
        node.target = _holdable(name, suffix)
        root[node.target] = attribute_of(model, name)
        if node.target != name:
            renamed[node.target] = name
    for node in graph.nodes:
        if node.name == "self":  # a result so named would hide the module from the code below
            node._rename("self_")
    # A dictionary only where it is needed: it registers buffers of layers that it holds anew.
    return fx.GraphModule(root if renamed else model, graph, type(model).__name__), renamed


def _holdable(name: str, suffix: str) -> str:
    first, *others = name.split(".")
    taken = [first in _OWNED or keyword.iskeyword(first), *map(keyword.iskeyword, others)]
    return ".".join(
        f"{part}{suffix}" if is_taken else part
        for part, is_taken in zip((first, *others), taken, strict=True)
    )


def attribute_of(root: object, name: str) -> object:
    """Return what a qualified name names, ``None`` if there is no such thing."""
    for part in name.split("."):
        root = getattr(root, part, None)
    return root


def has_no_values(tensor: Tensor) -> bool:
    """Whether a weight cannot be run: it is lazy, or on the meta device."""
    return tensor.is_meta or is_lazy(tensor)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back attributes, tensors and random number generators, whatever the body did.

    Running or tracing a model may write to it: running statistics, caches and lists of losses
    kept as attributes, tables renormalised by ``max_norm``. Built-in containers get their old
    contents back and stay the same objects, at any depth. Values kept outside the model, or in
    objects of other classes, are beyond reach.
    """
    before = _containers(model)
    held = [value for _, contents in before for value in _values(contents)]
    written = [b for b in model.buffers() if not has_no_values(b)]
    written += [p for m in model.modules() if _renormalises(m) for p in m.parameters()]
    written += [value for value in held if _is_plain_tensor(value)]
    values = [(tensor, tensor.detach().clone()) for tensor in _once(written)]
    python_state = random.getstate()
    own = (value for value in held if isinstance(value, torch.Generator))
    states = [(each, each.get_state()) for each in _once([*_generators(), *own])]
    try:
        yield
    finally:
        random.setstate(python_state)
        for generator, state in states:
            generator.set_state(state)
        for container, contents in before:
            _put_back(container, contents)
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _containers(model: nn.Module) -> list[tuple[Any, Any]]:
    """Pair every built-in container that a model holds with a copy of its contents."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        # Scripted modules keep their state elsewhere, in forms that cannot be put back.
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            value = vars(value)
        if type(value) in (*_MAPPINGS, *_SEQUENCES) and id(value) not in found:
            contents = dict(value) if type(value) in _MAPPINGS else tuple(value)
            found[id(value)] = value, contents
            waiting += _values(contents)
        elif type(value) is tuple:
            waiting += value
    return list(found.values())


def _values(contents: dict[Any, Any] | tuple[Any, ...]) -> Iterable[Any]:
    return contents.values() if isinstance(contents, dict) else contents


def _put_back(container: Any, contents: dict[Any, Any] | tuple[Any, ...]) -> None:
    """Restore the contents, by identity: what is held may not know how to compare itself."""
    if isinstance(contents, dict):
        now = [id(entry) for item in container.items() for entry in item]
        if now != [id(entry) for item in contents.items() for entry in item]:
            container.clear()
            for key, value in contents.items():
                container[key] = value
    elif list(map(id, container)) != list(map(id, contents)):
        container.clear()
        if isinstance(container, set):
            container.update(contents)
        else:
            container.extend(contents)


def _is_plain_tensor(value: object) -> bool:
    """Whether this is a tensor of torch's own class: others may not know how to be copied."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return not (has_no_values(value) or value.is_inference())


def _once(items: Iterable[T]) -> list[T]:
    return list({id(item): item for item in items}.values())


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
        in_features = getattr(module, "in_features", None)
        if in_features is not None:
            num_rows //= max(1, in_features)
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
