"""Settings, checked when they are made, and what the environment says."""

from comera_fx.config.environment import cache_folder
from comera_fx.config.optimize import (
    Layout,
    ModePair,
    Objective,
    OptimizeConfig,
    PlanConfig,
    Ranks,
)
from comera_fx.config.rank import RankConfig, RankMethod

__all__ = [
    "Layout",
    "ModePair",
    "Objective",
    "OptimizeConfig",
    "PlanConfig",
    "RankConfig",
    "RankMethod",
    "Ranks",
    "cache_folder",
]
