"""Generalization Aware Minimization: perturbation steps whose sizes are learned while training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group
from flatmin.step._guard import Generators
from flatmin.step._optimizer import Step
from flatmin.step._products import PRODUCTS, Twice, check_step, check_twice, stretch_
from flatmin.step._window import Window


@dataclass
class _Stop:
    """A place at which the recursion evaluates, all as measured, with the loss scale."""

    direction: Direction  #: d_{t-1}; in the walk G(p_{t-1})
    norm: Tensor  #: of ``direction``
    found: Direction  #: the gradient at the place


def _cost(steps: int, product: str, eps: float | None, period: int, learn: bool, **_: object) -> float:
    """Gradient evaluations a step, the mean over a period."""
    if not learn:
        return steps + 1.0
    plain = eps is None
    exact = 3 * steps + (2 if plain else 0)
    learning = exact if product == "exact" else 2 * steps + (2 if plain else 1)
    return steps + 1 + (learning - steps - 1) / period


@register(
    "gam",
    "step",
    summary="SAM of T steps whose coefficients are learned online from an independent batch.",
    source="Generalization Aware Minimization, ICLR 2025 submission, OpenReview XvA1Mn9OFy",
    gradients=lambda o: _cost(**o),
    copies=5,
    space={"gamma": Range(0.001, 0.1, log=True), "gamma_lr": Range(1e-6, 1e-3, log=True)},
)
class GeneralizationAwareMinimization(Step):
    r"""Generalization Aware Minimization: T perturbation steps with coefficients learned while training.

    .. math:: d_0 = G(w), \quad d_t = G(w + \gamma_t \, d_{t-1}), \quad w \leftarrow \text{base}(w, d_T), \qquad
              \gamma \leftarrow \gamma - \eta_\gamma \, \nabla_{\!\gamma} \, \Delta(d_T, v)

    with G the gradient of the step's batch and v the gradient of an independent batch at w. For a quadratic loss
    :math:`d_T = f(H)(w - w^*)` with a polynomial f that :meth:`response` gives; T = 1 with a fixed coefficient is
    un-normalised SAM. Other recursions: ``"walk"``, :math:`p_t = p_{t-1} + \gamma_t G(p_{t-1})` from p_0 = w, with
    the gradient at p_T; and with ``eps`` given, which makes the same polynomial,
    :math:`d_t = d_0 + (\gamma_t / \epsilon)(G(w + \epsilon d_{t-1}) - d_0)`.

    :math:`\nabla_{\!\gamma} \Delta` is exact up to the products with the Hessian that its adjoint recursion takes,
    one for each t.

    The independent batch comes through ``aux``, a function without arguments that runs forward and backward on it,
    as the closure does on the step's own batch, penalties and loss scale included. It is called once in every step
    that updates the coefficients, which :attr:`wants_aux` tells in advance; assign a new one before each step, or
    let it draw a batch itself whenever it is called. Buffers, generators and gradients of other optimizers stay as
    the clean pass left them. Copies of the optimizer need an ``aux`` of their own.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        steps: T, >= 1.
        model: the model whose buffers stay as after the clean pass, under data parallelism the
            ``DistributedDataParallel`` module; ``None`` declares that there are none to protect.
        gamma: the coefficients at the start, one number for all or T of them; if all are 0 and ``learn=False`` it
            is the base optimizer, bit for bit, at one gradient a step.
        gamma_lr: learning rate of the coefficients, >= 0.
        recursion: ``"nested"`` or ``"walk"``.
        eps: length factor of the nested recursion's finite difference, > 0; ``None``: gamma_t itself.
        discrepancy: Delta. ``"dot"``: -<d_T, v>; ``"squared"``: \|d_T - v\|^2 / 2; ``"cosine"``: -cos(d_T, v).
        relative: divide Delta by \|d_0\| \|v\|, taken as constants, so that the loss's scale matters less; for
            ``"dot"`` and ``"squared"``.
        normalize: perturb along d / \|d\| instead of d: T = 1 is then SAM.
        period: update the coefficients in every ``period``-th step, from the first one on.
        gamma_max: coefficients stay within [-gamma_max, gamma_max], > 0. With ``"dot"`` they would rise for ever.
        learn: whether to update the coefficients at all.
        product: how the products with the Hessian are made, ``"difference"`` or ``"exact"``.
        r: length of the finite difference's step, > 0, in units of the weights; 0.01 where not given. Only with
            ``product="difference"``.
        aux: evaluates the independent batch; also an attribute.
        replay_rng: draw the same dropout masks in all passes over the step's batch.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it; ``RuntimeError`` from a step that
            updates the coefficients when ``aux`` is missing or leaves no gradient.

    Source: "Generalization Aware Minimization", ICLR 2025 submission, OpenReview XvA1Mn9OFy. This follows its
    abstract, reviews and author replies, which do not fix the recursion; the nested one is the reading whose
    polynomials are the most general.

    Example:
        >>> import torch
        >>> from flatmin.step._gam import GeneralizationAwareMinimization
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = GeneralizationAwareMinimization(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        >>> x, y = torch.randn(2, 8, 3), torch.randn(2, 8, 1)
        >>> def evaluate(batch):
        ...     loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
        ...     loss.backward()
        ...     return loss
        >>> def closure():
        ...     opt.zero_grad()
        ...     return evaluate(0)
        >>> opt.aux = lambda: evaluate(1)
        >>> loss = opt.step(closure)
        >>> len(opt.gammas), opt.evaluations
        (1, 4.0)
    """

    #: The function that evaluates the independent batch.
    aux: Callable[[], Any] | None

    #: The coefficients gamma_1 ... gamma_T.
    gammas: list[float]

    def __init__(
        self,
        base: Optimizer,
        steps: int = 1,
        *,
        model: nn.Module | None,
        gamma: float | Sequence[float] = 0.01,
        gamma_lr: float = 1e-4,
        recursion: str = "nested",
        eps: float | None = None,
        discrepancy: str = "dot",
        relative: bool = False,
        normalize: bool = False,
        period: int = 1,
        gamma_max: float = 1.0,
        learn: bool = True,
        product: str = "difference",
        r: float | None = None,
        aux: Callable[[], Any] | None = None,
        replay_rng: bool = True,
    ) -> None:
        _check.integer("steps", steps, low=1)
        self.learn = _check.boolean("learn", learn)
        self.gamma_max = _check.number("gamma_max", gamma_max, low=0.0, open_low=True)
        self.gammas = _coefficients(gamma, steps, self.gamma_max if learn else math.inf)
        self.gamma_lr = _check.number("gamma_lr", gamma_lr, low=0.0)
        self.recursion = _check.choice("recursion", recursion, ("nested", "walk"))
        self.eps = None if eps is None else _check.number("eps", eps, low=0.0, open_low=True)
        if eps is not None and recursion == "walk":
            raise ValueError(f"eps must be None with recursion='walk', which has no finite difference, got {eps}")
        self.discrepancy = _check.choice("discrepancy", discrepancy, ("dot", "squared", "cosine"))
        self.relative = _check.boolean("relative", relative)
        if relative and discrepancy == "cosine":
            raise ValueError("relative must be false with discrepancy='cosine', which has no scale, got True")
        self.normalize = _check.boolean("normalize", normalize)
        self.period = _check.integer("period", period, low=1)
        self.product = _check.choice("product", product, PRODUCTS)
        self.r = check_step("r", r, product, default=0.01)
        self.aux = aux
        self._check_aux()
        self._count = 0
        self.needs_true_gradient = learn or not normalize
        super().__init__(base, model=model, defaults={}, replay_rng=replay_rng)

    def _prepare(self) -> None:
        if self.learn and self.product == "exact":
            check_twice(self.model, self.param_groups)

    @property
    def wants_aux(self) -> bool:
        """Whether the coming step updates the coefficients, and calls ``aux`` for it."""
        return self.learn and self._count % self.period == 0

    def response(self, eigenvalue: float) -> float:
        """f(eigenvalue): what the present coefficients make of an eigenvalue of a quadratic loss's Hessian.

        Raises ``ValueError`` with ``normalize=True``, where there is no such function.
        """
        if self.normalize:
            raise ValueError("response() needs normalize=False: a normalised step is no function of the eigenvalue")
        value = eigenvalue
        for gamma in self.gammas:
            value = eigenvalue * (1 + gamma * value) if self.recursion == "nested" else value * (1 + gamma * eigenvalue)
        return value

    def _check_group(self, group: Group) -> None:
        """The coefficients belong to all groups together."""

    def _replace_gradient(self, window: Window) -> None:
        if self.wants_aux:
            gammas = self._learn(window)
        else:
            gammas = self.gammas
            if any(gammas):
                self._follow(window)
        self.gammas, self._count = gammas, self._count + 1  # nothing is evaluated after this

    # --- the recursion ------------------------------------------------------------------------------

    def _follow(self, window: Window) -> None:
        """Make ``.grad`` d_T, holding no more than it takes."""
        lasting = self.eps is not None or (self.recursion == "walk" and len(self.gammas) > 1)
        final = self._recur(window, window.take_gradient(keep=lasting), stops=None)
        if final is not None:
            final.put()

    def _recur(self, window: Window, clean: Direction, *, stops: list[_Stop] | None) -> Direction | None:
        """d_T, or ``None`` if it was left in ``.grad``.

        ``stops`` takes down what the adjoint recursion needs; without it ``clean`` may be used up.
        """
        direction, shift = clean, Direction([])
        last = len(self.gammas) - 1
        leave = stops is None and self.eps is None  # the loop's own layout of the gradient, which may be sparse
        sound = lost = torch.zeros(())
        for number, gamma in enumerate(self.gammas):
            norm = direction.norm()
            finite = torch.isfinite(norm)
            sound, lost = (finite, torch.zeros_like(finite)) if number == 0 else (sound, lost | (sound & ~finite))
            again = stops is not None or (self.eps is not None and direction is clean)
            ascent = direction.copy() if again else direction
            self._scale(ascent, norm, gamma if self.eps is None else self.eps, window.scale)
            shift = shift.add_(ascent) if self.recursion == "walk" and shift.buckets else ascent
            with window.moved(shift, keep=self.recursion == "walk" and number < last):
                window.evaluate()
            if leave and number == last:
                break
            found = window.take_gradient(keep=stops is not None)
            if stops is not None:
                stops.append(_Stop(direction, norm, found))
            if self.eps is None:
                direction = found
            else:
                direction = found if stops is None else found.copy()
                direction.add_(clean, -1.0).mul_(gamma / self.eps).add_(clean)
        # Where d_t is the first that is not finite, the weights stayed at w and found d_0 again: a loss scaler
        # must see that something was lost. The walk stays where it was and finds the same once more.
        if self.recursion == "walk" or last == 0 or (lost.device.type == "cpu" and not lost):
            return None if leave else direction
        if leave:
            direction = window.take_gradient()
        with torch.no_grad():
            for bucket in direction:
                for value in bucket.values:
                    value.masked_fill_(lost.to(value.device), math.nan)
        return direction

    def _scale(self, direction: Direction, norm: Tensor, factor: float, scale: float) -> None:
        """Make a direction, measured with the loss scale, the perturbation ``factor`` along it."""
        if self.normalize:
            direction.scale_(lambda group: factor, norm)
        else:
            direction.scale_(lambda group: factor / scale, norm, divide=False)

    # --- the coefficients ---------------------------------------------------------------------------

    def _learn(self, window: Window) -> list[float]:
        """Make ``.grad`` d_T, and give the coefficients of the next step."""
        self._check_aux()
        if self.aux is None:
            raise RuntimeError(
                "aux is missing: set opt.aux to a function that runs forward and backward on a batch independent of "
                "the step's own before each step that updates the coefficients (opt.wants_aux), or use learn=False"
            )
        clean = window.take_gradient(keep=True)
        # Masks of its own: with those of the step's batch the two gradients would not be independent.
        generators = Generators(self._devices())
        wanted = window.gradient(keep=True, function=self._evaluate_aux)
        generators.restore()
        stops: list[_Stop] = []
        final = self._recur(window, clean, stops=stops)
        assert final is not None
        slopes = self._slopes(window, clean, wanted, final, stops)
        # A step that a loss scaler will skip teaches nothing.
        slopes = slopes.masked_fill(~torch.isfinite(final.norm()).to(slopes.device), math.nan)
        if isinstance(self.model, DistributedDataParallel):
            # Weights that follow the coefficients must be the same everywhere, to the last bit.
            torch.distributed.all_reduce(slopes, group=self.model.process_group)
            slopes /= torch.distributed.get_world_size(self.model.process_group)
        final.put()
        found: list[float] = slopes.tolist()
        if not all(map(math.isfinite, found)):
            return self.gammas
        moved = [gamma + self.gamma_lr * slope for gamma, slope in zip(self.gammas, found, strict=True)]
        return [min(max(gamma, -self.gamma_max), self.gamma_max) for gamma in moved]

    def _evaluate_aux(self) -> None:
        assert self.aux is not None
        self.aux()
        if all(parameter.grad is None for group in self.param_groups for parameter in group["params"]):
            raise RuntimeError("aux left no gradient in the optimizer's parameters: it must run forward and backward")

    def _slopes(
        self, window: Window, clean: Direction, wanted: Direction, final: Direction, stops: list[_Stop]
    ) -> Tensor:
        """-dDelta/dgamma, by the adjoint recursion from the last step to the first."""
        scale = window.scale
        slopes: list[Tensor] = []
        vector = self._aim(clean, wanted, final, scale)
        if self.recursion == "walk":
            vector = self._product(window, stops, len(stops) - 1, vector)
        for number in reversed(range(len(stops))):
            stop, gamma = stops[number], self.gammas[number]
            if self.recursion == "walk":
                slope, back = self._through(vector.copy(), stop, scale)
                if number > 0:
                    vector.add_(self._product(window, stops, number - 1, back), gamma)
            elif self.eps is None:
                slope, vector = self._through(self._product(window, stops, number, vector), stop, scale)
                vector.mul_(gamma)
            else:
                pushed = self._product(window, stops, number, vector) if number > 0 else None
                slope = vector.dot(stop.found.add_(clean, -1.0)) / (self.eps * scale)
                if pushed is not None:
                    vector = self._through(pushed, stop, scale)[1].mul_(gamma)
            slopes.insert(0, slope)
        return torch.stack([slope.to(stops[0].norm.device) for slope in slopes])

    def _aim(self, clean: Direction, wanted: Direction, final: Direction, scale: float) -> Direction:
        """-dDelta/dd_T, without the loss scale; ``wanted`` is used up."""
        wanted.mul_(1.0 / scale)
        length = wanted.norm()
        if self.discrepancy == "squared":
            wanted.add_(final, -1.0 / scale)
        if self.discrepancy == "cosine":
            by_final = _inverse(final.norm() / scale)
            by_both = by_final * _inverse(length)
            cosine = wanted.dot(final) / scale * by_both
            wanted.mul_(by_both).add_(final, -cosine * by_final.square() / scale)
        elif self.relative:
            wanted.mul_(_inverse(length) * _inverse(clean.norm() / scale))
        return wanted

    def _product(self, window: Window, stops: list[_Stop], number: int, vector: Direction) -> Direction:
        """H ``vector`` at the place of a stop, without the loss scale; ``vector`` stays."""
        shift = self._place(stops, number, window.scale)
        if self.product == "exact":
            before = window.evaluations
            with window.moved(shift):
                result = Twice(window, self.param_groups, self.model).product(vector)
            window.evaluations = before + 2.0  # the gradient on the way to it is part of the product's cost
            return result.mul_(1.0 / window.scale)
        norm = vector.norm()
        shift.add_(stretch_(vector.copy(), self.r, norm))
        with window.moved(shift):
            window.evaluate()
        return window.take_gradient(keep=True).add_(stops[number].found, -1.0).mul_(norm / (self.r * window.scale))

    def _place(self, stops: list[_Stop], number: int, scale: float) -> Direction:
        """How far from w a stop's gradient was found, in the very bits."""
        shift = Direction([])
        for index in range(number + 1) if self.recursion == "walk" else [number]:
            ascent = stops[index].direction.copy()
            self._scale(ascent, stops[index].norm, self.gammas[index] if self.eps is None else self.eps, scale)
            shift = shift.add_(ascent) if shift.buckets else ascent
        return shift

    def _through(self, vector: Direction, stop: _Stop, scale: float) -> tuple[Tensor, Direction]:
        """Back from a perturbation's unit q to its direction d: <``vector``, q>, and (dq/dd)' ``vector``.

        q is d, or d / |d|, without the loss scale, and negative in ``maximize`` groups; ``vector`` is used up.
        """
        for bucket in vector:
            if bucket.group.get("maximize"):
                with torch.no_grad():
                    torch._foreach_neg_(bucket.values)
        along = vector.dot(stop.direction)
        if not self.normalize:
            return along / scale, vector
        inverse = _inverse(stop.norm)
        vector.add_(stop.direction, -along * inverse.square()).mul_(inverse * scale)
        return along * inverse, vector

    # --- state --------------------------------------------------------------------------------------

    def _check_aux(self) -> None:
        if self.aux is not None and not callable(self.aux):
            raise TypeError(f"aux must be a function without arguments, or None, got {_check.show(self.aux)}")

    def _method_state(self) -> dict[str, Any]:
        gammas = torch.tensor(self.gammas, dtype=torch.float64)
        return {"gammas": gammas, "count": self._count, "gamma_lr": self.gamma_lr}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        gammas, steps = state["gammas"].tolist(), len(self.gammas)
        if len(gammas) != steps:
            raise ValueError(
                f"steps must be {len(gammas)} to load this checkpoint's coefficients, is {len(self.gammas)}"
            )
        self.gammas, self._count, self.gamma_lr = gammas, int(state["count"]), float(state["gamma_lr"])

    def __getstate__(self) -> dict[str, Any]:
        # A copy's aux would evaluate the original's model, and most functions cannot be pickled.
        return {**super().__getstate__(), "aux": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(gammas={self.gammas!r}, learn={self.learn!r}, base={self.base!r})"


def _coefficients(gamma: Any, steps: int, limit: float) -> list[float]:
    """``steps`` numbers from one for all or a sequence of them."""
    if not isinstance(gamma, Sequence) or isinstance(gamma, str):
        return [_check.number("gamma", gamma, low=-limit, high=limit)] * steps
    if len(gamma) != steps:
        raise ValueError(f"gamma must be one number or steps={steps} of them, got {_check.show(gamma)}")
    return [_check.number("gamma", each, low=-limit, high=limit) for each in gamma]


def _inverse(number: Tensor) -> Tensor:
    """1 / ``number``, and 0 for 0: a direction of no length has no effect."""
    return torch.where(number == 0, 0.0, 1.0 / number)
