"""Means over seeds, paired comparisons, summaries of methods; SciPy and statsmodels do the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flatmin.study._record import Record

#: Confidence of every interval.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` values, its standard error and its 95 % t interval.

    The mean of no value, and the error and interval of fewer than two, are NaN.
    """

    n: int
    mean: float
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The paired difference of a method to the reference over the ``n`` seeds both finished.

    ``low`` and ``high`` bound the 95 % t interval of ``mean_difference``; ``p`` is that of the two-sided
    paired t-test and ``p_holm`` the same after Holm's adjustment over the methods. With one pair only
    ``mean_difference`` is known and with none nothing is; what is not known is NaN.
    """

    method: str
    reference: str
    n: int
    mean_difference: float
    low: float
    high: float
    p: float
    p_holm: float


@dataclass(frozen=True)
class MethodSummary:
    """One method of a study, over the runs that ended well.

    ``comparison`` is on test accuracy and None for the reference; ``gradients`` are the mean evaluations a
    run. The ratios of cost are to the reference over the seeds that both finished. What is not known is NaN.
    """

    method: str
    n_ok: int
    n_diverged: int
    n_failed: int
    accuracy: Estimate
    nll: Estimate
    ece: Estimate
    gap: Estimate
    comparison: Comparison | None
    gradients: float
    time_ratio: float
    memory_ratio: float


def estimate(values: Iterable[float]) -> Estimate:
    """Return mean, standard error and 95 % t interval of the values that are not NaN."""
    from scipy import stats

    known = np.array([value for value in values if not math.isnan(value)], dtype=np.float64)
    n = len(known)
    if n == 0:
        return Estimate(0, math.nan, math.nan, math.nan, math.nan)
    # An infinite loss is a result and makes the mean infinite; its spread is undefined and would only warn.
    if not np.isfinite(known).all():
        return Estimate(n, float(known.sum() / n), math.nan, math.nan, math.nan)
    mean = float(known.mean())
    if n == 1:
        return Estimate(1, mean, math.nan, math.nan, math.nan)
    # Equal values, summed and divided, may miss themselves by a unit in the last place.
    if np.ptp(known) == 0:
        value = float(known[0])
        return Estimate(n, value, 0.0, value, value)
    error = float(stats.sem(known))
    low, high = stats.t.interval(CONFIDENCE, n - 1, loc=mean, scale=error)
    return Estimate(n, mean, error, float(low), float(high))


def compare(values: Mapping[str, Mapping[int, float]], reference: str) -> dict[str, Comparison]:
    """Compare every method with the reference, paired by seed, and adjust the p values by Holm's method.

    Args:
        values: For every method its value at each seed whose run ended well.
        reference: The method that the others are compared with.

    Returns:
        A comparison for every method but the reference, in the order given.
    """
    compared = {
        method: _compare_pairs(method, reference, by_seed, values[reference])
        for method, by_seed in values.items()
        if method != reference
    }
    tested = [method for method, comparison in compared.items() if not math.isnan(comparison.p)]
    for method, p in zip(tested, holm([compared[method].p for method in tested]), strict=True):
        compared[method] = replace(compared[method], p_holm=p)
    return compared


def holm(p_values: list[float]) -> list[float]:
    """Return the p values after Holm's step-down adjustment (Holm, 1979)."""
    from statsmodels.stats.multitest import multipletests

    if not p_values:
        return []
    return [float(p) for p in multipletests(p_values, method="holm")[1]]


def summarise(records: Sequence[Record], methods: Sequence[str]) -> list[MethodSummary]:
    """Return one summary a method, in the order given; the first method is the reference."""
    runs = {method: {r.seed: r for r in records if r.method == method and r.status == "ok"} for method in methods}
    comparisons = compare(
        {m: {seed: metric(r, "test_accuracy") for seed, r in by_seed.items()} for m, by_seed in runs.items()},
        methods[0],
    )
    rows = []
    for method, by_seed in runs.items():
        statuses = [record.status for record in records if record.method == method]
        means = {
            name: estimate(metric(record, f"test_{name}") for record in by_seed.values())
            for name in ("accuracy", "nll", "ece")
        }
        row = MethodSummary(
            method=method,
            n_ok=len(by_seed),
            n_diverged=statuses.count("diverged"),
            n_failed=statuses.count("failed"),
            **means,
            gap=estimate(metric(record, "gap") for record in by_seed.values()),
            comparison=comparisons.get(method),
            gradients=estimate(record.gradients for record in by_seed.values()).mean,
            time_ratio=_ratio(by_seed, runs[methods[0]], lambda record: record.seconds),
            memory_ratio=_ratio(by_seed, runs[methods[0]], lambda record: record.peak_bytes),
        )
        rows.append(row)
    return rows


def metric(record: Record, name: str) -> float:
    """The run's metric, NaN if it was not measured."""
    return record.metrics.get(name, math.nan)


def _ratio(ours: Mapping[int, Record], theirs: Mapping[int, Record], cost: Callable[[Record], float]) -> float:
    seeds = sorted(ours.keys() & theirs.keys())
    above = sum(cost(ours[seed]) for seed in seeds)
    below = sum(cost(theirs[seed]) for seed in seeds)
    # A cost of zero was not measured.
    return above / below if above > 0 and below > 0 else math.nan


def _compare_pairs(method: str, reference: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> Comparison:
    from scipy import stats

    shared = sorted(ours.keys() & theirs.keys())
    seeds = [seed for seed in shared if math.isfinite(ours[seed]) and math.isfinite(theirs[seed])]
    a = np.array([ours[seed] for seed in seeds], dtype=np.float64)
    b = np.array([theirs[seed] for seed in seeds], dtype=np.float64)
    n = len(seeds)
    mean = float((a - b).mean()) if n else math.nan
    if n < 2:
        return Comparison(method, reference, n, mean, math.nan, math.nan, math.nan, math.nan)
    # Differences that are equal but for rounding have no variance to test with: the t statistic would be a
    # ratio of rounding errors. 64 units in the last place also keep clear of SciPy's precision warning (10).
    rounding = 64 * np.finfo(np.float64).eps * max(np.abs(a).max(), np.abs(b).max())
    if np.ptp(a - b) <= rounding:
        # Accuracies lie on a grid, so that a few seeds may well differ by the same amount by chance: without
        # any spread there is nothing to test with, and no interval.
        p = 1.0 if abs(mean) <= rounding else math.nan
        return Comparison(method, reference, n, mean, math.nan, math.nan, p, math.nan)
    test: Any = stats.ttest_rel(a, b)  # SciPy's result has no type stubs
    interval = test.confidence_interval(CONFIDENCE)
    return Comparison(
        method, reference, n, mean, float(interval.low), float(interval.high), float(test.pvalue), math.nan
    )
