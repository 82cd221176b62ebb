"""Graphs as dynamo hands them to a backend, rewritten by passes and run."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from comera_fx.passes.pipeline import run_pipeline
from tests.tolerances import EXACT


class Rewriting:
    """A backend that runs passes on each graph and keeps the graphs before and after."""

    def __init__(self, *passes: Any) -> None:
        self.passes = passes
        self.before: list[fx.GraphModule] = []
        self.after: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before.append(gm)
        self.after.append(run_pipeline(gm, self.passes))
        return self.after[-1].forward

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(function, backend=self, fullgraph=True, **options)


def names_of(gm: fx.GraphModule) -> list[str]:
    """The functions that the graph calls, in order."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [getattr(node.target, "__name__", str(node.target)) for node in nodes]


def results_of(function: Callable[..., Any], model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
    """Outputs, and gradients of parameters and floating inputs, for one seed."""
    given = [
        x.detach().clone().requires_grad_()
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in inputs
    ]
    torch.manual_seed(3)
    out = function(*given)
    outputs = [out] if isinstance(out, Tensor) else [y for y in out if y is not None]
    tracked = [y for y in outputs if y.requires_grad]
    if not tracked:
        return outputs
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in tracked]
    wanted = [p for p in model.parameters() if p.requires_grad]
    wanted += [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    return [*outputs, *torch.autograd.grad(tracked, wanted, grads, allow_unused=True)]


def assert_as_eager(
    backend: Rewriting,
    model: nn.Module,
    *inputs: Any,
    tolerances: dict[str, float] = EXACT,
    **options: Any,
) -> fx.GraphModule:
    """Check values and gradients of the rewritten model, and return its graph."""
    mine = results_of(backend.compile(model, **options), model, inputs)
    theirs = results_of(model, model, inputs)
    torch.testing.assert_close(mine, theirs, **tolerances)
    return backend.after[-1]
