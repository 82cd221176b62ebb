"""The plans of a model's layers, or of the operators of a graph, each distinct one once."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from comera_fx import ops
from comera_fx.config import PlanConfig
from comera_fx.inspect.blocks import module_of
from comera_fx.layer_report import plan_of
from comera_fx.modules import DEFAULT_NUM_TOKENS, TTLinear
from comera_fx.ops import spec_of
from comera_fx.plan.linear import plan_linear
from comera_fx.plan.plan import Plan
from comera_fx.replay import value_of


@dataclass(frozen=True)
class SharedPlan:
    """A plan, and the names of the layers that run by it."""

    plan: Plan
    names: tuple[str, ...]


def distinct(plans: Iterable[tuple[str, Plan]]) -> list[SharedPlan]:
    """Return each distinct plan once, with its layers, in the order of the first of them.

    Args:
        plans: Pairs of layer name and plan.
    """
    groups: dict[str, tuple[Plan, dict[str, None]]] = {}
    for name, plan in plans:
        groups.setdefault(repr(plan), (plan, {}))[1][name] = None
    return [SharedPlan(plan, tuple(names)) for plan, names in groups.values()]


def plans_of_model(model: nn.Module, num_tokens: Mapping[str, int]) -> list[tuple[str, Plan]]:
    """Return pairs of name and plan of the linear layers in TT form that have ranks left.

    Args:
        model: Any model.
        num_tokens: Rows of input of each, by name; others are planned for as many as they were
            made for.
    """
    return [
        (name, plan_of(module, num_tokens.get(name) or module.num_tokens_hint)[0])
        for name, module in model.named_modules()
        if isinstance(module, TTLinear) and module.spec.num_params
    ]


def plans_of_graph(gm: fx.GraphModule) -> list[tuple[str, Plan]]:
    """Return pairs of name and plan of the TT linear layers that a graph runs one by one.

    A layer is named after its module, or the node where the graph does not tell that. Where the
    number of its rows is symbolic the plan is for its ``num_tokens_hint``.

    Args:
        gm: A graph of calls of ``TTLinear``, or of ``tt_linear`` operators whose cores are known:
            as weights of ``gm`` or by fake tensors in ``meta``.
    """
    found = []
    for node in gm.graph.nodes:
        if node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            if isinstance(module, TTLinear) and module.spec.num_params:
                found.append((str(node.target), plan_of(module, module.num_tokens_hint)[0]))
        elif node.target in (torch.ops.comera_fx.tt_linear.default, torch.ops.comera_fx.tt_linear):
            plan = _plan_of_node(gm, node)
            found += [] if plan is None else [(_name_of(node), plan)]
    return found


def _plan_of_node(gm: fx.GraphModule, node: fx.Node) -> Plan | None:
    given: dict[str, Any] = (
        inspect.signature(ops.tt_linear).bind(*node.args, **node.kwargs).arguments
    )
    tensors = [_value(gm, core) for core in given["cores"]]
    x = _value(gm, given["x"])
    if any(tensor is None for tensor in tensors):
        return None
    cores = [tensor for tensor in tensors if tensor is not None]
    shapes = tuple(tuple(int(size) for size in core.shape) for core in cores)
    turned = {"transposed": True} if given.get("transposed") else {}
    spec = spec_of(given["layout"], given["num_in_modes"], shapes, **turned)
    if not spec.num_params:
        return None
    rows = None if x is None else x.numel() // max(x.shape[-1], 1)
    hint = given.get("num_tokens_hint", DEFAULT_NUM_TOKENS)
    config = PlanConfig(
        objective=given.get("objective", "time"), pad_ranks=given.get("pad_ranks", True)
    )
    return plan_linear(
        spec,
        rows if type(rows) is int else hint,
        config.objective,
        memory_limit_bytes=given.get("memory_limit_bytes"),
        pad_ranks=config.pad_ranks,
        itemsize=cores[0].element_size(),
        device_type=cores[0].device.type,
    )


def _value(gm: fx.GraphModule, node: object) -> Tensor | None:
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is None and node.op == "get_attr":
        value = value_of(gm, node)
    return value if isinstance(value, Tensor) else None


def _name_of(node: fx.Node) -> str:
    cores: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    first = cores[0]
    if isinstance(first, fx.Node) and first.op == "get_attr":
        return str(first.target).rpartition(".")[0]
    return module_of(node) or node.name
