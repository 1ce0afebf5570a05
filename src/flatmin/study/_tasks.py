"""The built-in tasks: small, on embedded data, a run in seconds on one core."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from flatmin._extras import need
from flatmin.study._task import Data, Split, Task

#: Digest of the MNIST-1D arrays, rounded to 1e-4 so that a last-bit difference between libraries passes.
_MNIST1D = "07fb8486f12ff9e04e3b3c5c128af0da56c95bd14a093d1881bd2a8ac71d644f"


def _sgd(lr: float, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _tensors(x: np.ndarray, y: np.ndarray) -> Split:
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.int64)


def _hold_out(x: np.ndarray, y: np.ndarray, size: int, seed: int) -> tuple[Split, Split]:
    """A random split with the classes' shares kept: the rest, and ``size`` samples."""
    selection = need("sklearn.model_selection", "study")
    rest_x, held_x, rest_y, held_y = selection.train_test_split(x, y, test_size=size, random_state=seed, stratify=y)
    return _tensors(rest_x, rest_y), _tensors(held_x, held_y)


@lru_cache(maxsize=1)
def _mnist1d_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    generator = need("mnist1d.data", "study")
    # The generator seeds numpy's and Python's global state and does not put it back.
    import random

    states = np.random.get_state(), random.getstate()
    try:
        made = generator.make_dataset(generator.get_dataset_args())
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])
    arrays = made["x"], made["y"], made["x_test"], made["y_test"]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.round(np.asarray(array) * 1e4).astype("<i4").tobytes())
    if digest.hexdigest() != _MNIST1D:
        raise RuntimeError(
            f"the mnist1d generator made other data than this version of flatmin was tested with "
            f"(sha256 {digest.hexdigest()}, expected {_MNIST1D}): results would not be comparable"
        )
    return arrays


def _mnist1d(seed: int) -> Data:
    x, y, test_x, test_y = _mnist1d_arrays()
    train, validation = _hold_out(x, y, 500, seed)
    return Data(train, validation, _tensors(test_x, test_y))


def _digits(seed: int) -> Data:
    x, y = need("sklearn.datasets", "study").load_digits(return_X_y=True)
    (rest_x, rest_y), test = _hold_out(x / 16.0, y, 500, seed)
    train, validation = _hold_out(rest_x.numpy(), rest_y.numpy(), 297, seed)
    return Data(train, validation, test)


def _toy(shape: str, seed: int) -> Data:
    """50 labelled training points, 100 for validation, 500 to test."""
    datasets = need("sklearn.datasets", "study")
    make = {
        "moons": partial(datasets.make_moons, noise=0.2),
        "circles": partial(datasets.make_circles, noise=0.1, factor=0.6),
    }[shape]
    x, y = make(n_samples=650, random_state=seed)
    (rest_x, rest_y), test = _hold_out(x, y, 500, seed)
    train, validation = _hold_out(rest_x.numpy(), rest_y.numpy(), 100, seed)
    return Data(train, validation, test)


def _cnn1d() -> nn.Module:
    width = 24
    return nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        nn.Conv1d(1, width, 5, stride=2, padding=1),
        nn.GELU(),
        nn.Conv1d(width, width, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv1d(width, width, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(5 * width, 10),
    )


def _mlp(inputs: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)
    )


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))


TASKS = {
    task.name: task
    for task in (
        Task("mnist1d", _mnist1d, _cnn1d, "8", partial(_sgd, 0.1), epochs=30, batch_size=100),
        Task("digits", _digits, partial(_mlp, 64, 64, 10), "4", partial(_sgd, 0.05), epochs=40, batch_size=50),
        Task("moons", partial(_toy, "moons"), _two_layers, "2", partial(_sgd, 0.05), epochs=200, batch_size=10),
        Task(
            "circles",
            partial(_toy, "circles"),
            _two_layers,
            "2",
            partial(_sgd, 0.05),
            epochs=200,
            batch_size=10,
        ),
    )
}
