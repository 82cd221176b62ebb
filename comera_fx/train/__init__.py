"""Rank-adaptive training."""

from comera_fx.train.finite import FiniteSteps
from comera_fx.train.groups import param_groups
from comera_fx.train.ranks import RankAdapter

__all__ = ["FiniteSteps", "RankAdapter", "param_groups"]
