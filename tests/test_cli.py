"""The command line: one clear line and exit status 2 for bad input, nothing written."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatmin import ASAM, EMA, SAM, ActivationDecay, SwitchEMA
from flatmin.cli import main
from flatmin.study._compare import Study


def call(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


NOT_A_NUMBER = st.sampled_from(["", "x", "1e", "--1", "five", "1,2", "0x10", "None", "½"])
BAD_COUNT = (
    st.integers(max_value=0).map(str) | NOT_A_NUMBER | st.sampled_from(["0.5", "2.5", "1e3", "-1.0", "nan", "inf"])
)
WORD = st.text(alphabet="abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
BAD_RHO = st.floats(max_value=-1e-9).map(repr) | st.sampled_from(["nan", "inf", "-inf", "1e999", "true", "none", "'a'"])


def bad_methods() -> st.SearchStrategy[str]:
    known = {"base", "sgd", "sam", "asam", "ad", "ema", "sema"}
    unknown = WORD.filter(lambda word: word not in known)
    return st.one_of(
        unknown,
        unknown.map(lambda word: f"sgd,sam+{word}"),
        unknown.filter(lambda word: word not in {"rho", "normalize"}).map(lambda word: f"sam({word}=1)"),
        BAD_RHO.map(lambda value: f"sgd,sam(rho={value})"),
        BAD_RHO.map(lambda value: f"asam(eta={value})"),
        BAD_RHO.map(lambda value: f"ad(sigma={value})"),
        BAD_RHO.filter(lambda value: value != "none").map(lambda value: f"sema(decay={value})"),
        st.floats(1.0001, 1e9).map(lambda value: f"ema(decay={value!r})"),
        st.sampled_from(
            ["", ",", "sam,", "sam+asam", "sam,sam", "sam((", "sam)", "sam(rho=)", "sam(rho 1)", "sam sam"]
        ),
    )


BAD_ARGUMENTS = st.one_of(
    st.tuples(st.just("--seeds"), BAD_COUNT),
    st.tuples(st.just("--epochs"), BAD_COUNT),
    st.tuples(st.just("--jobs"), BAD_COUNT),
    st.tuples(st.just("--budget"), WORD.filter(lambda word: word not in {"epochs", "gradients"})),
    st.tuples(st.just("--task"), WORD.filter(lambda w: w not in {"mnist1d", "digits", "moons", "circles"})),
    st.tuples(st.just("--task"), WORD.map(lambda word: f"{word}.py:task")),
    st.tuples(st.just("--methods"), bad_methods()),
    st.tuples(st.just("--resume"), st.just("--overwrite")),
    st.sampled_from(["--epochs", "--seeds", "--methods"]).map(lambda option: (option, "--resume")),
    WORD.map(lambda word: (f"--no-such-{word}", "1")),
)


@given(pair=BAD_ARGUMENTS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bad_input_to_the_command_line(pair: tuple[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Study, "run", lambda *_: pytest.fail(f"{pair} was not refused"))
        status, out, err = call("compare", "--out", f"{folder}/study", *pair)
        assert status == 2, (pair, err)
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        name = pair[0].removeprefix("--").removesuffix("s")
        assert name in err or "no-such" in name, (pair, err)
        assert not os.listdir(folder)


BAD_NUMBER: st.SearchStrategy[Any] = st.one_of(
    st.floats(max_value=-1e-300),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), "0.1", None, True, [0.1], 1j, torch.ones(2), object()]),
)
OVER_ONE: st.SearchStrategy[Any] = st.floats(min_value=1.0, exclude_min=True)
NO_BOOL: st.SearchStrategy[Any] = st.sampled_from([0, 1, "true", None, 2.0])
BAD_INT: st.SearchStrategy[Any] = st.one_of(st.integers(max_value=0), st.sampled_from([1.5, "2", True, [1]]))
NO_MODULE: st.SearchStrategy[Any] = st.sampled_from([3, "model", torch.ones(2), torch.nn.Linear])


def base() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


MODEL = torch.nn.Linear(2, 2)
CONSTRUCTORS: list[tuple[str, Any, st.SearchStrategy[Any]]] = [
    ("rho", lambda v: SAM(base(), v, model=MODEL), BAD_NUMBER),
    ("normalize", lambda v: SAM(base(), model=MODEL, normalize=v), NO_BOOL),
    ("replay_rng", lambda v: SAM(base(), model=MODEL, replay_rng=v), NO_BOOL),
    ("model", lambda v: SAM(base(), model=v), NO_MODULE),
    ("SAM wraps an instance", lambda v: SAM(v, model=MODEL), NO_MODULE),
    ("rho", lambda v: ASAM(base(), v, model=MODEL), BAD_NUMBER),
    ("eta", lambda v: ASAM(base(), model=MODEL, eta=v), BAD_NUMBER),
    ("scaled", lambda v: ASAM(base(), model=MODEL, scaled=v), NO_MODULE),
    ("decay", lambda v: EMA(MODEL, v), BAD_NUMBER | OVER_ONE),
    ("warmup", lambda v: EMA(MODEL, warmup=v), NO_BOOL),
    ("buffers", lambda v: EMA(MODEL, buffers=v), NO_MODULE),
    ("model", lambda v: EMA(v), NO_MODULE),
    ("decay", lambda v: SwitchEMA(MODEL, v), BAD_NUMBER | OVER_ONE),
    ("steps_per_epoch", lambda v: SwitchEMA(MODEL, steps_per_epoch=v), BAD_INT),
    ("every", lambda v: SwitchEMA(MODEL, every=v), BAD_INT),
    ("optimizer_state", lambda v: SwitchEMA(MODEL, 0.9, optimizer_state=v), NO_MODULE),
    ("layer", lambda v: ActivationDecay(v), NO_MODULE),
    ("sigma", lambda v: ActivationDecay(MODEL, v), BAD_NUMBER),
]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_bad_input_to_the_constructors(data: st.DataObject) -> None:
    name, construct, values = data.draw(st.sampled_from(CONSTRUCTORS))
    value = data.draw(values)
    hooks = dict(MODEL._forward_pre_hooks)
    with pytest.raises((ValueError, TypeError)) as caught:
        construct(value)
    assert name in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert dict(MODEL._forward_pre_hooks) == hooks


def test_methods_lists_the_registry() -> None:
    from flatmin._registry import methods

    status, out, _ = call("methods")
    assert status == 0
    for name, method in methods().items():
        assert name in out
        assert method.place in out


def test_version_help_and_no_command() -> None:
    assert call("--version")[:2] == (0, "flatmin 0.1.0\n")
    assert call("--help")[0] == 0
    assert call("compare", "--help")[0] == 0
    status, _, err = call("nonsense")
    assert status == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize("width", ["80", "120"])
def test_compare_prints_a_whole_table_at_any_width(width: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flatmin", "compare", "--task", "moons", "--methods", "sgd,sam(rho=0.2)+sema"]
    command += ["--seeds", "2", "--epochs", "1", "--jobs", "1", "--out", str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": width})
    for word in ("sgd", "sam(rho=0.2)+sema", "accuracy", "NLL", "ECE", "gap", "Holm", "gradients", "time", "memory"):
        assert word in done.stdout.replace("\n", ""), word
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert "2/2" in done.stdout


def test_without_the_study_extra_the_command_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['typer'] = None; from flatmin.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: typer is not installed; the command line needs: pip install 'flatmin[study]'\n"
