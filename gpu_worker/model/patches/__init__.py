"""What makes a transformers model faster from outside; each with an off switch and a trial."""

from .prepack import prepack_linears

__all__ = ["prepack_linears"]
