"""What a study trains: data, split, model, loss, base optimizer and schedule, fixed in one object."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check

Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """Inputs and integer class labels of the three splits; the test split is looked at once a run."""

    train: Split
    validation: Split
    test: Split


class TaskError(ValueError):
    """A task whose parts do not fit together."""


def cosine(progress: float) -> float:
    """The learning rate's factor at ``progress`` in [0, 1]: from 1 down to 0 along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Task:
    """A classification task.

    Args:
        name: what tables and reports call it.
        data: the splits for a seed. The same seed must give the same tensors.
        model: a new model; torch's generator is seeded before the call.
        head: dotted name of the classification layer, for penalties that attach to it.
        optimizer: the base optimizer over the model's parameters.
        epochs: passes over the training split.
        batch_size: samples a step.
        loss: mean loss of logits and labels.
        schedule: factor of the learning rate at a progress in [0, 1].
        augment: optional change of a training batch, drawing from the given generator only, so that all
            methods see the same augmentation.

    Example:
        >>> import torch
        >>> from flatmin.study import Data, Task, compare
        >>> def data(seed):
        ...     g = torch.Generator().manual_seed(seed)
        ...     x = torch.randn(90, 2, generator=g)
        ...     y = (x[:, 0] > 0).long()
        ...     return Data((x[:50], y[:50]), (x[50:70], y[50:70]), (x[70:], y[70:]))
        >>> task = Task(
        ...     "sign", data, lambda: torch.nn.Linear(2, 2), head="", epochs=2, batch_size=10,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ... )
        >>> result = compare(task, ["sgd", "sam"], seeds=2)
        >>> [record.status for record in result.records]
        ['ok', 'ok', 'ok', 'ok']
    """

    name: str
    data: Callable[[int], Data]
    model: Callable[[], nn.Module]
    head: str
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    epochs: int
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    schedule: Callable[[float], float] = cosine
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name must be a non-empty string, got {_check.show(self.name)}")
        _check.integer("epochs", self.epochs, low=1)
        _check.integer("batch_size", self.batch_size, low=1)

    def head_of(self, model: nn.Module) -> nn.Module:
        """The classification layer of ``model``."""
        try:
            return model.get_submodule(self.head)
        except AttributeError:
            listed = ", ".join(name for name, _ in model.named_modules() if name)
            raise TaskError(
                f"head of task {self.name!r} must name a layer of its model ({listed}), got {self.head!r}"
            ) from None


def load_task(reference: str) -> Task:
    """The task that ``reference`` names: a built-in one, or ``path/to/file.py:attribute``.

    Raises:
        ValueError: for an unknown name, a missing file or attribute, or a file that does not run.
    """
    from flatmin.study._tasks import TASKS

    if not isinstance(reference, str):
        raise TypeError(f"task must be a name or 'file.py:attribute', got {_check.show(reference)}")
    if reference in TASKS:
        return TASKS[reference]
    path, colon, attribute = reference.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"task must be one of {', '.join(TASKS)} or 'file.py:attribute', got {_check.show(reference)}")
    if not Path(path).is_file():
        raise ValueError(f"task {_check.show(reference)}: there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(f"flatmin_task_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As when Python runs a script: the file's folder is importable, and the module can be looked up by name.
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"task {_check.show(reference)}: the file raised {describe(error)}") from error
    task = getattr(module, attribute, None)
    if not isinstance(task, Task):
        raise ValueError(
            f"task {_check.show(reference)}: {attribute!r} must be a flatmin.study.Task, got {_check.show(task)}"
        )
    return task


def describe(error: BaseException) -> str:
    """An error in one line, with the place it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    outside = [frame for frame in frames if Path(frame.filename).parent != ours and "<frozen" not in frame.filename]
    place = f" ({Path(outside[-1].filename).name}, line {outside[-1].lineno})" if outside else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def fingerprint(reference: str) -> str:
    """A digest of a user's task file, so that a resumed study notices a change; empty for built-in tasks."""
    path, _, attribute = reference.rpartition(":")
    if not path.endswith(".py"):
        return ""
    return f"{attribute} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
