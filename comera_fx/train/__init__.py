"""Rank-adaptive training."""

from comera_fx.train.finite import FiniteSteps
from comera_fx.train.groups import param_groups
from comera_fx.train.ranks import RankAdapter
from comera_fx.train.rounding import compact
from comera_fx.train.saving import SavedRun, latest_run, load_run, save_run

__all__ = [
    "FiniteSteps",
    "RankAdapter",
    "SavedRun",
    "compact",
    "latest_run",
    "load_run",
    "param_groups",
    "save_run",
]
