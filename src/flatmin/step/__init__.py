"""Where the gradient is taken: optimizers that measure it at moved weights."""

from flatmin.step._anti_pgd import AntiPGD
from flatmin.step._asam import ASAM
from flatmin.step._crsam import CRSAM
from flatmin.step._eigensam import EigenSAM
from flatmin.step._fsam import FriendlySAM
from flatmin.step._full_sam import FullSAM
from flatmin.step._gam import GeneralizationAwareMinimization
from flatmin.step._gradient_norm_aware import GradientNormAware
from flatmin.step._gsam import GSAM
from flatmin.step._looksam import LookSAM
from flatmin.step._lpf import LPFSGD
from flatmin.step._optimizer import Step
from flatmin.step._penalty_sam import PenaltySAM
from flatmin.step._sam import SAM
from flatmin.step._samon import SAMON
from flatmin.step._ssam import SparseSAM
from flatmin.step._universal import DetSAM, FrobSAM, TraceSAM
from flatmin.step._vasso import VaSSO
from flatmin.step._weight_noise import WeightNoise
from flatmin.step._wsam import WSAM

__all__ = [
    "ASAM",
    "CRSAM",
    "GSAM",
    "LPFSGD",
    "SAM",
    "SAMON",
    "WSAM",
    "AntiPGD",
    "DetSAM",
    "EigenSAM",
    "FriendlySAM",
    "FrobSAM",
    "FullSAM",
    "GeneralizationAwareMinimization",
    "GradientNormAware",
    "LookSAM",
    "PenaltySAM",
    "SparseSAM",
    "Step",
    "TraceSAM",
    "VaSSO",
    "WeightNoise",
]
