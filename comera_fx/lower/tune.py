"""Choose among plans by running them: what is predicted best is not always fastest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comera_fx.lower.execute import contract
from comera_fx.lower.timing import Run, medians
from comera_fx.plan.plan import Plan
from comera_fx.plan.program import Program

NUM_TUNED = 3
"""How many of the best plans are timed."""
SECONDS = 0.2
"""How long they are timed for, all together, or five turns where that is longer."""


def fastest_program(
    plans: Sequence[Plan], wanted: tuple[bool, ...], dtype: torch.dtype, device: torch.device
) -> Program:
    """Run the best plans, forward and backward, on tensors of ones, and return the fastest's.

    Neither gradients nor random numbers of the caller are touched.

    Args:
        plans: Plans of one layer at one number of tokens, best first by prediction.
        wanted: Per leaf, whether its gradient is wanted: the input, then the cores.
        dtype: Of the tensors.
        device: Where they are.
    """
    programs = [plan.program_for(wanted) for plan in plans[:NUM_TUNED]]
    if len(programs) == 1:
        return programs[0]
    spec, num_tokens = plans[0].spec, plans[0].num_tokens
    shapes = [(num_tokens, spec.in_size), *spec.core_shapes]
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(any(wanted)),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is),
    ):
        leaves = [
            torch.ones(shape, dtype=dtype, device=device, requires_grad=grad)
            for shape, grad in zip(shapes, wanted, strict=True)
        ]
        runs = {
            str(k): _run(program, num_tokens, leaves, (num_tokens, spec.out_size))
            for k, program in enumerate(programs)
        }
        times = medians(runs, device.type, seconds=SECONDS)
    return programs[min(range(len(programs)), key=lambda k: times[str(k)])]


def _as_it_is(tensor: Tensor) -> Tensor:
    """Keep a saved tensor from the hooks of the caller, such as those of checkpointing."""
    return tensor


def _run(program: Program, num_tokens: int, leaves: list[Tensor], shape: tuple[int, int]) -> Run:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grad = torch.ones(shape, dtype=leaves[0].dtype, device=leaves[0].device)

    def run() -> None:
        result = contract(program, num_tokens, leaves, shape)
        if wanted:
            torch.autograd.grad(result, wanted, grad)

    return run
