"""What the TT modules share: cores, rank weights, the dense view, loading after a shrink."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_fx import tt
from comera_fx.errors import SpecError
from comera_fx.lazy import LazyWeight
from comera_fx.ops import spec_of
from comera_fx.spec import TTSpec


class TTModule(nn.Module):
    """A module whose weight is a tensor train.

    Args:
        spec: Shape of the weight at the start.
        in_size: Columns of the weight as a matrix ``(out, in)``, padding left out.
        out_size: Rows.
        usual_std: Standard deviation of an untrained weight of this kind.
        device: Where the parameters live.
        dtype: Their dtype.
    """

    kind: str

    def __init__(
        self,
        spec: TTSpec,
        in_size: int,
        out_size: int,
        *,
        usual_std: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if spec.transposed:
            raise SpecError(
                "a layer's own cores have the input modes first",
                got=f"a transposed {spec}",
                expected="a spec that is not transposed",
                mend="use spec.turned() for a layer that maps the other way",
            )
        if spec.in_size < in_size or spec.out_size < out_size:
            raise SpecError(
                "the modes are too small for the weight",
                got=f"modes {spec.in_modes} -> {spec.out_modes}, sizes {in_size} -> {out_size}",
                expected="products of modes at least the weight's sizes",
                mend="give modes whose products reach the sizes; what is above is padding",
            )
        self.layout, self.num_in_modes = spec.layout, len(spec.in_modes)
        self._in_size, self._out_size = in_size, out_size
        self.usual_std = usual_std
        self.init_error: float | None = None
        self.rank_threshold = 0.0
        for k, shape in enumerate(spec.core_shapes):
            core = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(f"core_{k}", nn.Parameter(core))
        self.num_cores = spec.num_cores
        self._core_names = tuple(f"core_{k}" for k in range(spec.num_cores))

    # ---- what is held ----

    @property
    def cores(self) -> tuple[nn.Parameter, ...]:
        """The cores, first to last."""
        held = self._parameters
        try:
            return tuple([held[name] for name in self._core_names])  # type: ignore[misc]
        except KeyError:  # a parametrization holds it, or a replica that has no parameters
            return tuple([getattr(self, name) for name in self._core_names])

    @property
    def spec(self) -> TTSpec:
        """Shape of the weight as it is now; follows the cores when ranks shrink."""
        return spec_of(self.layout, self.num_in_modes, tuple(core.shape for core in self.cores))

    @property
    def rank_weights(self) -> tuple[nn.Parameter, ...]:
        """One vector per inner bond, left to right; empty unless ranks adapt."""
        if "rank_weight_1" not in self._parameters:
            return ()
        bonds = range(1, self.num_cores)
        return tuple(self._parameters[f"rank_weight_{k}"] for k in bonds)  # type: ignore[misc]

    @property
    def dense_params(self) -> int:
        """Numbers in the dense weight."""
        return self._in_size * self._out_size

    @property
    def tt_params(self) -> int:
        """Numbers in the cores."""
        return self.spec.num_params

    def attach_rank_weights(self, threshold: float) -> None:
        """Give every inner bond a rank weight, 1 at the start; those there stay.

        Args:
            threshold: Rank weights at or below it act as 0.
        """
        self.rank_threshold = threshold
        first = self.cores[0]
        # A buffer of its own, so that a checkpoint computes the same without its adapter.
        saved = torch.tensor(threshold, dtype=torch.float64, device=first.device)
        self.register_buffer("rank_weight_threshold", saved)
        if self.rank_weights:
            return
        for k in range(1, self.num_cores):
            # A step of a half-precision number at 1 would round away.
            dtype = torch.promote_types(first.dtype, torch.float32)
            ones = torch.ones(self.spec.ranks[k], device=first.device, dtype=dtype)
            weight = nn.Parameter(ones, requires_grad=first.requires_grad)
            self.register_parameter(f"rank_weight_{k}", weight)

    def effective_cores(self) -> list[Tensor]:
        """Return the cores with the rank weights multiplied in."""
        cores: list[Tensor] = list(self.cores)
        if "rank_weight_1" not in self._parameters:
            return cores
        for k, weight in enumerate(self.rank_weights, start=1):
            live = F.threshold(weight, self.rank_threshold, 0.0).to(cores[k].dtype)
            left, right = cores[k - 1], cores[k]
            if self.joins_left(k):
                cores[k - 1] = left * live
            else:
                cores[k] = live.reshape(-1, *(1 for _ in right.shape[1:])) * right
        return cores

    def joins_left(self, bond: int) -> bool:
        """Whether a bond's rank weight goes into the core left of it: the smaller of the two."""
        return self.cores[bond - 1].numel() <= self.cores[bond].numel()

    def dense_weight(self) -> Tensor:
        """Return the matrix ``(out, in)``, differentiable in the cores."""
        result: Tensor = torch.ops.comera_fx.tt_dense.default(
            self.effective_cores(), self.layout, self.num_in_modes, self._in_size, self._out_size
        )
        return result

    @property
    def weight(self) -> Tensor:
        """The dense weight, built when its numbers are read: shape, dtype and device cost nothing.

        Raises:
            InputError: On a change in place, which would change a temporary.
        """
        if torch.compiler.is_compiling():
            return self._oriented_weight()
        return LazyWeight.of(self._weight_shape(), self.cores[0], self._oriented_weight)

    def _weight_shape(self) -> tuple[int, int]:
        return self._out_size, self._in_size

    def _oriented_weight(self) -> Tensor:
        return self.dense_weight()

    # ---- changing what is held ----

    def _reset_cores(self) -> None:
        first = self.cores[0]
        if first.device.type != "meta":
            std = self.usual_std
            spec, dtype, device = self.spec, first.dtype, first.device
            self.set_cores(tt.random_cores(spec, std, dtype=dtype, device=device))

    def set_cores(self, cores: Sequence[Tensor]) -> None:
        """Replace the numbers of the cores, whose ranks may differ; the parameters stay."""
        for parameter, core in zip(self.cores, cores, strict=True):
            replace_data(parameter, core)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take cores of other ranks, as a checkpoint from after a shrink holds them."""
        names = [f"{prefix}core_{k}" for k in range(self.num_cores)]
        if all(name in state_dict for name in names):
            self._fit_ranks(tuple(state_dict[name].shape for name in names), names[0])
        for k, weight in enumerate(self.rank_weights, start=1):
            if weight.numel() != self.spec.ranks[k]:  # should the state hold no rank weights
                replace_data(weight, weight.new_ones(self.spec.ranks[k]))
        if f"{prefix}rank_weight_1" in state_dict:
            threshold = state_dict.get(f"{prefix}rank_weight_threshold", self.rank_threshold)
            self.attach_rank_weights(float(threshold))
            for k, weight in enumerate(self.rank_weights, start=1):
                loaded = state_dict.get(f"{prefix}rank_weight_{k}")
                if loaded is not None and loaded.shape != weight.shape:
                    replace_data(weight, weight.new_ones(loaded.shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _take_over(self, dense: nn.Module) -> None:
        """Carry over what its user has hung on the dense layer: attributes no layer has by itself.

        Code outside may read them, such as a flag or a gain set on the layer.
        """
        plain = vars(type(dense)(1, 1, device="meta"))
        own = {key: value for key, value in vars(dense).items() if key not in plain}
        own = {key: value for key, value in own.items() if key not in vars(self)}
        vars(self).update(copy.deepcopy(own))
        for name in ("max_norm", "norm_type", "scale_grad_by_freq", "sparse"):
            if hasattr(dense, name):
                setattr(self, name, getattr(dense, name))

    def _fit_ranks(self, shapes: tuple[torch.Size, ...], name: str) -> None:
        own = tuple(core.shape for core in self.cores)
        if shapes == own:
            return
        if [len(s) for s in shapes] != [len(s) for s in own] or any(
            theirs[1:-1] != ours[1:-1] for theirs, ours in zip(shapes, own, strict=True)
        ):
            raise SpecError(
                f"the checkpoint's cores do not fit this layer ({name})",
                got=f"cores of shapes {[tuple(s) for s in shapes]}",
                expected=f"the modes of {[tuple(s) for s in own]}, with any ranks",
                mend="optimize with the OptimizeConfig that the checkpoint was made with",
            )
        ranks = (*(shape[0] for shape in shapes), shapes[-1][-1])
        current = self.spec
        spec = TTSpec(current.layout, current.in_modes, current.out_modes, ranks)
        self.set_cores(
            [core.new_zeros(s) for core, s in zip(self.cores, spec.core_shapes, strict=True)]
        )

    def _fill(
        self,
        weight: Tensor,
        spec: TTSpec,
        init: Literal["decompose", "random"],
        *,
        tol: float | None,
        std: float | None,
        generator: torch.Generator | None,
        name: str,
    ) -> None:
        """Set the cores from the dense matrix ``(out, in)``, or by chance."""
        first = self.cores[0]
        if init == "decompose":
            cores, _, self.init_error = tt.decompose(weight.detach(), spec, tol=tol, name=name)
        else:
            std = float(weight.detach().float().std()) if std is None else std
            is_zero = std == 0
            cores = tt.random_cores(
                spec,
                self.usual_std if is_zero else std,
                generator=generator,
                dtype=first.dtype,
                device=first.device,
            )
            if is_zero:  # what starts as zero stays so, and its last core gets a gradient
                cores[-1] = torch.zeros_like(cores[-1])
        self.set_cores([core.to(first) for core in cores])
        for core in self.cores:
            core.requires_grad_(weight.requires_grad)

    def _shape_text(self) -> str:
        spec = self.spec
        modes = "x".join(map(str, spec.in_modes)) + " -> " + "x".join(map(str, spec.out_modes))
        return f"{spec.layout}, modes={modes}, ranks={spec.ranks}"


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter numbers of another shape; it stays the same object.

    Its gradient is dropped. Autograd keeps a node per parameter that remembers the old shape for
    as long as an earlier loss is alive; a change of dtype on the way makes it forget.
    """
    parameter.grad = None
    if data.shape != parameter.shape:
        parameter.data = data.to(torch.float16 if data.dtype != torch.float16 else torch.float32)
    parameter.data = data


def tt_modules(model: nn.Module) -> Iterator[tuple[str, TTModule]]:
    """Yield the TT modules of a model with their qualified names, each once."""
    for name, module in model.named_modules():
        if isinstance(module, TTModule):
            yield name, module
