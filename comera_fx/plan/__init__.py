"""Contraction plans: network, tree, steps, program."""

from comera_fx.plan.linear import plan_linear
from comera_fx.plan.plan import Plan

__all__ = ["Plan", "plan_linear"]
