"""Averages of the weights along training: which model is evaluated and kept."""

from flatmin.average._average import Average
from flatmin.average._ema import EMA
from flatmin.average._switch_ema import SwitchEMA, switch_rate

__all__ = ["EMA", "Average", "SwitchEMA", "switch_rate"]
