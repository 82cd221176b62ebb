"""Modules whose weight is a tensor train: ``TTLinear`` and ``TTEmbedding``.

A module holds its cores as parameters ``core_0 .. core_{n-1}`` and calls one operator of ``ops``.
While a ``RankAdapter`` is at work it also holds ``rank_weight_1 .. rank_weight_{n-1}``, one vector
a bond, which are multiplied into a neighbouring core before the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_fx import tt
from comera_fx.config import PlanConfig
from comera_fx.errors import SpecError
from comera_fx.lazy import LazyWeight
from comera_fx.ops import spec_of
from comera_fx.spec import TTSpec

DEFAULT_NUM_TOKENS = 4096
_OP_DEFAULTS: dict[str, Any] = {
    "num_tokens_hint": DEFAULT_NUM_TOKENS,
    **vars(PlanConfig()),
}

Module = TypeVar("Module", bound=nn.Module)


class TTModule(nn.Module):
    """What the TT modules share: cores, rank weights, the dense view, loading after a shrink.

    Args:
        spec: Shape of the weight at the start.
        in_size: Columns of the weight as a matrix ``(out, in)``, padding left out.
        out_size: Rows.
        plan: How contractions are planned.
    """

    kind: str

    def __init__(
        self,
        spec: TTSpec,
        in_size: int,
        out_size: int,
        *,
        plan: PlanConfig,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if spec.in_size < in_size or spec.out_size < out_size:
            raise SpecError(
                "the modes are too small for the weight",
                got=f"modes {spec.in_modes} -> {spec.out_modes}, sizes {in_size} -> {out_size}",
                expected="products of modes at least the weight's sizes",
                mend="give modes whose products reach the sizes; what is above is padding",
            )
        self.layout, self.num_in_modes = spec.layout, len(spec.in_modes)
        self._in_size, self._out_size = in_size, out_size
        self.plan_config = plan
        self.init_error: float | None = None
        self.rank_threshold = 0.0
        for k, shape in enumerate(spec.core_shapes):
            core = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(f"core_{k}", nn.Parameter(core))
        self.num_cores = spec.num_cores

    # ---- what is held ----

    @property
    def cores(self) -> tuple[nn.Parameter, ...]:
        """The cores, first to last."""
        return tuple(self._parameters[f"core_{k}"] for k in range(self.num_cores))  # type: ignore[misc]

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
        if self.rank_weights:
            return
        first = self.cores[0]
        for k in range(1, self.num_cores):
            ones = torch.ones(self.spec.ranks[k], device=first.device, dtype=first.dtype)
            weight = nn.Parameter(ones, requires_grad=first.requires_grad)
            self.register_parameter(f"rank_weight_{k}", weight)

    def effective_cores(self) -> list[Tensor]:
        """Return the cores with the rank weights multiplied in."""
        cores: list[Tensor] = list(self.cores)
        for k, weight in enumerate(self.rank_weights, start=1):
            live = F.threshold(weight, self.rank_threshold, 0.0)
            left, right = cores[k - 1], cores[k]
            if left.numel() <= right.numel():
                cores[k - 1] = left * live
            else:
                cores[k] = live.reshape(-1, *(1 for _ in right.shape[1:])) * right
        return cores

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
        if f"{prefix}rank_weight_1" in state_dict:
            self.attach_rank_weights(self.rank_threshold)
            for k, weight in enumerate(self.rank_weights, start=1):
                loaded = state_dict.get(f"{prefix}rank_weight_{k}")
                if loaded is not None and loaded.shape != weight.shape:
                    replace_data(weight, weight.new_ones(loaded.shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

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
                mend="optimize the model with the modes and layouts of the checkpoint",
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
            cores = tt.random_cores(
                spec, std, generator=generator, dtype=first.dtype, device=first.device
            )
        self.set_cores([core.to(first) for core in cores])
        for core in self.cores:
            core.requires_grad_(weight.requires_grad)

    def _shape_text(self) -> str:
        spec = self.spec
        modes = "x".join(map(str, spec.in_modes)) + " -> " + "x".join(map(str, spec.out_modes))
        return f"{spec.layout}, modes={modes}, ranks={spec.ranks}"


class TTLinear(TTModule):
    """``nn.Linear`` with a tensor-train weight.

    Args:
        spec: Shape of the weight; products of modes may exceed the sizes (padding).
        in_features: Size of the input's last axis.
        out_features: Size of the output's last axis.
        bias: Whether a bias is added.
        num_tokens_hint: Rows of input to plan for where their number is symbolic.
        plan: How contractions are planned.
        device: Where the parameters live.
        dtype: Their dtype.

    Shape:
        Input ``(..., in_features)``, output ``(..., out_features)``.

    Example:
        >>> spec = TTSpec("tt", (4, 4), (4, 4), (1, 4, 8, 4, 1))
        >>> TTLinear(spec, 16, 16)(torch.zeros(2, 3, 16)).shape
        torch.Size([2, 3, 16])
    """

    kind = "linear"

    def __init__(
        self,
        spec: TTSpec,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        num_tokens_hint: int = DEFAULT_NUM_TOKENS,
        plan: PlanConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            spec, in_features, out_features, plan=plan or PlanConfig(), device=device, dtype=dtype
        )
        self.in_features, self.out_features = in_features, out_features
        self.num_tokens_hint = num_tokens_hint
        bound = 1 / math.sqrt(in_features)
        if bias:
            values = torch.empty(out_features, device=device, dtype=dtype).uniform_(-bound, bound)
            self.bias: nn.Parameter | None = nn.Parameter(values)
        else:
            self.register_parameter("bias", None)
        std = bound / math.sqrt(3)  # of nn.Linear's uniform distribution
        self._reset_cores(spec, std)

    def _reset_cores(self, spec: TTSpec, std: float) -> None:
        first = self.cores[0]
        if first.device.type != "meta":
            self.set_cores(tt.random_cores(spec, std, dtype=first.dtype, device=first.device))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        spec: TTSpec,
        *,
        init: Literal["decompose", "random"] = "decompose",
        tol: float | None = None,
        std: float | None = None,
        generator: torch.Generator | None = None,
        num_tokens_hint: int = DEFAULT_NUM_TOKENS,
        plan: PlanConfig | None = None,
        name: str = "",
    ) -> TTLinear:
        """Return the TT form of a dense layer, which stays as it is.

        Args:
            linear: The dense layer.
            spec: Modes and ranks asked for.
            init: "decompose" approximates the weight, "random" keeps only its scale.
            tol: Relative Frobenius error at which ranks stop growing.
            std: Standard deviation of the weight for "random"; the dense weight's if ``None``.
            generator: Source of chance for "random".
            num_tokens_hint: Rows of input to plan for where their number is symbolic.
            plan: How contractions are planned.
            name: Named in errors.
        """
        weight = linear.weight
        layer = _without_chance(
            cls,
            spec,
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            num_tokens_hint=num_tokens_hint,
            plan=plan,
            dtype=weight.dtype,
        )
        layer.to_empty(device=weight.device)
        layer._fill(weight, spec, init, tol=tol, std=std, generator=generator, name=name)
        if layer.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + bias``."""
        result: Tensor = torch.ops.comera_fx.tt_linear.default(
            x,
            self.effective_cores(),
            self.bias,
            self.layout,
            self.num_in_modes,
            self.in_features,
            self.out_features,
            **self.op_settings(),
        )
        return result

    def op_settings(self) -> dict[str, Any]:
        """Return the operator's settings that are not at their defaults."""
        settings = {"num_tokens_hint": self.num_tokens_hint, **vars(self.plan_config)}
        return {key: value for key, value in settings.items() if value != _OP_DEFAULTS[key]}

    def extra_repr(self) -> str:
        """Sizes, modes and ranks."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self._shape_text()}"
        )


class TTEmbedding(TTModule):
    """``nn.Embedding`` with a tensor-train table.

    Args:
        spec: Shape of the table: in_modes are the row modes, out_modes the column modes.
        num_embeddings: Rows of the table.
        embedding_dim: Columns of the table.
        padding_idx: A row that gets no gradient.
        plan: How contractions are planned.
        device: Where the parameters live.
        dtype: Their dtype.

    Shape:
        Ids ``(...)``, output ``(..., embedding_dim)``.
    """

    kind = "embedding"
    padding_row: Tensor | None

    def __init__(
        self,
        spec: TTSpec,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        plan: PlanConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            spec,
            num_embeddings,
            embedding_dim,
            plan=plan or PlanConfig(),
            device=device,
            dtype=dtype,
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        self.padding_idx = padding_idx
        row = None
        if padding_idx is not None:
            row = torch.zeros(embedding_dim, device=device, dtype=dtype)
        self.register_buffer("padding_row", row)
        first = self.cores[0]
        if first.device.type != "meta":
            self.set_cores(tt.random_cores(spec, 1.0, dtype=first.dtype, device=first.device))

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        spec: TTSpec,
        *,
        init: Literal["decompose", "random"] = "decompose",
        tol: float | None = None,
        std: float | None = None,
        generator: torch.Generator | None = None,
        plan: PlanConfig | None = None,
        name: str = "",
    ) -> TTEmbedding:
        """Return the TT form of a dense table, which stays as it is.

        Args:
            embedding: The dense table.
            spec: Modes and ranks asked for.
            init: "decompose" approximates the table, "random" keeps only its scale.
            tol: Relative Frobenius error at which ranks stop growing.
            std: Standard deviation of the table for "random"; the dense table's if ``None``.
            generator: Source of chance for "random".
            plan: How contractions are planned.
            name: Named in errors.
        """
        weight = embedding.weight
        layer = _without_chance(
            cls,
            spec,
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            plan=plan,
            dtype=weight.dtype,
        )
        layer.to_empty(device=weight.device)
        if embedding.padding_idx is not None:
            layer.padding_row = weight.detach()[embedding.padding_idx].clone()
        matrix = weight.detach().t().requires_grad_(weight.requires_grad)
        layer._fill(matrix, spec, init, tol=tol, std=std, generator=generator, name=name)
        return layer.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids``."""
        settings = {} if self.padding_idx is None else {"padding_idx": self.padding_idx}
        result: Tensor = torch.ops.comera_fx.tt_embedding.default(
            ids,
            self.effective_cores(),
            self.padding_row,
            self.layout,
            self.num_in_modes,
            self.num_embeddings,
            self.embedding_dim,
            **settings,
        )
        return result

    def _weight_shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def _oriented_weight(self) -> Tensor:
        table = self.dense_weight().t()
        if self.padding_row is None or self.padding_idx is None:
            return table
        rows = torch.arange(self.num_embeddings, device=table.device)
        is_padding = rows.eq(self.padding_idx).unsqueeze(1)
        return torch.where(is_padding, self.padding_row, table)

    def extra_repr(self) -> str:
        """Sizes, modes and ranks."""
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}{self._shape_text()}"


def _without_chance(cls: Callable[..., Module], *args: Any, **kwargs: Any) -> Module:
    """Make a module without drawing numbers, so that the global generator stays where it is."""
    return cls(*args, device="meta", **kwargs)


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
