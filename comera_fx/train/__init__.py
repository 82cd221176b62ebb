"""Rank-adaptive training."""

from comera_fx.train.groups import param_groups
from comera_fx.train.ranks import RankAdapter

__all__ = ["RankAdapter", "param_groups"]
