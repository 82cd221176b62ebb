"""Networks with data and a loss, dense and in TT form: what ``bench.compile`` trains steps of.

Every model of a workload is drawn from one seed, so that versions start at equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import comera_fx
from bench.models.decoder import Decoder
from bench.models.dlrm import DLRM
from bench.models.six_encoder import NUM_CLASSES, PAPER_CONFIG, VOCABULARY, SixEncoder
from bench.workloads import Training
from comera_fx import OptimizeConfig
from comera_fx.modules import tt_modules

MAX_RANK, SMALL_RANK = 32, 4
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Task:
    """A workload made ready on a device.

    Args:
        build: Makes the dense network for a share of dropout.
        config: How it is optimised.
        inputs: What a step is given.
        target: What the loss compares the output with.
        loss: Of output and target.
        device: Where all this lies, ``"cpu"`` or ``"cuda"``.
    """

    build: Callable[[float], nn.Module]
    config: OptimizeConfig
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    device: str

    def dense(self, dropout: float = 0.0) -> nn.Module:
        """Return the dense network."""
        torch.manual_seed(0)
        return self.build(dropout).to(self.device)

    def in_tt_form(self, dropout: float = 0.0, *, share: bool = True) -> nn.Module:
        """Return the optimised network; each call gives one of equal numbers."""
        config = replace(self.config, share=share)
        model: nn.Module = comera_fx.optimize(self.dense(dropout), config=config)
        assert any(True for _ in tt_modules(model)), "no layer is in TT form"
        return model


class Trainer:
    """Training steps of a model: forward, loss, backward, fused AdamW, gradients set to ``None``.

    Args:
        task: Data and loss.
        model: What is trained.
        call: What runs it: the model, or what ``torch.compile`` made of it.
    """

    def __init__(self, task: Task, model: nn.Module, call: Callable[..., Tensor]) -> None:
        self.task, self.model, self.call = task, model.train(), call
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self) -> Tensor:
        """Train one step; return the loss before it."""
        loss = self.task.loss(self.call(*self.task.inputs), self.task.target)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_task(workload: Training, device: str = "cpu") -> Task:
    """Return the network, data and loss of a workload, the data on the device."""
    task = TASKS[workload.network](workload)
    inputs = tuple(tensor.to(device) for tensor in task.inputs)
    return replace(task, inputs=inputs, target=task.target.to(device), device=device)


# ---- networks ----


def _six_encoder(workload: Training) -> Task:
    draw, shape = _generator(), (workload.batch, workload.length)
    vocabulary = workload.sizes.get("vocabulary", VOCABULARY)
    ids = torch.randint(vocabulary, shape, generator=draw)
    return Task(
        lambda dropout: SixEncoder(dropout, **workload.sizes),
        _small_config() if workload.sizes else PAPER_CONFIG,
        (ids, torch.randint(2, shape, generator=draw)),
        torch.randint(NUM_CLASSES, (workload.batch,), generator=draw),
        F.cross_entropy,
        "cpu",
    )


def _decoder(workload: Training) -> Task:
    shape = (workload.batch, workload.length + 1)
    ids = torch.randint(workload.sizes["vocabulary"], shape, generator=_generator())
    return Task(
        lambda dropout: Decoder(**workload.sizes),
        _config(workload),
        (ids[:, :-1],),
        ids[:, 1:].flatten(),
        lambda logits_BTV, target: F.cross_entropy(logits_BTV.flatten(0, 1), target),
        "cpu",
    )


def _dlrm(workload: Training) -> Task:
    draw, batch = _generator(), workload.batch
    tables = workload.sizes["tables"]
    ids = [torch.randint(size, (batch, 1), generator=draw) for size in tables]
    return Task(
        lambda dropout: DLRM(**workload.sizes),
        _config(workload),
        (
            torch.randn(batch, workload.sizes["num_dense"], generator=draw),
            torch.stack(ids, dim=1),
        ),
        torch.randint(2, (batch,), generator=draw).float(),
        F.binary_cross_entropy_with_logits,
        "cpu",
    )


def _stack(workload: Training) -> Task:
    spec, draw = workload.sizes["spec"], _generator()
    width = spec.in_size

    def build(dropout: float) -> nn.Module:
        layers = [nn.Linear(width, width, bias=False) for _ in range(workload.sizes["depth"])]
        for layer in layers:
            nn.init.normal_(layer.weight, std=1 / math.sqrt(width))
        return nn.Sequential(*layers)

    config = OptimizeConfig(
        init="random",
        modes={"*": (spec.in_modes, spec.out_modes)},
        ranks={"*": spec.ranks},
        min_params=0,
        num_tokens_hint=workload.batch,
    )
    return Task(
        build,
        config,
        (torch.randn(workload.batch, width, generator=draw),),
        torch.randn(workload.batch, width, generator=draw),
        F.mse_loss,
        "cpu",
    )


TASKS: dict[str, Callable[[Training], Task]] = {
    "six_encoder": _six_encoder,
    "decoder": _decoder,
    "dlrm": _dlrm,
    "stack": _stack,
}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _config(workload: Training) -> OptimizeConfig:
    """Layers that the policy would choose; at small sizes every layer, for it would choose none."""
    num_tokens = workload.batch * workload.length
    if num_tokens < 64:
        return _small_config()
    return OptimizeConfig(init="random", max_rank=MAX_RANK, num_tokens_hint=num_tokens)


def _small_config() -> OptimizeConfig:
    return OptimizeConfig(init="random", max_rank=SMALL_RANK, min_params=0, only_if_faster=False)
