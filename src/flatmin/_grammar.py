"""The method string: ``sam``, ``sam(rho=0.1)``, ``ad(sigma=0.1)+sema``.

    method   = part ("+" part)*
    part     = name [ "(" [ argument ("," argument)* ] ")" ]
    argument = [ name "=" ] ( number | "true" | "false" | "none" | name | quoted text )

One argument may come without its name: it is the method's first option.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flatmin import _check
from flatmin._registry import Method, Option, methods

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<mark>[-+(),=]))"
)
_WORDS: dict[str, Option] = {"true": True, "false": False, "none": None}

#: Names for the base that are true only where the task's base optimizer is of that class.
ALIASES = {"sgd": "base"}


@dataclass(frozen=True)
class Part:
    """One method of a composition, with the options that differ from its defaults."""

    label: str
    method: Method
    options: Mapping[str, Option]

    @property
    def cost(self) -> float:
        """Gradient evaluations with these options."""
        return self.method.cost(self.options)

    def __str__(self) -> str:
        if not self.options:
            return self.label
        return f"{self.label}({', '.join(f'{key}={_write(value)}' for key, value in self.options.items())})"


@dataclass(frozen=True)
class Recipe:
    """A parsed method string: at most one base, one step and one average, and any penalties.

    Example:
        >>> from flatmin import parse_method
        >>> recipe = parse_method("sema + sam(rho=0.1)")
        >>> str(recipe), recipe.gradients
        ('sam(rho=0.1)+sema', 2.0)
    """

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)

    def at(self, place: str) -> list[Part]:
        """The parts that act in ``place``."""
        return [part for part in self.parts if part.method.place == place]

    @property
    def gradients(self) -> float:
        """Gradient evaluations a step (forward + backward = 1)."""
        steps = self.at("step")
        # Every evaluation of the loss differentiates the penalties too.
        return float((steps[0].cost if steps else 1) * self.gradients_per_evaluation)

    @property
    def gradients_per_evaluation(self) -> float:
        """Gradient evaluations that one forward and backward pass of the loss with its penalties costs."""
        return 1.0 + sum(part.cost for part in self.at("penalty"))

    def build(self, place: str, **supplied: Any) -> list[Any]:
        """Build the parts of ``place``; ``supplied`` are arguments such as ``base``, ``model``, ``layer``."""
        return [part.method.make(supplied, part.options) for part in self.at(place)]


def parse_method(text: str) -> Recipe:
    """Parse a method string such as ``"sam(rho=0.1)+ad+sema"``.

    Args:
        text: the method string; ``flatmin methods`` lists the names and their options.

    Returns:
        The recipe; ``str()`` of it is the canonical form, without options that have their default value.

    Raises:
        ValueError, TypeError: for a string that does not parse, an unknown name or option, two methods for
            one place, or an option's value that its method refuses.

    Example:
        >>> from flatmin import parse_method
        >>> str(parse_method("sema+sam(rho=0.05)"))
        'sam+sema'
    """
    if not isinstance(text, str):
        raise TypeError(f"method must be a string such as 'sam(rho=0.1)+ema', got {_check.show(text)}")
    parser = _Parser(text)
    parts = parser.method()
    order = ["base", "step", "penalty", "average"]
    parts.sort(key=lambda part: (order.index(part.method.place), part.method.name))
    recipe = Recipe(tuple(parts))
    for place in ("base", "step", "average"):
        if len(recipe.at(place)) > 1:
            listed = " and ".join(part.label for part in recipe.at(place))
            raise ValueError(f"method {_check.show(text)} has {listed}: at most one {place} can act in a training step")
    names = [part.method.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"method {_check.show(text)} names {name!r} twice")
    for part in parts:
        _try(text, part)
    return recipe


def split_methods(text: str) -> list[str]:
    """Split a comma-separated list of method strings at the commas outside parentheses.

    >>> split_methods("sgd,sam(rho=0.1,normalize=false)+ema")
    ['sgd', 'sam(rho=0.1,normalize=false)+ema']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                at = position + len(text[position:]) - len(text[position:].lstrip())
                raise self.error(f"unexpected {text[at]!r}", at)
            kind = str(match.lastgroup)
            self.tokens.append((kind, match.group(kind), match.start(kind)))
            position = match.end()
        self.tokens.append(("end", "the end", len(text)))

    def error(self, message: str, position: int) -> ValueError:
        return ValueError(f"method {_check.show(self.text)}: {message} at position {position + 1}")

    def take(self, *allowed: str) -> tuple[str, str, int]:
        kind, value, position = self.tokens[0]
        if kind not in allowed and value not in allowed:
            wanted = " or ".join(repr(item) if item in "+(),=" else f"a {item}" for item in allowed)
            raise self.error(f"expected {wanted}, found {value!r}", position)
        self.tokens.pop(0)
        return kind, value, position

    def peek(self, mark: str, ahead: int = 0) -> bool:
        return len(self.tokens) > ahead and self.tokens[ahead][:2] == ("mark", mark)

    def method(self) -> list[Part]:
        parts = [self.part()]
        while self.peek("+"):
            self.take("+")
            parts.append(self.part())
        if self.tokens[0][0] != "end":
            raise self.error(f"expected '+' or the end, found {self.tokens[0][1]!r}", self.tokens[0][2])
        return parts

    def part(self) -> Part:
        _, name, position = self.take("name")
        known = methods()
        method = known.get(ALIASES.get(name, name))
        if method is None:
            raise self.error(f"unknown method {name!r} (known: {', '.join([*known, *ALIASES])})", position)
        options: dict[str, Option] = {}
        if self.peek("("):
            self.take("(")
            while not self.peek(")"):
                if options:
                    self.take(",")
                self.argument(method, options)
            self.take(")")
        kept = {
            key: options[key]
            for key in method.options
            if key in options
            and not (options[key] == method.options[key] and type(options[key]) is type(method.options[key]))
        }
        return Part(name, method, kept)

    def argument(self, method: Method, options: dict[str, Option]) -> None:
        position = self.tokens[0][2]
        if self.tokens[0][0] == "name" and self.peek("=", 1):
            _, key, position = self.take("name")
            self.take("=")
        elif options or not method.options:
            raise self.error(f"expected name=value in the options of {method.name!r}", position)
        else:
            key = next(iter(method.options))
        if key not in method.options:
            listed = ", ".join(method.options) or "none"
            raise self.error(f"{method.name!r} has no option {key!r} (options: {listed})", position)
        if key in options:
            raise self.error(f"option {key!r} of {method.name!r} is given twice", position)
        kind, value, position = self.take("number", "name", "quoted")
        option = _read(kind, value)
        if isinstance(method.options[key], float) and type(option) is int:
            option = float(option)  # sam(rho=1) and sam(rho=1.0) are one method, by one name
        options[key] = option


def _read(kind: str, value: str) -> Option:
    if kind == "number":
        return int(value) if re.fullmatch(r"[+-]?\d{1,18}", value) else float(value)
    if kind == "quoted":
        return value[1:-1]
    return _WORDS.get(value, value)


def _write(value: Option) -> str:
    for word, meaning in _WORDS.items():
        if value is meaning:
            return word
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_]\w*", value) else repr(value)
    return repr(value)


def _try(text: str, part: Part) -> None:
    """Build the part on a tiny model, so that a value that its class refuses is refused here."""
    with torch.random.fork_rng(devices=[]):  # parsing a string must not draw from the user's generator
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.LayerNorm(1))
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    supplied = {"base": base, "model": model, "layer": model[0], "steps_per_epoch": 100, "optimizer": base}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether a value fits is said when the real model is built
        try:
            part.method.make(supplied, part.options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"method {_check.show(text)}: {part.method.name}: {error}") from None
