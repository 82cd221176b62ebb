"""Modules whose weight is a tensor train: ``TTLinear`` and ``TTEmbedding``.

A module holds its cores as parameters ``core_0 .. core_{n-1}`` and calls one operator of ``ops``.
While a ``RankAdapter`` is at work it also holds ``rank_weight_1 .. rank_weight_{n-1}``, one vector
a bond, which are multiplied into a neighbouring core before the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from comera_fx import ops
from comera_fx.config import PlanConfig
from comera_fx.lower.ready import ReadyCalls, is_unobserved
from comera_fx.share.forward import take
from comera_fx.spec import TTSpec
from comera_fx.tt_module import TTModule, replace_data, tt_modules

__all__ = ["TTEmbedding", "TTLinear", "TTModule", "replace_data", "tt_modules"]

DEFAULT_NUM_TOKENS = 4096
_OP_DEFAULTS: dict[str, Any] = {
    "num_tokens_hint": DEFAULT_NUM_TOKENS,
    **vars(PlanConfig()),
}

Module = TypeVar("Module", bound=nn.Module)


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
        usual_std = 1 / math.sqrt(3 * in_features)  # of nn.Linear's uniform distribution
        super().__init__(
            spec, in_features, out_features, usual_std=usual_std, device=device, dtype=dtype
        )
        self.plan_config = plan or PlanConfig()
        self.in_features, self.out_features = in_features, out_features
        self.num_tokens_hint = num_tokens_hint
        self._ready = ReadyCalls()
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw cores and bias anew, at the scale of a fresh ``nn.Linear``."""
        self._reset_cores()
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

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
        layer._take_over(linear)
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + bias``."""
        shared = take(self, input)
        if shared is not None:
            return shared
        cores = self.effective_cores()
        bias = self.bias
        if not is_unobserved(input):
            return self._run(torch.ops.comera_fx.tt_linear.default, input, cores, bias)
        result = self._ready.run(input, cores, bias, self.plan_config)
        if result is None:
            result = self._run(ops.tt_linear, input, cores, bias)
            spec = self.spec
            if (spec.in_size, spec.out_size) == (self.in_features, self.out_features) and all(
                spec.ranks
            ):
                self._ready.add(input, cores, spec, self.plan_config)
        return result

    def _run(
        self, operator: Any, input: Tensor, cores: list[Tensor], bias: Tensor | None
    ) -> Tensor:
        result: Tensor = operator(
            input,
            cores,
            bias,
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
        num_tokens_hint: Number of ids to plan for where it is symbolic.
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
        num_tokens_hint: int = DEFAULT_NUM_TOKENS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            spec, num_embeddings, embedding_dim, usual_std=1.0, device=device, dtype=dtype
        )
        self.num_tokens_hint = num_tokens_hint
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        self.padding_idx = padding_idx
        row = None
        if padding_idx is not None:
            row = torch.zeros(embedding_dim, device=device, dtype=dtype)
        self.register_buffer("padding_row", row)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the cores anew, at the scale of a fresh ``nn.Embedding``."""
        self._reset_cores()

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
        num_tokens_hint: int = DEFAULT_NUM_TOKENS,
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
            num_tokens_hint: Number of ids to plan for where it is symbolic.
            name: Named in errors.
        """
        weight = embedding.weight
        layer = _without_chance(
            cls,
            spec,
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            num_tokens_hint=num_tokens_hint,
            dtype=weight.dtype,
        )
        layer.to_empty(device=weight.device)
        if embedding.padding_idx is not None:
            layer.padding_row = weight.detach()[embedding.padding_idx].clone()
        matrix = weight.detach().t().requires_grad_(weight.requires_grad)
        layer._fill(matrix, spec, init, tol=tol, std=std, generator=generator, name=name)
        layer._take_over(embedding)
        return layer.train(embedding.training)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows ``input``, a tensor of ids."""
        result: Tensor = torch.ops.comera_fx.tt_embedding.default(
            input,
            self.effective_cores(),
            self.padding_row,
            self.layout,
            self.num_in_modes,
            self.num_embeddings,
            self.embedding_dim,
            **self.op_settings(),
        )
        return result

    def op_settings(self) -> dict[str, Any]:
        """Return the operator's settings that are not at their defaults."""
        settings: dict[str, Any] = {}
        if self.padding_idx is not None:
            settings["padding_idx"] = self.padding_idx
        if self.num_tokens_hint != DEFAULT_NUM_TOKENS:
            settings["num_tokens_hint"] = self.num_tokens_hint
        return settings

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
