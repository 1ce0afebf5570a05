"""The built-in tasks: the same seed gives the same data; splits do not overlap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flatmin.study import Task, load_task
from flatmin.study._tasks import TASKS

SIZES = {"mnist1d": (3500, 500, 1000), "digits": (1000, 297, 500), "moons": (50, 100, 500), "circles": (50, 100, 500)}


@pytest.mark.parametrize("name", TASKS)
def test_splits_are_deterministic_disjoint_and_of_the_stated_size(name: str) -> None:
    task = load_task(name)
    first, again, other = task.data(3), task.data(3), task.data(4)
    for split, size in zip(("train", "validation", "test"), SIZES[name], strict=True):
        x, y = getattr(first, split)
        assert len(x) == len(y) == size
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert torch.equal(x, getattr(again, split)[0])
    assert not torch.equal(first.train[0], other.train[0])
    # Digits holds a few identical images, so rows are told apart by their place in the whole set.
    rows = [{row.numpy().tobytes() for row in split[0]} for split in (first.train, first.validation, first.test)]
    assert len(rows[0] & rows[1]) + len(rows[0] & rows[2]) + len(rows[1] & rows[2]) <= (5 if name == "digits" else 0)


@pytest.mark.parametrize("name", TASKS)
def test_model_loss_and_head_fit_the_data(name: str) -> None:
    task = load_task(name)
    model = task.model()
    x, y = task.data(0).train
    assert task.loss(model(x[:8]), y[:8]).ndim == 0
    assert isinstance(task.head_of(model), torch.nn.Linear)


def test_the_mnist1d_generator_leaves_the_global_generators_alone() -> None:
    from flatmin.study import _tasks

    _tasks._mnist1d_arrays.cache_clear()
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    _tasks._mnist1d_arrays()
    assert (np.random.get_state()[1] == before).all()


def test_other_mnist1d_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatmin.study import _tasks

    _tasks._mnist1d_arrays.cache_clear()
    monkeypatch.setattr(_tasks, "_MNIST1D", "0" * 64)
    with pytest.raises(RuntimeError, match="not be comparable"):
        _tasks._mnist1d_arrays()


USER_TASK = """
import torch
from flatmin.study import Data, Task

def data(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 3, generator=g)
    y = (x.sum(1) > 0).long()
    return Data((x[:30], y[:30]), (x[30:40], y[30:40]), (x[40:], y[40:]))

task = Task("mine", data, lambda: torch.nn.Linear(3, 2), head="", epochs=2, batch_size=10,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
"""


def test_a_users_task_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_task.py"
    file.write_text(USER_TASK)
    assert load_task(f"{file}:task").name == "mine"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("mnist", "task must be one of mnist1d, digits, moons, circles or 'file.py:attribute', got 'mnist'"),
        ("nowhere.py:task", "there is no file 'nowhere.py'"),
        ("{file}:nothing", "'nothing' must be a flatmin.study.Task"),
        ("{broken}:task", "the file raised ZeroDivisionError"),
    ],
)
def test_mistakes_in_a_reference_are_named(reference: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "fine.py").write_text(USER_TASK)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match="task") as caught:
        load_task(reference.format(file=tmp_path / "fine.py", broken=tmp_path / "broken.py"))
    assert words in str(caught.value)


def test_a_wrong_head_is_named() -> None:
    task = TASKS["moons"]
    wrong = Task("t", task.data, task.model, "fc", task.optimizer, epochs=1, batch_size=1)
    with pytest.raises(ValueError, match=r"head of task 't' must name a layer of its model \(0, 1, 2\), got 'fc'"):
        wrong.head_of(wrong.model())
