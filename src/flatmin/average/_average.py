"""What every average of the weights can do: stand in for the live weights, be written, saved and resumed."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatmin import _check
from flatmin.average._shadow import Shadow, mismatch

Settings = dict[str, float | int | bool | str | None]


class Average(ABC):
    """A running average of a model's weights; subclasses say how it moves.

    Call :meth:`update` once after every optimizer step (not after every micro-batch).
    """

    def __init__(self, model: nn.Module, *, buffers: str = "copy") -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        _check.choice("buffers", buffers, ("copy", "average"))
        self._shadow = Shadow(model, buffers=buffers == "average")
        self._updates = 0
        self._depth = 0

    @abstractmethod
    def update(self) -> None:
        """Take the live weights into the average."""

    @abstractmethod
    def _settings(self) -> Settings:
        """Return what decides the further course of the average, for the checkpoint."""

    @abstractmethod
    def _adopt(self, settings: Settings) -> None:
        """Check the settings of a checkpoint and take them over; change nothing if one is wrong."""

    @property
    def updates(self) -> int:
        """The number of updates taken so far."""
        return self._updates

    def __repr__(self) -> str:
        shown = {**self._settings(), "buffers": self._buffers, "updates": self._updates}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __getstate__(self) -> dict[str, Any]:
        if self._depth:
            raise RuntimeError(
                "an average cannot be copied or pickled inside applied(): the live weights are set aside"
            )
        return self.__dict__.copy()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold the averages in the model's own parameters for the body, then the live weights, bit for bit.

        Nested use does nothing. The live weights are set aside meanwhile: one more copy of the parameters.
        What the body itself writes to the averaged tensors is lost on leaving.

        Raises:
            RuntimeError: before the first update.
        """
        self._require_updates("applied()")
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        live = self._shadow.live()
        saved = [tensor.detach().clone() for tensor in live]
        self._depth = 1
        try:
            self._shadow.write()
            yield
        finally:
            with torch.no_grad():
                try:
                    torch._foreach_copy_(live, saved)
                except BaseException:  # Ctrl-C in the midst of it
                    torch._foreach_copy_(live, saved)
                    raise
                finally:
                    self._depth = 0

    def copy_to(self, model: nn.Module | None = None) -> None:
        """Write the average for good into the live model, or into ``model`` of the same names and shapes.

        Another model also receives the buffers that go with the average.

        Raises:
            RuntimeError: before the first update, or for the live model inside :meth:`applied`.
            ValueError: ``model`` has other names or shapes; nothing is written.
        """
        self._require_updates("copy_to()")
        if model is not None and model is not self._shadow.model:
            self._shadow.write_to(model)
            return
        self._require_live("copy_to()")
        self._shadow.write()

    def state_dict(self) -> dict[str, Any]:
        """Return averages by name (cloned), the number of updates and the settings; also inside applied().

        The live weights are not in it: save the model's ``state_dict`` beside it, outside :meth:`applied`.
        """
        averages, buffers = self._shadow.split()
        return {
            "method": type(self).__name__,
            "updates": self._updates,
            **self._settings(),
            "averages": _cloned(averages),
            "buffers": _cloned(buffers) if self._shadow.buffers else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`; the live weights are left alone and averages keep their precision.

        The settings of the file are taken over, so that the average goes on as it was; where they differ from
        the constructor's a ``UserWarning`` says so.

        Raises:
            ValueError: another kind of average, other names or shapes; nothing is changed.
            RuntimeError: inside :meth:`applied`.
        """
        self._require_live("load_state_dict()")
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a mapping made by state_dict(), got {type(state).__name__}")
        before = self._settings()
        if state.get("method") != type(self).__name__:
            raise ValueError(f"state must be of a {type(self).__name__}, got {state.get('method')!r}")
        wanted = {"method", "updates", "averages", "buffers", *before}
        if set(state) != wanted:
            raise ValueError(f"state must have the keys {sorted(wanted)}, got {sorted(map(str, state))}")
        kept = "copy" if state["buffers"] is None else "average"
        if kept != self._buffers:
            raise ValueError(f"state was saved with buffers={kept!r}, this average has buffers={self._buffers!r}")
        updates = _check.integer("updates", state["updates"], low=0)
        means = {**state["averages"], **(state["buffers"] or {})}
        if (problem := mismatch(self._shadow.means, means)) is not None:
            raise ValueError(f"state does not fit the model: {problem}")
        after: Settings = {name: state[name] for name in before}
        self._adopt(after)
        self._shadow.load(means)
        self._updates = updates
        for name, value in before.items():
            if after[name] != value:
                warnings.warn(f"{name}={after[name]!r} of the state replaces {name}={value!r}", stacklevel=2)

    @property
    def _buffers(self) -> str:
        return "average" if self._shadow.buffers else "copy"

    def _follow(self, decay: float) -> None:
        self._require_live("update()")
        self._shadow.follow(decay)
        self._updates += 1

    def _require_live(self, call: str) -> None:
        if self._depth:
            raise RuntimeError(f"{call} inside applied() would mix averages and live weights; leave the context first")

    def _require_updates(self, call: str) -> None:
        if not self._updates:
            raise RuntimeError(f"{call} before the first update(): the average still is the initial weights")


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
