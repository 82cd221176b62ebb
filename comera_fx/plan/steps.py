"""From a contraction tree to the steps of forward and backward, each message computed once.

Every edge of the unrooted tree carries two messages, one each way. Those that flow towards the
target are the forward pass; those that flow away from it are the backward pass, and the message
that arrives at a leaf is the gradient of that leaf. A step contracts the two messages that enter
a node into the one that leaves it, so all three messages of a node cost the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from comera_fx.plan.networks import Network
from comera_fx.plan.search import SsaPath


@dataclass(frozen=True)
class Message:
    """A tensor of the program: a leaf, the target, or what a step makes.

    Args:
        name: Its leaves, ``"xG1G2"``; ``"y"``, ``"dx"``, ``"dG1"`` for results.
        indices: Its indices, in no particular order.
    """

    name: str
    indices: frozenset[str]


@dataclass(frozen=True)
class Step:
    """One pairwise contraction ``out = left * right`` over the indices they share.

    Args:
        phase: Whether it belongs to the forward or to the backward pass.
        left: First operand.
        right: Second operand.
        out: What it makes.
        flops: Floating-point operations at the sizes planned for, 2 a multiply-add.
    """

    phase: Literal["forward", "backward"]
    left: Message
    right: Message
    out: Message
    flops: int


@dataclass(frozen=True)
class Steps:
    """All steps of one tree.

    Args:
        forward: In the order they run; the last one makes the result.
        backward: In the order they run.
        leaves: The given tensors.
        target: The tensor that closes the network.
        result: The forward result.
        gradients: Leaf number to the message that is its gradient, for the wanted ones.
        saved: Forward messages and leaves that the backward steps read.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    leaves: tuple[Message, ...]
    target: Message
    result: Message
    gradients: tuple[tuple[int, Message], ...]
    saved: tuple[Message, ...]

    @property
    def flops_forward(self) -> int:
        """Floating-point operations of the forward pass."""
        return sum(step.flops for step in self.forward)

    @property
    def flops_backward(self) -> int:
        """Floating-point operations of the backward pass, for the wanted gradients."""
        return sum(step.flops for step in self.backward)


def make_steps(network: Network, path: SsaPath, wanted: Sequence[bool]) -> Steps:
    """Return the steps that make the result and the gradients of the wanted leaves.

    Args:
        network: The network that ``path`` is a tree of.
        path: Pairs of tensor numbers; see ``search``.
        wanted: Per leaf, whether its gradient is wanted.

    Example:
        >>> from comera_fx.plan.networks import linear_network
        >>> from comera_fx.spec import TTSpec
        >>> network = linear_network(TTSpec("tt", (4,), (5,), (1, 3, 1)), 2)
        >>> steps = make_steps(network, ((0, 1), (3, 2)), (True, True, True))
        >>> [step.out.name for step in (*steps.forward, *steps.backward)]
        ['xG1', 'y', 'dG2', 'dyG2', 'dG1', 'dx']
    """
    size_of = network.size_of
    num_leaves = len(network.names)
    towards = [
        Message(name, frozenset(indices))
        for name, indices in zip(network.names, network.indices, strict=True)
    ]
    target = Message(network.target, frozenset(network.target_indices))
    covers = [frozenset([leaf]) for leaf in range(num_leaves)]
    last = num_leaves + len(path) - 1

    def contract(phase: Literal["forward", "backward"], a: Message, b: Message, name: str) -> Step:
        out = Message(name, a.indices ^ b.indices)
        return Step(phase, a, b, out, 2 * prod(size_of[i] for i in a.indices | b.indices))

    forward: list[Step] = []
    for number, (i, j) in enumerate(path, start=num_leaves):
        covers.append(covers[i] | covers[j])
        name = network.result if number == last else _name(network, covers[number])
        forward.append(contract("forward", towards[i], towards[j], name))
        towards.append(forward[-1].out)

    away: dict[int, Message] = {last if path else 0: target}
    backward: list[Step] = []
    gradients: dict[int, Message] = {} if path else {0: target}
    read: list[Message] = []
    for number, (i, j) in reversed(list(enumerate(path, start=num_leaves))):
        for child, sibling in ((j, i), (i, j)):
            if not any(wanted[leaf] for leaf in covers[child]):
                continue
            rest = frozenset(range(num_leaves)) - covers[child]
            is_leaf = child < num_leaves
            name = f"d{network.names[child]}" if is_leaf else network.target + _name(network, rest)
            step = contract("backward", away[number], towards[sibling], name)
            backward.append(step)
            read.append(towards[sibling])
            away[child] = step.out
            if is_leaf:
                gradients[child] = step.out
    return Steps(
        forward=tuple(forward),
        backward=tuple(backward),
        leaves=tuple(towards[:num_leaves]),
        target=target,
        result=forward[-1].out if forward else towards[0],
        gradients=tuple(sorted((leaf, g) for leaf, g in gradients.items() if wanted[leaf])),
        saved=tuple(dict.fromkeys(read)),
    )


def _name(network: Network, leaves: Iterable[int]) -> str:
    return "".join(network.names[leaf] for leaf in sorted(leaves))
