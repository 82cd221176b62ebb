"""Cores, gradients and the optimizers' state, as ranks change."""

from comera_fx.train.state.resize import change_basis, check_state, cut_ranks, grow_ranks

__all__ = ["change_basis", "check_state", "cut_ranks", "grow_ranks"]
