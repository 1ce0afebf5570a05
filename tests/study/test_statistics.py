from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flatmin.study._record import Record
from flatmin.study._statistics import Comparison, compare, estimate, holm, summarise

# Percent with two digits, as the accuracy of 10,000 test images is.
accuracies = st.integers(0, 10_000).map(lambda hundredths: hundredths / 100)


@pytest.fixture(scope="module", autouse=True)
def no_collection() -> Iterator[None]:
    """statsmodels collects garbage at every call, 0.1 s with torch loaded; these tests call it often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield


def by_seed(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def assert_unknown(comparison: Comparison, n: int) -> None:
    assert comparison.n == n
    fields = (comparison.low, comparison.high, comparison.p, comparison.p_holm)
    assert all(math.isnan(value) for value in fields)


def test_estimate_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0, 6.0])
    # Squared deviations 4 + 1 + 0 + 9 = 14, variance 14/3; t(0.975, 3) = 3.182446 from a printed table.
    error = math.sqrt(14 / 3 / 4)
    assert (found.n, found.mean) == (4, 3.0)
    assert found.error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx((3 - 3.182446 * error, 3 + 3.182446 * error), rel=1e-6)


def test_estimate_of_few_or_equal_values() -> None:
    assert math.isnan(estimate([]).mean)
    assert math.isnan(estimate([math.nan]).mean)
    one = estimate([0.1])
    assert (one.n, one.mean) == (1, 0.1)
    assert math.isnan(one.error)
    assert math.isnan(one.low)
    equal = estimate([0.1] * 3)
    assert (equal.mean, equal.error, equal.low, equal.high) == (0.1, 0.0, 0.1, 0.1)


def test_estimate_of_an_infinite_loss_is_infinite_without_a_warning() -> None:
    found = estimate([1.0, math.inf])
    assert found.mean == math.inf
    assert math.isnan(found.error)


def test_compare_by_hand() -> None:
    values = {"sgd": by_seed(90, 91, 92, 93), "sam": by_seed(91, 92, 94, 95)}
    found = compare(values, "sgd")["sam"]
    # Differences 1, 1, 2, 2: mean 1.5, variance 1/3, error sqrt(1/12), t(3) = 5.196152.
    error = math.sqrt(1 / 12)
    assert (found.method, found.reference, found.n) == ("sam", "sgd", 4)
    assert found.mean_difference == pytest.approx(1.5)
    assert (found.low, found.high) == pytest.approx((1.5 - 3.182446 * error, 1.5 + 3.182446 * error), rel=1e-6)
    assert found.p == pytest.approx(0.013847, abs=1e-6)
    assert found.p_holm == found.p


@given(st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=10))
def test_compare_agrees_with_the_formula(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = (by_seed(*column) for column in zip(*pairs, strict=True))
    found = compare({"sgd": theirs, "sam": ours}, "sgd")["sam"]
    difference = np.array([round(100 * (a - b)) for a, b in pairs]) / 100
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(pairs))
    if len(set(difference)) == 1:
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert found.p == 1.0 if difference[0] == 0 else math.isnan(found.p)
        return
    half = stats.t.ppf(0.975, len(pairs) - 1) * error
    assert found.mean_difference == pytest.approx(mean, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((mean - half, mean + half), abs=1e-9)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(mean) / error, len(pairs) - 1), rel=1e-6, abs=1e-12)


@given(st.lists(st.tuples(accuracies, accuracies), max_size=8))
def test_swapping_method_and_reference_flips_the_sign(pairs: list[tuple[float, float]]) -> None:
    values = {"a": by_seed(*(a for a, _ in pairs)), "b": by_seed(*(b for _, b in pairs))}
    there, back = compare(values, "b")["a"], compare(values, "a")["b"]
    assert there.n == back.n == len(pairs)
    flipped = (-back.mean_difference, -back.high, -back.low, back.p, back.p_holm)
    found = (there.mean_difference, there.low, there.high, there.p, there.p_holm)
    assert found == pytest.approx(flipped, rel=1e-9, abs=1e-9, nan_ok=True)


def test_pairs_are_the_seeds_of_both() -> None:
    values = {
        "sgd": {0: 90.0, 1: 91.0, 2: 92.0},
        "sam": {2: 93.0, 5: 10.0, 1: 91.5},
        "ema": {0: math.nan, 1: 92.0},
    }
    found = compare(values, "sgd")
    assert list(found) == ["sam", "ema"]
    assert found["sam"].n == 2
    assert found["sam"].mean_difference == pytest.approx(0.75)
    assert_unknown(found["ema"], 1)
    assert found["ema"].mean_difference == 1.0


def test_no_pair_and_one_pair_leave_the_rest_unknown() -> None:
    found = compare({"sgd": {0: 90.0}, "sam": {0: 91.0}, "asam": {1: 91.0}}, "sgd")
    assert_unknown(found["sam"], 1)
    assert_unknown(found["asam"], 0)
    assert math.isnan(found["asam"].mean_difference)


@pytest.mark.parametrize(("shift", "p"), [(0.0, 1.0), (0.1, math.nan), (-2.0, math.nan)])
def test_equal_differences_leave_nothing_to_test_with(shift: float, p: float) -> None:
    values = [90.1, 80.7, 70.3, 91.9]
    found = compare({"sgd": by_seed(*values), "sam": by_seed(*(v + shift for v in values))}, "sgd")["sam"]
    assert found.mean_difference == pytest.approx(shift)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert (found.p, found.p_holm) == pytest.approx((p, p), nan_ok=True)


def test_holm_by_hand() -> None:
    # Sorted .01 .02 .03 .04 by 4, 3, 2, 1 are .04 .06 .06 .04, and a later one is never below an earlier.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_counts_only_what_was_tested() -> None:
    sgd = by_seed(90.0, 91.0, 92.5)
    values = {
        "sgd": sgd,
        "sam": by_seed(91.0, 92.0, 92.9),
        "ema": by_seed(90.2, 91.0, 92.6),
        "asam": {0: 91.0},
        "lost": {},
    }
    found = compare(values, "sgd")
    tested = sorted((found["sam"].p, found["ema"].p))
    assert sorted((found["sam"].p_holm, found["ema"].p_holm)) == pytest.approx(
        [min(1, 2 * tested[0]), max(min(1, 2 * tested[0]), tested[1])]
    )
    assert_unknown(found["asam"], 1)
    assert_unknown(found["lost"], 0)


def test_ratios_are_over_the_paired_seeds() -> None:
    def run(method: str, seed: int, seconds: float, status: str = "ok") -> Record:
        return Record("moons", method, seed, status, {}, [], 1, 1, seconds, int(seconds))  # type: ignore[arg-type]

    records = [run("sgd", 0, 1), run("sgd", 1, 3), run("sgd", 2, 500, "diverged")]
    records += [run("sam", 0, 400, "failed"), run("sam", 1, 6), run("sam", 2, 900)]
    sgd, sam, lost = summarise(records, ["sgd", "sam", "lost"])
    assert (sgd.time_ratio, sgd.memory_ratio) == (1.0, 1.0)
    assert (sam.time_ratio, sam.memory_ratio) == (2.0, 2.0)
    assert (sam.n_ok, sam.n_diverged, sam.n_failed) == (2, 0, 1)
    assert math.isnan(lost.time_ratio)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_null_studies_on_the_accuracies_grid_keep_the_family_wise_error(seeds: int) -> None:
    """With 500 test samples accuracies step by 0.2 points, and differences are often equal by chance."""
    generator = np.random.default_rng(seeds)
    studies, errors = 500, 0
    for _ in range(studies):
        accuracy = 90 + generator.normal(size=seeds) + 0.4 * generator.normal(size=(7, seeds))
        grid = np.round(accuracy / 0.2) * 0.2
        found = compare({str(i): by_seed(*map(float, row)) for i, row in enumerate(grid)}, "0").values()
        errors += any(comparison.p_holm <= 0.05 for comparison in found)
    assert errors / studies <= 0.06


@pytest.mark.slow
def test_null_studies_keep_the_family_wise_error_and_the_intervals_cover() -> None:
    """2,000 studies of six methods that do nothing, five seeds each, with the seed's own effect."""
    generator = np.random.default_rng(0)
    studies, errors, covered = 2000, 0, 0
    for _ in range(studies):
        accuracy = 90 + generator.normal(size=5) + 0.3 * generator.normal(size=(7, 5))
        found = compare({str(i): by_seed(*map(float, row)) for i, row in enumerate(accuracy)}, "0").values()
        errors += min(comparison.p_holm for comparison in found) <= 0.05
        covered += sum(comparison.low <= 0 <= comparison.high for comparison in found)
    assert errors / studies <= 0.06
    assert covered / (6 * studies) == pytest.approx(0.95, abs=0.015)
