"""Train a small TT decoder under DistributedDataParallel, with cuts, and count what is sent.

Run in two processes, or in one without torchrun:

    torchrun --standalone --nproc_per_node=2 -m bench.distributed [--quick]
    python -m bench.distributed [--quick]

It reads the source of Python's standard library, byte by byte. Bytes are those of the gradient
buckets that a step all-reduces, seen by a communication hook. The adapter adds what is not counted
here: two flags a step, whether loss and gradients are finite, and every ``prune_every`` steps the
new bases of all bonds, which the first process sends to the others.
"""

# Without `from __future__ import annotations`: DDP reads those of a communication hook.
import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import comera_fx
from bench.models.decoder import Decoder
from bench.timing import Row, format_table
from comera_fx.demo.config import VOCABULARY, DemoConfig
from comera_fx.demo.data import Corpus, load_corpus, train_batch
from comera_fx.demo.model import next_byte_loss

FULL = DemoConfig(steps=200, batch_size=8, max_files=400)
QUICK = DemoConfig(
    steps=24,
    batch_size=2,
    context=16,
    width=64,
    num_layers=1,
    ffn_width=256,
    rank=8,
    prune_every=4,
    max_files=40,
)


@dataclass
class Sent:
    """Counts the bytes of the gradient buckets that are all-reduced."""

    group: dist.ProcessGroup
    num_bytes: int = 0

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Count a bucket and average it over the processes, as without a hook."""
        self.num_bytes += bucket.buffer().nbytes
        averaged: torch.futures.Future[torch.Tensor] = allreduce_hook(self.group, bucket)
        return averaged

    def take(self) -> int:
        """Return the bytes since the last call."""
        taken, self.num_bytes = self.num_bytes, 0
        return taken


def start() -> torch.device:
    """Join the other processes that torchrun started, if any; return this one's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_device = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = "nccl" if has_device else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not has_device:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def wrap(model: nn.Module) -> tuple[DistributedDataParallel, Sent]:
    """Return the model under DDP, and the count of what it sends."""
    ddp = DistributedDataParallel(model)
    sent = Sent(ddp.process_group)
    ddp.register_comm_hook(None, sent.hook)
    return ddp, sent


def step_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    """Return the bytes that one plain training step of a model all-reduces."""
    ddp, sent = wrap(model)
    next_byte_loss(ddp, batch).backward()  # type: ignore[no-untyped-call]
    return sent.take()


def train(model: nn.Module, corpus: Corpus, config: DemoConfig) -> list[Row]:
    """Train a TT model with cuts; return what its first step and each one after a cut sent.

    Args:
        model: An optimised model, the same in every process.
        corpus: Text; every process reads batches of its own.
        config: Lengths, sizes and rates.
    """
    ddp, sent = wrap(model)
    groups = comera_fx.param_groups(model, lr=config.tt_lr, rest_lr=config.tt_rest_lr)
    optimizer = torch.optim.AdamW(groups)
    adapter = comera_fx.RankAdapter(ddp, optimizer, rank_config(config))
    device = next(model.parameters()).device
    rows = []
    for step in range(config.steps):
        number = step * dist.get_world_size() + dist.get_rank()
        task_loss = next_byte_loss(ddp, train_batch(corpus, number, config).to(device))
        optimizer.zero_grad()
        adapter.loss(task_loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        row: Row = {"step": step, "stage": adapter.stage, "tt_params": adapter.size}
        adapter.step()
        row |= {"loss": round(task_loss.item(), 3), "sent_bytes": sent.take()}
        if step % config.prune_every == 0 or step == config.steps - 1:
            rows.append(row)
    return rows


def rank_config(config: DemoConfig) -> comera_fx.RankConfig:
    """Return the demo's way to adapt ranks, without a warm-up."""
    return comera_fx.RankConfig(
        target_ratio=config.target_ratio,
        prune_every=config.prune_every,
    )


def measure(config: DemoConfig, device: torch.device) -> tuple[int, list[Row]]:
    """Return the bytes that a step of the dense model sends, and the rows of the TT model."""
    torch.manual_seed(config.seed)
    sizes = config.width, config.num_layers, config.num_heads
    dense = Decoder(VOCABULARY, config.context, *sizes).to(device)
    how = comera_fx.OptimizeConfig(init="random", max_rank=config.rank, only_if_faster=False)
    optimised = comera_fx.optimize(dense, config=how)
    corpus = load_corpus(config)
    dense_bytes = step_bytes(dense, train_batch(corpus, 0, config).to(device))
    return dense_bytes, train(optimised, corpus, config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and have the first process print what it saw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, for a test")
    options = parser.parse_args(arguments)
    device = start()
    try:
        dense_bytes, rows = measure(QUICK if options.quick else FULL, device)
        if dist.get_rank() == 0:
            print(format_table(rows))
            first, last = rows[0]["sent_bytes"], rows[-1]["sent_bytes"]
            print(
                f"{dist.get_world_size()} processes; all-reduced a step: dense {dense_bytes:,} "
                f"bytes, TT {first:,} before cuts, {last:,} after"
            )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
