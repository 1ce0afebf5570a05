"""One run of a study: train a task's model with a method, and say how it went."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatmin import EMA, SwitchEMA
from flatmin._extras import need
from flatmin._grammar import Recipe
from flatmin.step import GeneralizationAwareMinimization, Step
from flatmin.study._memory import peak_bytes
from flatmin.study._record import Record
from flatmin.study._task import Data, Split, Task


@dataclass(frozen=True)
class Budget:
    """How long every method trains: the same ``epochs``, or the same number of gradient evaluations.

    Under ``"gradients"`` each method gets as many evaluations as the base optimizer takes in ``epochs``,
    and its schedule is stretched over the steps that these make: SAM gets half of the base's steps.
    """

    kind: str
    epochs: int

    def steps(self, recipe: Recipe, steps_per_epoch: int) -> int:
        """Optimizer steps of a run."""
        total = self.epochs * steps_per_epoch
        return total if self.kind == "epochs" else max(1, int(total / recipe.gradients))


def stream(seed: int, purpose: str) -> int:
    """A seed for one purpose of a run, so that no two purposes, and no two runs, draw the same numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:7], "big")


class _Setup:
    """Everything that trains: built in one order from one seed, so that all methods start alike."""

    def __init__(self, task: Task, recipe: Recipe, data: Data, seed: int, steps: int) -> None:
        self.task = task
        self.train = data.train
        self.steps_per_epoch = math.ceil(len(data.train[1]) / task.batch_size)
        torch.manual_seed(stream(seed, "model"))
        self.model = task.model()
        self.order = torch.Generator().manual_seed(stream(seed, "order"))
        self.independent = torch.Generator().manual_seed(stream(seed, "independent"))
        self.augmentation = torch.Generator().manual_seed(stream(seed, "augmentation"))
        base = task.optimizer(self.model.parameters())
        _scale_rate(base, recipe, self.steps_per_epoch)
        built = recipe.build("step", base=base, model=self.model)
        self.optimizer: torch.optim.Optimizer = built[0] if built else base
        self.penalties = recipe.build("penalty", layer=task.head_of(self.model), model=self.model)
        averages = recipe.build(
            "average", model=self.model, steps_per_epoch=self.steps_per_epoch, optimizer=self.optimizer
        )
        self.average: EMA | SwitchEMA | None = averages[0] if averages else None
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: task.schedule(step / steps))
        self.recipe = recipe
        self.calls = 0
        # What was drawn while building must not shift the training's own draws.
        torch.manual_seed(stream(seed, "training"))

    @property
    def gradients(self) -> int:
        """Gradient evaluations so far."""
        # A step counts products with the Hessian too, which no call of the closure shows.
        evaluations = self.optimizer.evaluations if isinstance(self.optimizer, Step) else self.calls
        return round(evaluations * self.recipe.gradients_per_evaluation)

    def epoch(self) -> Iterator[Split]:
        """The batches of one pass over the training split, in the seed's order."""
        x, y = self.train
        for index in torch.split(torch.randperm(len(y), generator=self.order), self.task.batch_size):
            batch = x[index]
            if self.task.augment is not None:
                batch = self.task.augment(batch, self.augmentation)
            yield batch, y[index]

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.task.loss(self.model(x), y)
        for penalty in self.penalties:
            loss = loss + penalty()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _independent(self) -> Split:
        """Another batch of the training split, for methods that judge a gradient by one."""
        x, y = self.train
        index = torch.randint(len(y), (min(self.task.batch_size, len(y)),), generator=self.independent)
        return x[index], y[index]

    def step(self, x: Tensor, y: Tensor) -> float:
        """One optimizer step; the clean loss."""

        def closure() -> Tensor:
            self.calls += 1
            self.optimizer.zero_grad()
            return self._gradient(x, y)

        self.model.train()
        if isinstance(self.optimizer, GeneralizationAwareMinimization) and self.optimizer.wants_aux:
            self.optimizer.aux = partial(self._gradient, *self._independent())
        loss: Tensor = self.optimizer.step(closure)  # type: ignore[arg-type,assignment]  # torch says float
        if self.average is not None:
            self.average.update()
        self.schedule.step()
        return float(loss.detach())

    def measured(self) -> Any:
        """A context in which the model holds the weights that the method would deliver."""
        return nullcontext() if self.average is None else self.average.applied()


