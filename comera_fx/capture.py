"""Turn a model into an FX graph in which every use of a weight is named.

Three methods are tried, best first: ``torch.export`` (needs example inputs), ``symbolic_trace``,
and the *module graph*, which has one node per weight-owning module and no data flow, so that
every model has a graph. A trace that succeeds is no proof that it is right: with example inputs
each one is replayed against the model, and dropped where the results differ.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import wraps
from io import StringIO
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.export import Dim, ShapesCollection

from comera_fx.modules import TTEmbedding, TTLinear, TTModule
from comera_fx.replay import (
    DENSE_LAYERS,
    Calls,
    Inputs,
    as_inputs,
    difference,
    first_line,
    graph_module,
    has_no_values,
    is_known,
    known_leaves,
    run_model,
    unholdable,
    untouched,
    value_of,
)

CaptureKind = Literal["export", "symbolic_trace", "module_graph"]
ROOT = "root"
"""Name in the graph of a model that is itself one layer: a call needs a name that is not empty."""
_one_at_a_time = threading.RLock()
"""Tracing patches torch and redirects the streams of the process: no two threads may do so."""
_PROPERTIES = ("dtype", "device", "shape", "ndim", "requires_grad")


@dataclass(frozen=True)
class Captured:
    """A model as a graph, and what was learned on the way.

    Args:
        gm: The graph. Each call of an ``nn.Linear`` or ``nn.Embedding`` is a ``call_module``
            node whose target is the model's own layer, by its first name in ``named_modules``
            (``"root"`` for a model that is itself one layer). The containers are new. Names
            that a graph module cannot hold, such as ``graph`` or a keyword, end in ``_``.
        kind: The method that worked.
        notes: What was tried before, and what this kind of graph does not know.
        num_tokens: Rows of input in the largest call of each ``nn.Linear`` and
            ``nn.Embedding``; empty without example inputs.
        functional: Weights of such layers that something other than a call of the layer reads:
            qualified parameter name to the text of that node.
        called: Names of the layers and other leaf modules that the graph calls.
    """

    gm: fx.GraphModule
    kind: CaptureKind
    notes: tuple[str, ...]
    num_tokens: dict[str, int] = field(default_factory=dict)
    functional: dict[str, str] = field(default_factory=dict)
    called: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Traced:
    gm: fx.GraphModule
    functional: dict[str, str]
    notes: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)


class _Unusable(Exception):  # noqa: N818 (not an error: the next method is tried)
    """Says why a graph is not used; caught here."""


def capture(model: nn.Module, example_inputs: object = None) -> Captured:
    """Capture ``model`` by the best method that works; the model is not changed.

    Args:
        model: Any module. Its training flags, buffers and gradients, and the random number
            generators, are after the call what they were before.
        example_inputs: One tensor (the only argument), a tuple or list (positional arguments)
            or a mapping (keyword arguments).

    Returns:
        The graph, with what it knows.

    Raises:
        CaptureError: If the model itself fails on ``example_inputs``.
        ConfigError: If ``example_inputs`` is none of the above.
    """
    inputs = as_inputs(example_inputs)
    whole = _Root(model) if _is_layer(model) else model
    with _one_at_a_time, untouched(whole):
        captured = _capture(whole, inputs, type(model).__name__)
    captured.gm.training = model.training
    if whole is model:
        return captured
    return Captured(
        captured.gm,
        captured.kind,
        captured.notes,
        {_below_root(name): count for name, count in captured.num_tokens.items()},
        {_below_root(name): text for name, text in captured.functional.items()},
        frozenset(map(_below_root, captured.called)),
    )


def tokens_seen(model: nn.Module, example_inputs: object) -> dict[str, int]:
    """Return the rows of input in the largest call of each dense or TT layer, by first name.

    Args:
        model: Any module; it is left as it was.
        example_inputs: As for ``capture``; with ``None`` nothing is run, and nothing returned.

    Raises:
        CaptureError: If the model fails on ``example_inputs``.
        ConfigError: If ``example_inputs`` are no arguments.
    """
    inputs = as_inputs(example_inputs)
    if inputs is None or any(has_no_values(p) for p in model.parameters()):
        return {}
    counted = (*DENSE_LAYERS, TTLinear, TTEmbedding)
    calls = run_model(model, inputs, type(model).__name__, counted)[1]
    return {name: seen.num_rows for name, seen in calls.items()}


def _capture(model: nn.Module, inputs: Inputs | None, shown: str) -> Captured:
    notes: list[str] = []
    if any(has_no_values(p) for p in model.parameters()):
        notes.append("not run or traced: the model has weights without values (lazy or meta)")
        return _module_graph(model, notes, {})
    expected, calls = ([], {}) if inputs is None else run_model(model, inputs, shown)
    num_tokens = {name: seen.num_rows for name, seen in calls.items()}
    methods: list[tuple[CaptureKind, Callable[[], _Traced]]]
    methods = [("symbolic_trace", lambda: _symbolic(model))]
    if inputs is not None:
        methods.insert(0, ("export", lambda: _export(model, inputs, expected, calls)))
    for kind, trace in methods:
        try:
            traced = trace()
        except _Unusable as reason:
            notes.append(f"{kind} was not used: {reason}")
            continue
        wrong = "" if inputs is None else difference(model, traced.gm, inputs, expected)
        if wrong:
            notes.append(f"{kind} was not used: {wrong}")
            continue
        notes += traced.notes
        if inputs is None:
            notes.append("not checked by a replay: there were no example_inputs")
        called = _called(traced.gm, traced.renamed)
        return Captured(traced.gm, kind, tuple(notes), num_tokens, traced.functional, called)
    return _module_graph(model, notes, num_tokens)


class _Root(nn.Module):
    """Holds a model that is itself one layer, so that the graph can call it by a name."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.training = root.training

    def forward(self, input: Any) -> Any:
        return self.root(input)


