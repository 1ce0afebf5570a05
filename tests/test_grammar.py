"""Method strings: what parses, to what, and how mistakes are named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatmin import parse_method
from flatmin._grammar import split_methods
from flatmin._registry import methods


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("sam", "sam"),
        (" sam ( rho = 1e-1 ) ", "sam(rho=0.1)"),
        ("sam(0.1)", "sam(rho=0.1)"),
        ("sam()", "sam"),
        ("sam(rho=0.05)", "sam"),
        ("sema+ad(sigma=0.2)+sam", "sam+ad(sigma=0.2)+sema"),
        ("sgd", "sgd"),
        ("base(lr_scale=sema)", "base(lr_scale=sema)"),
        ("sam(normalize=false)", "sam(normalize=false)"),
        ("sema(decay=0.9,every=7)", "sema(decay=0.9, every=7)"),
        ("asam(scaled='all')", "asam(scaled=all)"),
        ("ema(decay=.5, warmup=false)", "ema(decay=0.5, warmup=false)"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    assert str(parse_method(text)) == canonical
    assert str(parse_method(canonical)) == canonical


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a name, found 'the end'"),
        ("sma", "unknown method 'sma' (known: base, ad,"),
        ("sam+", "expected a name, found 'the end' at position 5"),
        ("sam(", "found 'the end'"),
        ("sam(rho)", "rho must be a number, got 'rho'"),
        ("sam(rho=)", "found ')' at position 9"),
        ("sam(radius=1)", "'sam' has no option 'radius' (options: rho, normalize)"),
        ("sam(rho=1, rho=2)", "'rho' of 'sam' is given twice"),
        ("sam(rho=1, 2)", "expected name=value"),
        ("sam(rho=-1)", "rho must be a finite number >= 0, got -1"),
        ("sam(rho=1e999)", "rho must be a finite number >= 0, got inf"),
        ("sam(rho=nan)", "rho must be a number, got 'nan'"),
        ("sam(normalize=1)", "normalize must be true or false, got 1"),
        ("sam+asam", "has asam and sam: at most one step"),
        ("ema+sema", "has ema and sema: at most one average"),
        ("ad+ad(sigma=1)", "names 'ad' twice"),
        ("sam;import os", "unexpected ';' at position 4"),
        ("sam(rho=__import__('os'))", "expected"),
        ("sema(decay=2)", "decay must be"),
        ("sam)", "expected '+' or the end, found ')'"),
        ("base(lr_scale=ema)", "lr_scale must be a number > 0 or sema"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        parse_method(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40) | st.text(alphabet="sam(rho=0.1)+,ed ", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_parses_or_is_refused_in_one_line(text: str) -> None:
    message = ""
    try:
        recipe = parse_method(text)
    except (ValueError, TypeError) as error:
        message = str(error)
    else:
        assert str(parse_method(str(recipe))) == str(recipe)
    assert len(message.splitlines()) <= 1


def test_gradients_of_a_composition() -> None:
    assert parse_method("sgd").gradients == 1
    assert parse_method("ad+ema").gradients == 1
    assert parse_method("sam+ad+sema").gradients == 2


def test_lists_split_outside_parentheses() -> None:
    assert split_methods("sam(rho=1,normalize=false),sgd") == ["sam(rho=1,normalize=false)", "sgd"]


def test_every_registered_method_says_what_it_is() -> None:
    for method in methods().values():
        assert method.summary.endswith(".")
        assert method.source
        assert set(method.space) <= set(method.options)
        parse_method(method.name)


def test_parsing_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    parse_method("sam+ad+sema")
    assert torch.equal(before, torch.get_rng_state())
