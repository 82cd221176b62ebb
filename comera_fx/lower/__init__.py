"""Run plans on the device that holds the tensors."""

from comera_fx.lower.choose import dense, embedding, linear
from comera_fx.lower.factors import factors
from comera_fx.lower.shared_input import apply_factors

__all__ = ["apply_factors", "dense", "embedding", "factors", "linear"]