def _is_layer(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Embedding) or isinstance(module, TTModule)


def _below_root(name: str) -> str:
    return name.removeprefix(ROOT).removeprefix(".")


# ---- torch.export ----


def _export(
    model: nn.Module, inputs: Inputs, expected: list[Any], calls: dict[str, Calls]
) -> _Traced:
    names = unholdable(model)
    if names:
        raise _Unusable(f"a graph module cannot hold the name {names[0]!r}")
    notes = []
    unknown = {type(leaf).__name__ for leaf in expected if not is_known(leaf)}
    if unknown:
        notes.append(f"the graph leaves out results of type {', '.join(sorted(unknown))}")
    try:
        exported = _export_program(model, inputs, dynamic=True, whole_output=not unknown)
    except _Unusable as reason:  # some models export with fixed sizes only
        exported = _export_program(model, inputs, dynamic=False, whole_output=not unknown)
        notes.append(f"export with fixed sizes: dynamic ones fail ({reason})")
    functional = _name_calls(exported, model, calls)
    graph = exported.graph
    for node in reversed(graph.nodes):
        unused_weight = node.op == "get_attr" and not node.users
        if unused_weight or (node.op == "call_module" and node.target == "_guards_fn"):
            graph.erase_node(node)
    graph.lint()
    # Made anew: the exported module has hooks that compare sizes, and no train() or eval().
    gm = fx.GraphModule(exported, graph, type(model).__name__)
    return _Traced(gm, functional, tuple(notes))


def _export_program(
    model: nn.Module, inputs: Inputs, *, dynamic: bool, whole_output: bool
) -> fx.GraphModule:
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in inputs.tensors() if dynamic else ():
        if tensor.dim():
            # A dimension of 1 is fixed by torch.export in any case, and asking otherwise warns.
            shapes[tensor] = tuple(Dim.AUTO if size > 1 else Dim.STATIC for size in tensor.shape)
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(torch.enable_grad())
        # torch warns about its own innards and attributes that are put back here, and prints
        # the graph so far when it gives up.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(redirect_stderr(StringIO()))
        if not whole_output:
            model.__dict__["forward"] = _with_known_leaves(model.forward)
        try:
            program = torch.export.export(
                model,
                inputs.args,
                inputs.kwargs,
                strict=False,
                dynamic_shapes=shapes if len(shapes) else None,
            )
            return program.module()
        except Exception as error:  # it traces the model's own code, which may raise anything
            raise _Unusable(first_line(error)) from error


