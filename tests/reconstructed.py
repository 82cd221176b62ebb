"""Models on weights that are reconstructed from cores, in every form that a graph may hold them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from comera_fx.passes.fuse_reconstruction import FuseReconstruction
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.spec import TTSpec
from comera_fx.tt import random_cores
from tests.tolerances import EXACT

# On every side two modes of different sizes, so that their order shows.
SPECS = {
    "tt": TTSpec("tt", (2, 3), (2, 5), (1, 2, 4, 3, 1)),
    "ttm": TTSpec("ttm", (2, 3), (2, 5), (1, 3, 1)),
}
SHORT = TTSpec("tt", (6,), (10,), (1, 3, 1))
LINEAR, EMBEDDING = "comera_fx.tt_linear.default", "comera_fx.tt_embedding.default"
DENSE = "comera_fx.tt_dense.default"

Read = Callable[["Reconstructed", Tensor], Tensor]


class Reconstructed(nn.Module):
    """Holds a weight as cores and hands it to ``read``."""

    def __init__(
        self,
        read: Read,
        spec: TTSpec = SPECS["tt"],
        in_features: int | None = None,
        out_features: int | None = None,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        cores = random_cores(spec, 1.0, generator=generator, dtype=torch.float64)
        self.num_cores = len(cores)
        for k, core in enumerate(cores):
            self.register_parameter(f"core_{k}", nn.Parameter(core))
        self.read, self.spec = read, spec
        self.in_features = in_features or spec.in_size
        self.out_features = out_features or spec.out_size
        for name, size in (("bias", self.out_features), ("column_bias", self.in_features)):
            values = torch.randn(size, dtype=torch.float64, generator=generator)
            self.register_parameter(name, nn.Parameter(values))

    @property
    def weight(self) -> Tensor:
        return torch.ops.comera_fx.tt_dense.default(
            [getattr(self, f"core_{k}") for k in range(self.num_cores)],
            self.spec.layout,
            len(self.spec.in_modes),
            self.in_features,
            self.out_features,
        )

    def forward(self, x: Tensor) -> object:
        return self.read(self, x)


ON_COLUMNS: dict[str, Read] = {
    "linear": lambda m, x: F.linear(x, m.weight, m.bias),
    "keywords": lambda m, x: F.linear(bias=m.bias, weight=m.weight, input=x),
    "no-bias": lambda m, x: F.linear(x, m.weight),
    "t": lambda m, x: x @ m.weight.t(),
    "torch-t": lambda m, x: x @ torch.t(m.weight),
    "T": lambda m, x: torch.matmul(x, m.weight.T),
    "mT": lambda m, x: torch.mm(x, m.weight.mT),
    "method": lambda m, x: x.matmul(m.weight.transpose(0, 1)),
    "mm": lambda m, x: x.mm(m.weight.transpose(-1, -2)),
    "permute": lambda m, x: x @ m.weight.permute(1, 0),
    "permute-list": lambda m, x: x @ torch.permute(m.weight, (1, 0)),
    "swapaxes": lambda m, x: x @ m.weight.swapaxes(1, 0),
    "same-axes": lambda m, x: F.linear(x, m.weight.permute(0, 1)),
    "thrice": lambda m, x: x @ m.weight.t().T.mT,
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight.t()),
    "addmm-method": lambda m, x: m.bias.addmm(x, m.weight.t()),
    "addmm-scalar": lambda m, x: torch.addmm(m.bias.sum(), x, m.weight.t()),
    "bias-of-rows": lambda m, x: F.linear(x, m.weight, m.bias * 2),
}
ON_ROWS: dict[str, Read] = {
    "matmul": lambda m, x: x @ m.weight,
    "linear-of-t": lambda m, x: F.linear(x, m.weight.t(), m.column_bias),
    "addmm": lambda m, x: torch.addmm(m.column_bias, x, m.weight),
    "mm": lambda m, x: torch.mm(x, m.weight),
}
PRODUCTS = {
    **{f"columns-{name}": (True, read) for name, read in ON_COLUMNS.items()},
    **{f"rows-{name}": (False, read) for name, read in ON_ROWS.items()},
}
LOOKUPS: dict[str, tuple[bool, Read]] = {
    "rows": (False, lambda m, ids: F.embedding(ids, m.weight)),
    "columns": (True, lambda m, ids: F.embedding(ids, m.weight.t())),
    "rows-padding": (False, lambda m, ids: F.embedding(ids, m.weight, padding_idx=1)),
    "rows-last": (False, lambda m, ids: F.embedding(ids, m.weight, padding_idx=-1)),
    "columns-padding": (True, lambda m, ids: F.embedding(ids, m.weight.T, padding_idx=0)),
    "operator": (False, lambda m, ids: torch.embedding(m.weight, ids)),
    "operator-padding": (False, lambda m, ids: torch.embedding(m.weight, ids, 2)),
}


def symbolic(model: nn.Module, x: Tensor | None = None) -> fx.GraphModule:
    class Inside(fx.Tracer):
        """Enters parametrizations, which torch's own tracer takes for layers."""

        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            is_ours = isinstance(m, parametrize.ParametrizationList)
            return not is_ours and super().is_leaf_module(m, module_qualified_name)

    return fx.GraphModule(model, Inside().trace(model))


def exported(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return torch.export.export(model, (x,), strict=False).module()


def fuse(gm: fx.GraphModule) -> fx.GraphModule:
    return run_pipeline(gm, [FuseReconstruction()])


def targets(gm: fx.GraphModule) -> list[str]:
    """The operators of this package that the graph calls, in order."""
    names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    return [name for name in names if name.startswith("comera_fx.")]


def results_of(gm: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Outputs, and gradients of input and parameters for one random gradient each."""
    if x.is_floating_point():
        x = x.detach().clone().requires_grad_()
    out = gm(x)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in outputs]
    params = dict(gm.named_parameters())
    wanted = [params[name] for name in sorted(params) if params[name].requires_grad]
    wanted += [x] * x.requires_grad
    found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [*outputs, *found]


def assert_same_results(after: nn.Module, before: nn.Module, x: Tensor) -> None:
    pairs = zip(results_of(after, x), results_of(before, x), strict=True)
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, **EXACT)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def numbers_below(count: int) -> Tensor:
    """Every number below ``count`` and the first twice, in a matrix of two columns if even."""
    ids = torch.tensor([0, *range(count)])
    return ids.reshape(-1, 2) if len(ids) % 2 == 0 else ids