def run(task: Task, recipe: Recipe, seed: int, budget: Budget, peaks: dict[str, int] | None = None) -> Record:
    """Train once; a loss that is not finite ends the run as ``diverged``.

    ``peaks`` remembers the peak memory of methods measured before, which does not depend on the seed. The
    calling process's generators, thread count and determinism settings are as before afterwards.
    """
    with _isolated():
        torch.manual_seed(stream(seed, "data"))
        data = task.data(seed)
        steps_per_epoch = math.ceil(len(data.train[1]) / task.batch_size)
        steps = budget.steps(recipe, steps_per_epoch)
        peaks = {} if peaks is None else peaks
        if str(recipe) not in peaks:
            peaks[str(recipe)] = _peak(task, recipe, data)
        setup = _Setup(task, recipe, data, seed, steps)
        history: list[dict[str, float]] = []
        done, seconds, finite = 0, 0.0, True
        while done < steps and finite:
            losses = []
            began = time.perf_counter()
            for x, y in setup.epoch():
                losses.append(setup.step(x, y))
                done += 1
                finite = math.isfinite(losses[-1])
                if done == steps or not finite:
                    break
            seconds += time.perf_counter() - began
            if finite:
                with setup.measured():
                    accuracy, nll, _ = evaluate(setup.model, data.validation)
                history.append(
                    {
                        "gradients": setup.gradients,
                        "train_loss": sum(losses) / len(losses),
                        "validation_accuracy": accuracy,
                        "validation_nll": nll,
                    }
                )
                # Nothing follows the last epoch: the delivered model is the average.
                if done < steps and isinstance(setup.average, SwitchEMA):
                    setup.average.switch()
        metrics: dict[str, float] = {}
        message = "" if finite else f"the loss was not finite after step {done}"
        if finite:
            with setup.measured():
                metrics = _final(setup.model, data)
            finite = all(math.isfinite(value) for value in metrics.values())
            message = "" if finite else "the trained model's loss on the data was not finite"
        return Record(
            task=task.name,
            method=str(recipe),
            seed=seed,
            status="ok" if finite else "diverged",
            metrics=metrics if finite else {},
            history=history,
            steps=done,
            gradients=setup.gradients,
            seconds=seconds,
            peak_bytes=peaks[str(recipe)],
            message=message,
        )


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float, float]:
    """Accuracy in percent, NLL in nats, calibration error (15 bins) in percent; the mode is put back."""
    calibration_error = need("torchmetrics.functional.classification", "study").multiclass_calibration_error
    x, y = split
    training = model.training
    model.eval()
    try:
        logits = torch.cat([model(part) for part in torch.split(x, 1000)]).double()
    finally:
        model.train(training)
    nll = nn.functional.cross_entropy(logits, y).item()
    if not math.isfinite(nll):
        return math.nan, math.nan, math.nan
    accuracy = (logits.argmax(1) == y).double().mean().item()
    ece = calibration_error(logits.softmax(1), y, num_classes=logits.shape[1], n_bins=15).item()
    return 100 * accuracy, nll, 100 * ece


def _final(model: nn.Module, data: Data) -> dict[str, float]:
    test_accuracy, test_nll, test_ece = evaluate(model, data.test)
    train_accuracy, train_nll, _ = evaluate(model, data.train)
    return {
        "test_accuracy": test_accuracy,
        "test_nll": test_nll,
        "test_ece": test_ece,
        "train_accuracy": train_accuracy,
        "train_nll": train_nll,
        "gap": train_accuracy - test_accuracy,
        "validation_accuracy": evaluate(model, data.validation)[0],
    }


def _scale_rate(base: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> None:
    for part in recipe.build("base"):
        factor = part.lr_scale
        if factor == "sema":
            factor = SwitchEMA(nn.Linear(1, 1), steps_per_epoch=steps_per_epoch).effective_rate
        for group in base.param_groups:
            group["lr"] *= factor


def _peak(task: Task, recipe: Recipe, data: Data) -> int:
    def work() -> _Setup:
        setup = _Setup(task, recipe, data, 0, 2)
        for _, (x, y) in zip(range(2), setup.epoch(), strict=False):
            setup.step(x, y)
        return setup

    return peak_bytes(work)


@contextmanager
def _isolated() -> Iterator[None]:
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