def _with_known_leaves(forward: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Export knows no objects such as caches; the signature stays, it names the inputs."""

    @wraps(forward)
    def known(*args: Any, **kwargs: Any) -> list[Any]:
        return known_leaves(forward(*args, **kwargs))

    return known


def _name_calls(gm: fx.GraphModule, model: nn.Module, calls: dict[str, Calls]) -> dict[str, str]:
    """Turn aten products that stand for the call of a layer back into calls of that layer."""
    layers = _layers_by_weight(model)
    nodes_of: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        name = _layer_called(gm, node, layers)
        if name is not None:
            nodes_of.setdefault(name, []).append(node)
    for name, nodes in nodes_of.items():
        # More products than calls: some read the weight directly, and none is told apart.
        if len(nodes) > (calls[name].times if name in calls else 0):
            continue
        gm.add_submodule(name, model.get_submodule(name))
        for node in nodes:
            x = node.args[0 if node.target is torch.ops.aten.linear.default else 1]
            with gm.graph.inserting_before(node):
                call = gm.graph.call_module(name, (x,))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            gm.graph.erase_node(node)
    return _functional_uses(gm, model)


def _layers_by_weight(model: nn.Module) -> dict[int, list[tuple[str, nn.Linear | nn.Embedding]]]:
    found: dict[int, list[tuple[str, nn.Linear | nn.Embedding]]] = {}
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, nn.Embedding):
            assert isinstance(module, (nn.Linear, nn.Embedding))
            found.setdefault(id(module.weight), []).append((name, module))
    return found


def _layer_called(
    gm: fx.GraphModule,
    node: fx.Node,
    layers: dict[int, list[tuple[str, nn.Linear | nn.Embedding]]],
) -> str | None:
    """Return the name of the layer whose call ``node`` is, if it is one."""
    if node.target is torch.ops.aten.linear.default:
        weight, bias = value_of(gm, node.args[1]), value_of(gm, (*node.args, None)[2])
        for name, layer in layers.get(id(weight), []):
            if isinstance(layer, nn.Linear) and layer.bias is bias:
                return name
    if node.target is torch.ops.aten.embedding.default:
        weight = value_of(gm, node.args[0])
        given = (*node.args[2:], *(-1, False, False)[len(node.args) - 2 :])
        for name, layer in layers.get(id(weight), []):
            if isinstance(layer, nn.Embedding) and given == _embedding_options(layer):
                return name
    return None


def _embedding_options(layer: nn.Embedding) -> tuple[int, bool, bool]:
    padding_idx = -1 if layer.padding_idx is None else layer.padding_idx
    return padding_idx, layer.scale_grad_by_freq, layer.sparse


def _functional_uses(gm: fx.GraphModule, model: nn.Module) -> dict[str, str]:
    layers = _layers_by_weight(model)
    uses: dict[str, str] = {}
    for node in gm.graph.nodes:
        if node.op != "get_attr" or id(value_of(gm, node)) not in layers:
            continue
        # The renormalising write of max_norm belongs to the call of the table.
        readers = [
            u for u in node.users if u.target is not torch.ops.aten.embedding_renorm_.default
        ]
        if any(isinstance(u.target, torch._ops.HigherOrderOperator) for u in readers):
            raise _Unusable("layers are called inside a nested graph, such as a no_grad block")
        for reader in readers[:1]:
            for name, _ in layers[id(value_of(gm, node))]:
                uses[f"{name}.weight" if name else "weight"] = _node_text(reader)
    return uses


def _node_text(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return f"%{node.name} = {node.op}[{target}]"


# ---- symbolic_trace, and the module graph ----


class _Tracer(fx.Tracer):
    """Treats our own layers as torch's: one node each."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TTModule) or super().is_leaf_module(m, module_qualified_name)


def _symbolic(model: nn.Module) -> _Traced:
    try:
        with untouched(model):
            graph = _Tracer().trace(model)
            # Constants are attributes of the model for as long as this block lasts.
            gm, renamed = graph_module(model, graph)
    except Exception as error:  # it traces the model's own code, which may raise anything
        raise _Unusable(first_line(error)) from error
    _fold_properties(gm)
    gm.recompile()
    return _Traced(gm, _functional_uses(gm, model), renamed=renamed)


def _fold_properties(gm: fx.GraphModule) -> None:
    """Put in the value where only a property of a weight is read, such as ``weight.dtype``.

    Other than a read of its numbers, that does not hold a layer back from being replaced.
    """
    for node in gm.graph.nodes:
        if node.target is getattr and node.args[1] in _PROPERTIES:
            weight = value_of(gm, node.args[0])
            if isinstance(weight, nn.Parameter):
                value = getattr(weight, str(node.args[1]))
                for user in list(node.users):
                    user.args = _with_value(user.args, node, value)
                    user.kwargs = _with_value(user.kwargs, node, value)
    for node in reversed(gm.graph.nodes):
        if not node.users and (node.op == "get_attr" or node.target is getattr):
            gm.graph.erase_node(node)


def _with_value(args: Any, node: fx.Node, value: Any) -> Any:
    return fx.node.map_arg(args, lambda arg: value if arg is node else arg)


def _module_graph(model: nn.Module, notes: list[str], num_tokens: dict[str, int]) -> Captured:
    graph = fx.Graph()
    unknown = graph.placeholder("unknown")
    results = []
    for name, module in model.named_modules():
        own = [key for key, param in module._parameters.items() if param is not None]
        if own and name and next(module.children(), None) is None:
            results.append(graph.call_module(name, (unknown,)))
        else:  # its layers get calls of their own, so it cannot be one call itself
            results += [graph.get_attr(f"{name}.{key}" if name else key) for key in own]
    graph.output(tuple(results))
    gm, renamed = graph_module(model, graph)
    gm.__class__.__name__ = "ModuleGraph"
    lost = "module graph: no data flow, and direct reads of weights are not seen"
    return Captured(gm, "module_graph", (*notes, lost), num_tokens, {}, _called(gm, renamed))


def _called(gm: fx.GraphModule, renamed: Mapping[str, str]) -> frozenset[str]:
    targets = (str(node.target) for node in gm.graph.nodes if node.op == "call_module")
    return frozenset(renamed.get(target, target) for target in targets)
