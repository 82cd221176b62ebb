"""Rewrite PyTorch models into tensor-train form that trains faster, with ranks that shrink."""

from comera_fx.api import explain, graph, optimize
from comera_fx.config import OptimizeConfig, PlanConfig, RankConfig
from comera_fx.errors import (
    CaptureError,
    ComeraError,
    ConfigError,
    InputError,
    PlanError,
    RankError,
    SpecError,
    WeightError,
)
from comera_fx.inspect.stages import stages
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.plan import Plan, plan_linear
from comera_fx.report import LayerReport, Report, dump_to, format_graph
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "ComeraError",
    "ConfigError",
    "InputError",
    "LayerReport",
    "OptimizeConfig",
    "Plan",
    "PlanConfig",
    "PlanError",
    "RankAdapter",
    "RankConfig",
    "RankError",
    "Report",
    "SpecError",
    "TTEmbedding",
    "TTLinear",
    "TTSpec",
    "WeightError",
    "__version__",
    "dump_to",
    "explain",
    "format_graph",
    "graph",
    "optimize",
    "param_groups",
    "plan_linear",
    "stages",
]
