"""The processes that train one model: what they decide alike, and wrappers that follow cuts."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comera_fx.errors import RankError
from comera_fx.modules import TTModule
from comera_fx.share.layers import is_sharded
from comera_fx.train import reducer


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that ``DistributedDataParallel`` or ``torch.compile`` was given."""
    while True:
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def check_whole(model: nn.Module, layers: Mapping[str, TTModule]) -> None:
    """Raise unless every process holds the layers' cores whole, as plain parameters.

    Raises:
        RankError: If FSDP, tensor parallelism or ``DataParallel`` divides or copies them.
    """
    wanted = set(layers.values())
    for module in model.modules():
        if is_sharded(module) and not wanted.isdisjoint(module.modules()):
            raise _divided(f"a {_wrapper_name(module)} around TT layers")
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise RankError(
                "rank weights do not reach the replicas of a DataParallel",
                got=f"a DataParallel over {len(module.device_ids)} devices",
                expected="one process per device, or one device",
                mend="wrap the model in torch.nn.parallel.DistributedDataParallel instead",
            )
    for name, layer in layers.items():
        for parameter in (*layer.cores, *layer.rank_weights):
            if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
                raise _divided(f"layer {name!r} with DTensor parameters")


def check_whole_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise where the optimizer's state lies divided among the processes.

    Raises:
        RankError: For a ``ZeroRedundancyOptimizer``.
    """
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise RankError(
            "the optimizer's state is divided among the processes, so that no cut reaches it",
            got="a ZeroRedundancyOptimizer",
            expected="an optimizer whose state every process holds",
            mend="use AdamW(comera_fx.param_groups(model, lr=1e-3)): cores are small",
        )


def _divided(got: str) -> RankError:
    return RankError(
        "ranks cannot be cut where parameters are divided among processes",
        got=got,
        expected="whole parameters in every process, as DistributedDataParallel keeps them",
        mend="adapt ranks under DistributedDataParallel, or first, and shard what is left after",
    )


def _wrapper_name(module: nn.Module) -> str:
    names = [cls.__name__ for cls in type(module).__mro__]
    return "FullyShardedDataParallel" if "FSDPModule" not in names else "model of fully_shard"


class Processes:
    """The processes that train a model's layers together, and the wrappers that make them so.

    Where ``torch.distributed`` is not initialised every method returns at once.

    Args:
        model: The model as the adapter was given it.
        layers: Its adapted layers, by name.
        check: Whether cuts are compared; ``None``: at torch's debug level DETAIL.

    Raises:
        RankError: If the layers are divided among processes, or cannot be followed.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, TTModule], check: bool | None
    ) -> None:
        self._model, self._layers, self._check = model, layers, check
        self._references: list[weakref.ref[nn.Module]] = []
        self._is_settled = False
        check_whole(model, layers)
        self.find(required=False)

    # ---- which wrappers there are ----

    @property
    def wrappers(self) -> list[Any]:
        """The living wrappers, each around some of the layers."""
        return [wrapper for ref in self._references if (wrapper := ref()) is not None]

    @property
    def group(self) -> Any:
        """The process group that trains together; ``None`` for a single process."""
        wrappers = self.wrappers
        group = wrappers[0].process_group if wrappers else None
        return None if group is None or group.size() == 1 else group

    def find(self, *, required: bool) -> None:
        """Look for the wrappers, unless they are known.

        Args:
            required: Whether several processes without a wrapper are an error.

        Raises:
            RankError: If it is not clear which wrapper a layer has, or one cannot be followed.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        wrappers = self.wrappers
        if wrappers and len(wrappers) == len(self._references):
            _check_no_join(wrappers)
            return
        if self._is_settled and not self._references:
            return
        wrappers = list(_wrappers_around(self._layers))
        if len(wrappers) > 1:  # one that was replaced may be waiting for the collector
            del wrappers
            gc.collect()
            wrappers = list(_wrappers_around(self._layers))
        if wrappers or (required and dist.get_world_size() > 1):
            self._check_covers(wrappers, required=required)
        self._take(wrappers)
        self._is_settled = required

    def tell(self, wrappers: Sequence[object]) -> None:
        """Take these for the wrappers; none means that every process trains by itself.

        Raises:
            RankError: If they are not around the layers, or one cannot be followed.
        """
        inner = [getattr(wrapper, "_orig_mod", wrapper) for wrapper in wrappers]
        for wrapper in inner:
            if not isinstance(wrapper, DistributedDataParallel):
                raise RankError(
                    "RankAdapter.wrapped got something else than a wrapper",
                    got=type(wrapper).__name__,
                    expected="a DistributedDataParallel, or nothing",
                    mend="write adapter.wrapped(ddp_model)",
                )
        if inner:
            self._check_covers(inner, required=True)
        self._take(inner)
        self._is_settled = True
        self.rebuild()

    def _check_covers(self, wrappers: Sequence[Any], *, required: bool) -> None:
        held = [set(wrapper.modules()) for wrapper in wrappers]
        for name, layer in self._layers.items():
            count = sum(layer in modules for modules in held)
            if count > 1 or (count == 0 and required):
                raise RankError(
                    f"it is not clear which wrapper averages the gradients of layer {name!r}",
                    got=f"{dist.get_world_size()} processes, {count} DistributedDataParallel "
                    "around it",
                    expected="one DistributedDataParallel around every adapted layer",
                    mend="wrap the model, or name its wrapper: adapter.wrapped(ddp); where every "
                    "process trains a model of its own call adapter.wrapped() without one",
                )

    def _take(self, wrappers: Sequence[Any]) -> None:
        for wrapper in wrappers:
            _check_can_follow(wrapper, self._layers, wrappers[0])
        self._references = [weakref.ref(wrapper) for wrapper in wrappers]
        for wrapper in wrappers:
            reducer.take(wrapper)

    # ---- what is decided alike ----

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes, detached; NaN if it is in one."""
        group = self.group
        if group is None:
            return value.detach()
        total = value.detach().to(torch.float64, copy=True)
        dist.all_reduce(total, group=group)
        mean: Tensor = (total / group.size()).to(value.dtype)
        return mean

    def all_agree(self, flags: Tensor) -> list[bool]:
        """Return which flags are set in every process."""
        group = self.group
        if group is not None:
            flags = flags.to(torch.int32)
            dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
        return [bool(flag) for flag in flags.tolist()]

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of its group, or the only one."""
        group = self.group
        return group is None or dist.get_rank(group) == 0

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first process's tensor; all give one of its shape and dtype."""
        group = self.group
        if group is None:
            return tensor
        sent = tensor.to(next(iter(self._layers.values())).cores[0].device)
        dist.broadcast(sent, group=group, group_src=0)
        return sent.to(tensor.device)

    @property
    def checks(self) -> bool:
        """Whether processes compare their decisions."""
        group = self.group
        if self._check is not None or group is None:
            return bool(self._check) and group is not None
        return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]

    def compare(self, decisions: Mapping[str, object]) -> None:
        """In debug mode, raise unless all processes have decided the same for every layer.

        Args:
            decisions: Per layer something whose ``repr`` tells all.

        Raises:
            RankError: In every process, naming the first layer that differs.
        """
        group = self.group
        if group is None or not self.checks:
            return
        device = next(iter(self._layers.values())).cores[0].device
        own = torch.tensor([_digest(d) for d in decisions.values()], device=device)
        all_of_them = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(all_of_them, own, group=group)
        for number, name in enumerate(decisions):
            digests = [int(each[number]) for each in all_of_them]
            others = [k for k, digest in enumerate(digests) if digest != digests[0]]
            if others:
                raise RankError(
                    f"the processes would cut layer {name!r} differently",
                    got=f"processes {others} differ from process 0 at ranks "
                    f"{list(self._layers[name].spec.ranks)}",
                    expected="the same rank weights in every process",
                    mend="start all from one state, step alike, and change no parameter in one",
                )

    # ---- wrappers that follow ----

    def rebuild(self) -> None:
        """Tell the wrappers that parameters have come, changed shape, or stopped training."""
        for wrapper in self.wrappers:
            reducer.rebuild(wrapper)

    def refresh(self) -> None:
        """Rebuild where other parameters train than when a wrapper was last told."""
        for wrapper in self.wrappers:
            if not reducer.is_current(wrapper):
                reducer.rebuild(wrapper)

    def change_objective(self) -> None:
        """Tell wrappers that take the graph for static that another part of it has begun."""
        for wrapper in self.wrappers:
            if wrapper.static_graph:
                reducer.rebuild(wrapper)

    def expect(self, loss: Tensor) -> None:
        """Have wrappers look for unused parameters in the graph of the loss, penalty and all.

        From the model's output alone, the rank weights of a layer that was not called seem
        unused; they get a gradient from the penalty.
        """
        for wrapper in self.wrappers:
            searches = wrapper.find_unused_parameters and not wrapper.static_graph
            # The last is set by a forward pass: false for one under no_sync.
            if searches and loss.requires_grad and wrapper.require_forward_param_sync:
                wrapper.reducer.prepare_for_backward([loss])


