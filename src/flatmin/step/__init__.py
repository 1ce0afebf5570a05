"""Where the gradient is taken: optimizers that measure it at moved weights."""

from flatmin.step._asam import ASAM
from flatmin.step._optimizer import Step
from flatmin.step._sam import SAM

__all__ = ["ASAM", "SAM", "Step"]
