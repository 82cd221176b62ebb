"""Run plans on the device that holds the tensors."""

from comera_fx.lower.choose import dense, embedding, linear

__all__ = ["dense", "embedding", "linear"]