def _digest(decision: object) -> int:
    digest = hashlib.blake2b(repr(decision).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _wrappers_around(layers: Mapping[str, TTModule]) -> Iterator[Any]:
    """Yield the living wrappers around any of the layers; a module does not know its wrapper."""
    wanted = set(layers.values())
    for candidate in gc.get_objects():
        is_wrapper = issubclass(type(candidate), DistributedDataParallel)
        if is_wrapper and not wanted.isdisjoint(candidate.modules()):
            yield candidate


def _check_can_follow(wrapper: Any, layers: Mapping[str, TTModule], first: Any) -> None:
    own = {id(p) for layer in layers.values() for p in (*layer.cores, *layer.rank_weights)}
    groups = [dist.get_process_group_ranks(each.process_group) for each in (wrapper, first)]
    faults = (
        (
            wrapper.mixed_precision is not None,
            "mixed_precision, whose copies keep their shapes",
            "use torch.autocast",
        ),
        (
            any(id(p) in own for p in wrapper._delay_all_reduce_params),
            "TT parameters in delay_all_reduce_named_params",
            "leave them out of it",
        ),
        (
            wrapper._use_python_reducer,
            "the reducer of torch._dynamo.config.optimize_ddp='python_reducer'",
            "use optimize_ddp=True, the default",
        ),
        (
            any(hasattr(p, "_in_backward_optimizers") for p in wrapper.module.parameters()),
            "optimizers that run in the backward pass",
            "step one optimizer after the backward pass",
        ),
        (
            groups[0] != groups[1],
            f"processes {groups[0]} beside another wrapper's {groups[1]}",
            "wrap all adapted layers for the same processes",
        ),
    )
    for is_fault, got, mend in faults:
        if is_fault:
            raise RankError(
                "rank adaptation cannot follow this DistributedDataParallel",
                got=got,
                expected="gradients that all processes average in buckets",
                mend=mend,
            )


def _check_no_join(wrappers: Sequence[Any]) -> None:
    if any(wrapper._join_config.enable for wrapper in wrappers):
        raise RankError(
            "rank adaptation needs as many steps in every process",
            got="a join context, in which processes may run out of batches",
            expected="the same number of batches for every process",
            mend="use DistributedSampler(drop_last=True), without join",
        )
