"""The layers that adapt, with all that must follow a change of their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera_fx.balance import Bonds, Directions, balanced_bonds
from comera_fx.compiled_code import forget_code
from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTModule
from comera_fx.train.adaptable import adaptable_layers, check_copy, warn_of_death
from comera_fx.train.first_process import bonds_of_first
from comera_fx.train.processes import Processes, check_whole
from comera_fx.train.state import change_basis, check_state, cut_ranks, grow_ranks

Kept = Mapping[str, Sequence[Sequence[int]]]
"""Layer name to the indices that each inner bond keeps."""


class AdaptedLayers:
    """TT layers, the optimizers that hold them, the copies and wrappers that follow them.

    A change is made in all of them or, where one cannot follow, in none.

    Args:
        model: The model as the user holds it.
        optimizers: All that hold its cores.
        config: Which layers stay out, and how small ranks may become.
        check_processes: See ``Processes``.

    Attributes:
        by_name: The layers by qualified name.
        processes: The processes that train them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        config: RankConfig,
        check_processes: bool | None,
    ) -> None:
        self.by_name = adaptable_layers(model, config)
        self.optimizers = list(optimizers)
        self.processes = Processes(model, self.by_name, check_processes)
        self._floors = {name: _floor(name, config) for name in self.by_name}
        self._model, self._method = model, config.method
        self._copies: list[dict[str, TTModule]] = []
        self._expected = self.ranks
        check_state(self.optimizers, self.by_name.items())

    # ---- what is held ----

    @property
    def size(self) -> int:
        """TT parameters now."""
        return sum(layer.tt_params for layer in self.by_name.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the cores now."""
        layers = self.by_name.values()
        return sum(layer.tt_params * layer.cores[0].element_size() for layer in layers)

    @property
    def ranks(self) -> dict[str, list[int]]:
        """Layer name to its inner ranks now."""
        return {name: list(layer.spec.ranks[1:-1]) for name, layer in self.by_name.items()}

    @property
    def modes(self) -> dict[str, tuple[int, ...]]:
        """Layer name to the sizes of its cores' modes."""
        return {name: layer.spec.mode_sizes for name, layer in self.by_name.items()}

    @property
    def frozen(self) -> list[str]:
        """Layers of which no core trains any more: they keep their ranks and what they hold."""
        layers = self.by_name.items()
        return [n for n, layer in layers if not any(core.requires_grad for core in layer.cores)]

    @property
    def frozen_size(self) -> int:
        """TT parameters of the frozen layers."""
        return sum(self.by_name[name].tt_params for name in self.frozen)

    @property
    def floors(self) -> dict[str, int]:
        """Layer name to the ranks below which no bond is cut: of frozen layers all there are."""
        ranks = self.ranks
        return self._floors | {name: max(ranks[name]) for name in self.frozen}

    @property
    def rank_weights(self) -> list[nn.Parameter]:
        """Those of all layers, bond after bond; none unless the method has them."""
        return [weight for layer in self.by_name.values() for weight in layer.rank_weights]

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return next(iter(self.by_name.values())).cores[0].device

    def follow(self, copy: nn.Module, threshold: float | None) -> None:
        """Have a copy of the model change as its layers do.

        Args:
            copy: Has layers of the same names, wrapped or not.
            threshold: Of the rank weights that it gets if the layers have some.

        Raises:
            RankError: If it is no such copy, or follows already.
        """
        layers = check_copy(copy, self.by_name)
        if any(layer in other.values() for other in self._copies for layer in layers.values()):
            raise RankError(
                "a copy that follows the model twice would be cut twice",
                got=f"{type(copy).__name__}, of which layers follow already",
                expected="each copy once, wrapped or not",
                mend="leave out the second call of follow",
            )
        if threshold is not None:
            for layer in layers.values():
                layer.attach_rank_weights(threshold)
        self._copies.append(layers)

    def balanced(self, names: Iterable[str] | None = None) -> Bonds:
        """Return the singular directions of layers that have ranks and train, of all or of some.

        With several processes, those of the first, which alone looks for them.
        """
        frozen = self.frozen
        held = [
            name
            for name in (self.by_name if names is None else names)
            if self.by_name[name].tt_params and name not in frozen
        ]
        processes, found = self.processes, {}
        if processes.is_first:
            found = {name: balanced_bonds(self.by_name[name].effective_cores()) for name in held}
        if processes.group is None or not held:
            return found
        dtypes = {core.dtype for name in held for core in self.by_name[name].cores}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return bonds_of_first(found, {name: self.ranks[name] for name in held}, processes, dtype)

    # ---- what changes it ----

    def check_can_change(self) -> None:
        """Raise where a change could not be made everywhere.

        Raises:
            RankError: As ``check_whole`` and ``check_state`` do.
        """
        check_whole(self._model, self.by_name)
        check_state(self.optimizers, self.by_name.items())
        for copy in self._copies:
            for name, layer in copy.items():
                check_copy_ranks(name, layer, self.by_name[name])

    @torch.no_grad()
    def check_finite(self) -> None:
        """Raise where a layer has numbers that are not finite, in this process or another.

        Raises:
            RankError: In every process, naming the first such layer.
        """
        finite = [
            torch.stack([p.isfinite().all() for p in (*layer.cores, *layer.rank_weights)]).all()
            for layer in self.by_name.values()
        ]
        all_finite = self.processes.all_agree(
            torch.stack([each.to(self.device) for each in finite])
        )
        for name, is_finite in zip(self.by_name, all_finite, strict=True):
            if not is_finite:
                raise RankError(
                    f"layer {name!r} has numbers that are not finite, so that no rank can be cut",
                    got="NaN or infinity in its cores or rank weights",
                    expected="finite numbers, which no step of a gradient that is not leaves",
                    mend="go back to a checkpoint; lower the learning rate or clip gradients",
                )

    def check_unchanged(self) -> None:
        """Raise where ranks have changed otherwise than by this object.

        Raises:
            RankError: As after loading a checkpoint into the model alone.
        """
        if self.ranks != self._expected:
            raise RankError(
                "the model's ranks have changed outside the adapter",
                got=f"ranks {self.ranks}",
                expected=f"{self._expected}, as after the last cut",
                mend="after model.load_state_dict load the optimizer's and the adapter's state too",
            )

    def check_alike(self) -> None:
        """In debug mode, raise unless all processes hold equal cores.

        Raises:
            RankError: Naming the first layer that differs.
        """
        if self.processes.checks:
            self.processes.compare(
                {
                    name: [(tuple(core.shape), core.double().sum().item()) for core in layer.cores]
                    for name, layer in self.by_name.items()
                }
            )

    def take_ranks(self) -> None:
        """Take the ranks as they are now for those expected."""
        self._expected = self.ranks

    def cut(self, kept: Kept) -> bool:
        """Keep only these indices of every bond; return whether anything was cut.

        Args:
            kept: Indices in rising order; layers that are not named stay.
        """
        changed: list[nn.Parameter] = []
        for name, indices in kept.items():
            layer = self.by_name[name]
            ranks = layer.spec.ranks[1:-1]
            if all(len(alive) == rank for alive, rank in zip(indices, ranks, strict=True)):
                continue
            if layer.tt_params and not all(indices):
                warn_of_death(name, self._method)
            chosen = [
                torch.tensor(alive, dtype=torch.long, device=self.device) for alive in indices
            ]
            for each, optimizers in self._alike(name):
                cut_ranks(each, chosen, optimizers)
            changed += [*layer.cores, *layer.rank_weights]
        self._changed(changed)
        return bool(changed)

    def turn(
        self, directions: Mapping[str, Sequence[Directions]], *, by_method: bool = True
    ) -> None:
        """Turn every bond into these directions.

        A bond of which fewer are given than its floor stays as it is: what is missing holds
        nothing, but without it the bond would have too few ranks.

        Args:
            directions: Layer name to those of its bonds; layers that are not named stay.
            by_method: Whether the method asks for it, and may be told how to spare what dies.
        """
        changed: list[nn.Parameter] = []
        for name, bonds in directions.items():
            layer = self.by_name[name]
            before = layer.spec.ranks
            bases = [
                self._basis(name, bond, rank)
                for bond, rank in zip(bonds, before[1:-1], strict=True)
            ]
            if not all(out_of.shape[0] for _, out_of in bases):
                warn_of_death(name, self._method if by_method else None)
            for each, optimizers in self._alike(name):
                change_basis(each, bases, optimizers)
            if layer.spec.ranks != before:
                changed += [*layer.cores, *layer.rank_weights]
        self._changed(changed)

    def _basis(self, name: str, bond: Directions, rank: int) -> tuple[Tensor, Tensor]:
        if len(bond.values) >= min(self._floors[name], rank):
            return bond.into, bond.out_of
        unturned = torch.eye(rank, dtype=bond.into.dtype, device=bond.into.device)
        return unturned, unturned

    def grow(self, counts: Mapping[str, Sequence[int]], seed: int) -> None:
        """Add so many directions to every bond, or as many as it can use."""
        changed: list[nn.Parameter] = []
        for name, wanted in counts.items():
            layer = self.by_name[name]
            before = layer.spec.ranks
            for each, optimizers in self._alike(name):
                own = torch.Generator().manual_seed(seed)  # equal in copies and processes
                grow_ranks(each, wanted, optimizers, own)
            if layer.spec.ranks != before:
                changed += [*layer.cores, *layer.rank_weights]
        self._changed(changed)

    def _alike(self, name: str) -> list[tuple[TTModule, Sequence[Optimizer]]]:
        copies: list[tuple[TTModule, Sequence[Optimizer]]] = [
            (copy[name], ()) for copy in self._copies
        ]
        # The copies first: a layer's own ranks say whether the change is still to be made.
        return [*copies, (self.by_name[name], self.optimizers)]

    def _changed(self, parameters: list[nn.Parameter]) -> None:
        self.take_ranks()
        if parameters:
            forget_code(parameters)
            self.processes.rebuild()


def check_copy_ranks(name: str, copy: TTModule, layer: TTModule) -> None:
    """Raise where a copy's ranks are no longer those of its layer.

    Raises:
        RankError: Naming the layer.
    """
    if copy.spec.ranks != layer.spec.ranks:
        raise RankError(
            f"a copy that follows the model has other ranks in layer {name!r}",
            got=f"ranks {copy.spec.ranks}",
            expected=f"{layer.spec.ranks}, as in the model",
            mend="load the copy's state together with the model's",
        )


def _floor(name: str, config: RankConfig) -> int:
    for pattern, floor in config.min_ranks.items():
        if fnmatchcase(name, pattern):
            return floor
    return config.min_rank
