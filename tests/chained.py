"""Models of TT layers as graphs of operators, and counts of the products that a graph takes."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from comera_fx.capture import capture
from comera_fx.modules import TTLinear
from comera_fx.passes.batch_chains import BatchChains
from comera_fx.passes.pipeline import run_pipeline
from comera_fx.passes.share_input import ShareInput
from comera_fx.passes.tt_module_to_op import TTModuleToOp
from comera_fx.plan.shared import Form
from comera_fx.spec import TTSpec

SPEC = TTSpec("tt", (2, 3), (3, 2), (1, 2, 4, 3, 1))
UNEVEN = TTSpec("tt", (2, 3), (3, 2), (1, 2, 3, 3, 1))
TTM = TTSpec("ttm", (2, 3), (3, 2), (1, 3, 1))
KINDS = ["export", "symbolic_trace"]


def layer(spec: TTSpec = SPEC, size: int = 6, *, bias: bool = True, seed: int = 0) -> TTLinear:
    torch.manual_seed(seed)
    made = TTLinear(spec, size, size, bias=bias, dtype=torch.float64)
    if bias:
        nn.init.normal_(made.bias)
    return made


def every(spec, calls: Sequence[fx.Node]) -> Form:
    return "factors"


def operators_of(model: nn.Module, kind: str, x: Tensor) -> fx.GraphModule:
    """The graph that a pass on operators is given, captured in one of two ways."""
    captured = capture(model, x if kind == "export" else None)
    assert captured.kind == kind
    return run_pipeline(captured.gm, [TTModuleToOp()])


def batch(gm: fx.GraphModule) -> fx.GraphModule:
    return run_pipeline(gm, [BatchChains(every)])


def share(gm: fx.GraphModule) -> fx.GraphModule:
    return run_pipeline(gm, [BatchChains(every), ShareInput()])


class Products(TorchDispatchMode):
    """Counts matrix products, by the shapes they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.counts[name] += 1
            self.shapes.append(tuple(tuple(a.shape) for a in args[-2:]))
        return func(*args, **(kwargs or {}))


def products_of(gm: nn.Module, x: Tensor) -> Products:
    with Products() as products:
        gm(x)
    return products


class Cores(nn.Module):
    """Reads cores that ``made`` makes of its parameters and of the input."""

    def __init__(self, made) -> None:
        super().__init__()
        for k, core in enumerate(layer().cores):
            self.register_parameter(f"core_{k}", nn.Parameter(core.detach().clone()))
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        cores = [getattr(self, f"core_{k}") for k in range(4)]
        y = torch.ops.comera_fx.tt_linear.default(x, cores, None, "tt", 2, 6, 6)
        other = self.made(cores, x)
        return torch.ops.comera_fx.tt_linear.default(y, other, None, "tt", 2, 6, 6)
