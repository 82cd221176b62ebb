"""Contraction plans: network, tree, steps, program."""

from comera_fx.plan.plan import Plan, plan_linear

__all__ = ["Plan", "plan_linear"]
