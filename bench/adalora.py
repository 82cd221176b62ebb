"""Ranks given to layers by importance, as AdaLoRA does, for weights trained from scratch.

``W = P diag(l) Q``, with P and Q kept near orthonormal by a penalty. Entries of ``l`` that carry
little are set to 0 as a budget falls; at the end they are cut out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bench.low_rank import LowRankLayer


class Budget:
    """Which singular values of which layer may stay, step by step.

    After every step, importance is a product of two moving averages: of ``|l grad|``, and of how
    far that is from its average. Every ``prune_every`` steps the least important entries, over
    all layers, are set to 0 so that the rest fits into the budget; they may come back. The
    budget stays at the start for ``start_steps``, falls by a cubic, and for the last
    ``end_steps`` is the target, with the choice settled.

    Args:
        layers: Name to layer; each has a ``scale``.
        target: Parameters to come down to.
        steps: Length of the run.
        prune_every: Steps between two choices.
        start_share: Length of the first stage, as a share of ``steps``.
        end_share: Length of the last stage.
        memory: Weight of the past in both averages.

    Source:
        Zhang et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", ICLR
        2023, equations 4 to 8 and 11 (from memory). Left out: the importance of the entries of
        P and Q. The budget is in parameters, as layers differ in what a rank costs.
    """

    def __init__(
        self,
        layers: Mapping[str, LowRankLayer],
        target: int,
        steps: int,
        *,
        prune_every: int = 10,
        start_share: float = 0.1,
        end_share: float = 0.4,
        memory: float = 0.85,
    ) -> None:
        self.layers, self.target, self.memory = dict(layers), target, memory
        self.prune_every = prune_every
        self.start_steps = int(start_share * steps)
        self.end_step = max(self.start_steps, steps - int(end_share * steps))
        self.initial_size = sum(layer.weight_params for layer in self.layers.values())
        scales = {name: _scale(layer).detach() for name, layer in layers.items()}
        self.masks = {name: torch.ones_like(one, dtype=torch.bool) for name, one in scales.items()}
        self._importance = {name: torch.zeros_like(one) for name, one in scales.items()}
        self._unrest = {name: torch.zeros_like(one) for name, one in scales.items()}
        self._num_steps = 0

    def budget(self, step: int) -> int:
        """Return the parameters that may be left after a step."""
        if step <= self.start_steps:
            return self.initial_size
        if step >= self.end_step:
            return self.target
        left = 1 - (step - self.start_steps) / (self.end_step - self.start_steps)
        return self.target + int((self.initial_size - self.target) * left**3)

    @torch.no_grad()
    def step(self) -> None:
        """Note importance, and mask where it is time; call it after the optimizer's step."""
        self._num_steps += 1
        settled = self._num_steps > self.end_step
        if not settled:
            self._note()
            if self._num_steps % self.prune_every == 0 or self._num_steps == self.end_step:
                self.masks = self._chosen(self.budget(self._num_steps))
                self._mask()
        else:
            self._mask()

    @torch.no_grad()
    def cut(self) -> None:
        """Cut out what is masked; the parameters are new ones.

        Entries are masked first where the run ended before its last stage.
        """
        if sum(self._cost(name) * int(m.sum()) for name, m in self.masks.items()) > self.target:
            self.masks = self._chosen(self.target)
        self._mask()
        for name, layer in self.layers.items():
            kept = self.masks[name].nonzero().squeeze(1)
            scale = _scale(layer)
            layer.left = nn.Parameter(layer.left[:, kept].contiguous())
            layer.right = nn.Parameter(layer.right[kept].contiguous())
            layer.scale = nn.Parameter(scale[kept])
            self.masks[name] = self.masks[name][kept]

    def _note(self) -> None:
        for name, layer in self.layers.items():
            scale = _scale(layer)
            if scale.grad is None:
                continue
            now = (scale * scale.grad).abs()
            mean = self._importance[name].lerp_(now, 1 - self.memory)
            self._unrest[name].lerp_((now - mean).abs(), 1 - self.memory)

    def _chosen(self, budget: int) -> dict[str, Tensor]:
        """Return masks of what stays: the most important, each layer's best one in any case."""
        ranked: list[tuple[float, str, int]] = []
        for name in self.layers:
            values = (self._importance[name] * self._unrest[name]).tolist()
            best = max(range(len(values)), key=values.__getitem__)
            values[best] = float("inf")
            ranked += [(-value, name, index) for index, value in enumerate(values)]
        masks = {name: torch.zeros_like(mask) for name, mask in self.masks.items()}
        left = budget
        for worth, name, index in sorted(ranked):
            cost = self._cost(name)
            if cost <= left or worth == -float("inf"):
                masks[name][index] = True
                left -= cost
        return masks

    def _cost(self, name: str) -> int:
        layer = self.layers[name]
        return layer.left.shape[0] + layer.right.shape[1] + 1

    def _mask(self) -> None:
        for name, layer in self.layers.items():
            _scale(layer).mul_(self.masks[name])


def orthogonality(layers: Mapping[str, LowRankLayer]) -> Tensor:
    """Return ``sum |P^T P - 1|^2 + |Q Q^T - 1|^2`` over layers, a scalar."""
    total = torch.zeros(())
    for layer in layers.values():
        one = torch.eye(layer.rank, device=layer.left.device, dtype=layer.left.dtype)
        for gram in (layer.left.T @ layer.left, layer.right @ layer.right.T):
            total = total.to(gram.device) + (gram - one).square().sum()
    return total


def _scale(layer: LowRankLayer) -> nn.Parameter:
    assert layer.scale is not None, "AdaLoRA's layers have a scale"
    return layer.scale
