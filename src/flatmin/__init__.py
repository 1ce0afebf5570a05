"""Train PyTorch networks into flat minima, and find out honestly whether it helped."""

from flatmin._grammar import Recipe, parse_method
from flatmin._version import __version__
from flatmin.average import EMA, SwitchEMA
from flatmin.penalty import ActivationDecay
from flatmin.step import ASAM, SAM

__all__ = ["ASAM", "EMA", "SAM", "ActivationDecay", "Recipe", "SwitchEMA", "__version__", "parse_method"]
