"""``torch.compile(model, backend="comera")``: whole-graph plans."""

from comera_fx.backend.entry import comera

__all__ = ["comera"]
