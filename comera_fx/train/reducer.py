"""The reducer of ``DistributedDataParallel``, built anew when parameters change their shapes.

A wrapper notes shapes, gradient buckets and autograd nodes of the parameters it was made with. A
cut changes all three, so its reducer is built anew, as when it is unpickled.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_built_for: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, torch.Size]]] = (
    weakref.WeakKeyDictionary()
)
THRESHOLD = "rank_weight_threshold"
"""A buffer that never changes; sent along it would cost every forward pass a broadcast."""


def take(wrapper: Any) -> None:
    """Prepare a wrapper for being rebuilt; its reducer stays as it is."""
    _leave_thresholds_out(wrapper)
    _built_for.setdefault(wrapper, _trained(wrapper))


def is_current(wrapper: Any) -> bool:
    """Return whether the parameters that train are those that the reducer was built for."""
    return _built_for.get(wrapper) == _trained(wrapper)


def rebuild(wrapper: Any) -> None:
    """Give a wrapper a new reducer, made as ``DistributedDataParallel.__setstate__`` makes it.

    Gradients stay: those of passes under ``no_sync`` go into the next all-reduce.
    """
    _leave_thresholds_out(wrapper)
    builtin = _builtin_hook(wrapper)
    wrapper.reducer._remove_autograd_hooks()
    wrapper.reducer = wrapper.logger = None  # the old buckets go before new ones come
    ignored = wrapper.parameters_to_ignore
    wrapper._module_parameters = [
        p for name, p in wrapper.module.named_parameters() if name not in ignored
    ]
    parameters, expect_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    # What a dead layer has left gets no gradient, and its bucket would wait for one.
    kept = [k for k, parameter in enumerate(parameters) if parameter.numel()]
    wrapper._ddp_init_helper(
        [parameters[k] for k in kept],
        [expect_sparse[k] for k in kept],
        {position: names[k] for position, k in enumerate(kept)},
        wrapper.static_graph,
    )
    wrapper._has_rebuilt_buckets = False
    _built_for[wrapper] = _trained(wrapper)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    if builtin is not None:
        wrapper._register_builtin_comm_hook(builtin)
    hooks, wrapper._comm_hooks = wrapper._comm_hooks, []
    for hook, state in hooks:
        _forget_buckets(state)
        wrapper.register_comm_hook(state, hook)


def _leave_thresholds_out(wrapper: Any) -> None:
    names = [name for name, _ in wrapper.module.named_buffers()]
    wrapper.parameters_to_ignore.update(n for n in names if n.rpartition(".")[2] == THRESHOLD)
    wrapper._assign_modules_buffers()


def _trained(wrapper: Any) -> list[tuple[int, torch.Size]]:
    return [(id(p), p.shape) for p in wrapper.module.parameters() if p.requires_grad]


def _builtin_hook(wrapper: Any) -> Any:
    """Return the built-in communication hook of a wrapper, which it notes only in its log."""
    name = str(wrapper._get_ddp_logging_data().get("comm_hook", ""))
    kind, _, value = name.rpartition(".")
    hooks = dist.BuiltinCommHookType  # type: ignore[attr-defined]
    return getattr(hooks, value) if "BuiltinCommHookType" in kind else None


def _forget_buckets(state: Any) -> None:
    """Have PowerSGD start anew: what it keeps per bucket has the old buckets' sizes.

    It all-reduces plainly for one step, after which the reducer orders its buckets once more.
    """
    if type(state).__name__ == "PowerSGDState":
        for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            kept.clear()
        state.iter = min(state.iter, state.start_powerSGD_iter - 1)
