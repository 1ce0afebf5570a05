"""What one run of a study leaves behind."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "diverged", "failed"]

#: The columns of results.csv: deterministic, so that a resumed study writes the same bytes.
METRICS = (
    "test_accuracy",
    "test_nll",
    "test_ece",
    "train_accuracy",
    "train_nll",
    "gap",
    "validation_accuracy",
)


@dataclass(frozen=True)
class Record:
    """One finished run.

    ``metrics`` maps each name of ``METRICS`` to a number (accuracies and ``gap`` in percent, ``gap`` = train
    minus test accuracy; NLL in nats; ECE in percent); it is empty unless ``status`` is ``"ok"``.
    ``history`` holds one dictionary an epoch with ``gradients`` (evaluations so far), ``train_loss``,
    ``validation_accuracy`` and ``validation_nll``. ``seconds`` is training time without evaluation and
    ``peak_bytes`` the largest amount of live tensor storage in one training step.
    """

    task: str
    method: str
    seed: int
    status: Status
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    gradients: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    message: str = ""

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that :meth:`to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        return cls(**data)
