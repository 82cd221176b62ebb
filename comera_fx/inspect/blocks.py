"""What is drawn of a graph: a block an operator, or a block a part of the model.

Weights are left out, and what is computed from weights alone is one block, whatever its place.
Where single operators would be too many, neighbours in execution order that belong to one module
are one block: such blocks are acyclic, as the graph is. Modules are told apart as deep as the
number of blocks allows.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from torch import fx, nn
from torch._ops import OpOverload

from comera_fx.modules import TTModule
from comera_fx.ops import operator_name

Kind = Literal["input", "output", "tt", "weights", "plain"]

MOST_BLOCKS = 36
"""Above this many operators a graph is drawn by modules."""
MOST_LINES = 9
VIEWS = frozenset(
    (
        *("chunk", "contiguous", "detach", "expand", "flatten", "permute", "reshape", "select"),
        *("slice", "split", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze"),
        *("view", "mT", "narrow", "split_with_sizes"),
    )
)
"""Operators that compute nothing; many of one block are counted together."""


@dataclass(frozen=True)
class Block:
    """One box of the picture.

    Args:
        kind: "tt" if any of its operators runs cores; "weights" for what is made of weights alone.
        title: The operator, or the module.
        lines: What else stands in the box.
        reads: Numbers of the blocks whose values it reads.
        on_weights: Whether it reads what the block of kind "weights" makes.
    """

    kind: Kind
    title: str
    lines: tuple[str, ...]
    reads: tuple[int, ...]
    on_weights: bool


def blocks_of(gm: fx.GraphModule, most: int = MOST_BLOCKS) -> list[Block]:
    """Return the blocks of a graph, in an order in which each reads earlier ones only.

    Args:
        gm: Any graph.
        most: Number of blocks up to which each operator has its own.
    """
    nodes = [node for node in gm.graph.nodes if not _is_left_out(node)]
    weight_only = _weight_only(gm.graph)
    cores = _from_cores(weight_only)
    first = [node for node in nodes if node in weight_only]
    rest = [node for node in nodes if node not in weight_only]
    groups = [[node] for node in rest]
    if len(rest) > most:
        groups = _by_module(gm, rest, most)
    on_cores = {
        node for node in rest if _runs_cores(gm, node) or not cores.isdisjoint(node.all_input_nodes)
    }
    return _blocks(gm, [*([first] if first else []), *groups], bool(first), on_cores)


def _blocks(
    gm: fx.GraphModule,
    groups: Sequence[Sequence[fx.Node]],
    has_weights: bool,
    on_cores: set[fx.Node],
) -> list[Block]:
    place = {node: number for number, group in enumerate(groups) for node in group}
    paths = _paths(gm, [node for group in groups for node in group])
    found = []
    for number, group in enumerate(groups):
        read = {
            place[source]
            for node in group
            for given in node.all_input_nodes
            if (source := _source(given)) in place
        } - {number}
        weights = has_weights and number == 0
        on_weights = has_weights and 0 in read
        reads = tuple(sorted(read - ({0} if has_weights else set())))
        if weights:
            title, lines = "made of weights alone", _counted(gm, group)
        elif len(group) == 1:
            title, lines = _single(gm, group[0], paths[group[0]])
        else:
            title, lines = _common([paths[node] for node in group]) or "model", _counted(gm, group)
        kind: Kind = "weights" if weights else _kind(group, on_cores)
        found.append(Block(kind, title, tuple(lines), reads, on_weights))
    return found


def _is_left_out(node: fx.Node) -> bool:
    """Weights, entries of tuples, and sizes: a value that has no box of its own."""
    if _is_weight(node) or node.target is operator.getitem:
        return True
    return node.op == "call_function" and "sym_size" in str(node.target)


def _is_weight(node: fx.Node) -> bool:
    """Whether a node is a parameter or a buffer; a graph of dynamo may be given them."""
    if node.op == "get_attr":
        return True
    if node.op != "placeholder":
        return False
    is_buffer = re.search(r"_buffers_|\['?_buffers", str(node.target)) is not None
    return is_buffer or isinstance(node.meta.get("example_value"), nn.Parameter)


def _source(node: fx.Node) -> fx.Node:
    """Return the node that makes what an entry of a tuple, or a size, is taken from."""
    while not _is_weight(node) and _is_left_out(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _weight_only(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes that read weights, or what is made of them, and nothing else."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        given = node.all_input_nodes
        computes = node.op == "call_function" and bool(given)
        if _is_weight(node) or (computes and found.keys() >= set(given)):
            found[node] = None
    return found


def _from_cores(weight_only: Iterable[fx.Node]) -> set[fx.Node]:
    """Return which of these nodes are cores, or made of some."""
    found: set[fx.Node] = set()
    for node in weight_only:
        is_core = _is_weight(node) and re.search(r"core_\d+_?$", str(node.target)) is not None
        if is_core or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


# ---- by modules ----


def _by_module(gm: fx.GraphModule, nodes: Sequence[fx.Node], most: int) -> list[list[fx.Node]]:
    """Group neighbours of one module, told apart as deep as ``most`` blocks allow."""
    paths = _paths(gm, nodes)

    def grouped(depth: int) -> list[list[fx.Node]]:
        def key(node: fx.Node) -> tuple[str, ...]:
            parts = paths[node].split(".")[:depth]
            return (node.op, node.name) if node.op in ("placeholder", "output") else tuple(parts)

        return [list(group) for _, group in groupby(nodes, key)]

    depths = range(max((path.count(".") for path in paths.values()), default=0) + 1, -1, -1)
    return next((made for d in depths if len(made := grouped(d)) <= most), grouped(0))


def _paths(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return the module that each node belongs to; what does not say follows its neighbour."""
    found: dict[fx.Node, str] = {}
    last = ""
    for node in nodes:
        path = module_of(node)
        last = found[node] = last if path is None else path
    return found


