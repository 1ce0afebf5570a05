"""Penalties: terms that are added to the loss."""

from flatmin.penalty._activation_decay import ActivationDecay

__all__ = ["ActivationDecay"]