def module_of(node: fx.Node) -> str | None:
    """Return the name of the module that a node belongs to; ``None`` where nothing tells it."""
    if node.op in ("placeholder", "output") and not _is_weight(node):
        return ""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(entry[0]) for entry in stack.values()]
    names = [name for name in names if "hook" not in name]
    if names:
        # dynamo writes L['self'].blocks[0] or L['self']._modules['blocks']
        text = re.sub(r"^L\['self'\]\.?", "", names[-1])
        text = text.replace("_modules", "").replace("['", ".").replace("']", "")
        return re.sub(r"\.+", ".", re.sub(r"\[(\d+)\]", r".\1", text)).strip(".")
    owners = [str(n.target).rpartition(".")[0] for n in node.all_input_nodes if n.op == "get_attr"]
    return _common(owners) if owners else None


def _common(paths: Sequence[str]) -> str:
    """Return the longest path that all of these lie in."""
    parts = []
    for level in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(level)) > 1:
            break
        parts.append(level[0])
    return ".".join(parts)


# ---- what stands in a box ----


def _kind(group: Sequence[fx.Node], on_cores: set[fx.Node]) -> Kind:
    if not on_cores.isdisjoint(group):
        return "tt"
    if group[0].op == "placeholder":
        return "input"
    return "output" if group[0].op == "output" else "plain"


def _runs_cores(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(gm.get_submodule(str(node.target)), TTModule)
    return operator_name(node.target) is not None or "tt_spec" in node.meta


def _label(gm: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    if node.op in ("placeholder", "output"):
        return node.name
    parts = str(node.target).split(".")
    if isinstance(node.target, (str, OpOverload)):
        return parts[-2] if len(parts) > 1 else parts[0]  # aten.add.Tensor
    return getattr(node.target, "__name__", type(node.target).__name__)


def _single(gm: fx.GraphModule, node: fx.Node, path: str) -> tuple[str, list[str]]:
    inside = path if node.op not in ("placeholder", "output") else ""
    return _label(gm, node), list(filter(None, (inside, _shape(node))))


def _shape(node: fx.Node) -> str:
    value: Any = node.meta.get("val", node.meta.get("example_value"))
    shape = getattr(value, "shape", None)
    return "" if shape is None else "\N{MULTIPLICATION SIGN}".join(map(str, shape))


def _counted(gm: fx.GraphModule, group: Sequence[fx.Node]) -> list[str]:
    return list(_listed(Counter(_label(gm, node) for node in group)))


def _listed(counts: Counter[str]) -> Iterator[str]:
    shown = [(name, number) for name, number in counts.items() if name not in VIEWS]
    num_views = sum(counts.values()) - sum(number for _, number in shown)
    # Those on cores first: they are what the picture is looked at for.
    shown.sort(key=lambda item: not item[0].lower().startswith("tt"))
    for name, number in shown[:MOST_LINES]:
        yield f"{number} \N{MULTIPLICATION SIGN} {name}" if number > 1 else name
    more = sum(number for _, number in shown[MOST_LINES:])
    if more:
        yield f"{more} others"
    if num_views:
        yield f"{num_views} view{'s' * (num_views > 1)}"
