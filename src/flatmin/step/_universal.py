"""The universal class of sharpness-aware minimization: trace, determinant and Frobenius norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group, is_sharded
from flatmin.step._memory import Noise
from flatmin.step._noisy import drawing, load_noise_state, noise_state, smooth
from flatmin.step._optimizer import Step
from flatmin.step._window import Window

_SOURCE = "Tahmasebi, Soleymani, Bahri, Jegelka, Jaillet 2024, arXiv:2406.03682"


@register(
    "trace_sam",
    "step",
    summary="Sharpness of the universal class as the Hessian's trace, by random differences of gradients.",
    source=_SOURCE,
    gradients=lambda o: 1.0 + o["samples"],  # the clean pass and the samples
    copies=2,
    space={"rho": Range(0.001, 0.1, log=True), "lam": Range(0.1, 2.0)},
)
class TraceSAM(Step):
    r"""Trace-SAM: the universal class with both of its functions the identity.

    .. math:: w \leftarrow \text{base}\Big(w,\; g + \frac{\lambda}{M} \sum_{m=1}^{M} \big(g_m - g\big)\Big), \qquad
              g = \nabla L(w), \quad g_m = \nabla L(w + \rho v_m)

    In expectation :math:`g_m - g` is the gradient of :math:`(\rho^2 / 2) \operatorname{tr} H`, with
    ``sampler="sphere"`` of that divided by the number of weights. With Gaussian v it is ``WeightNoise`` with sigma
    = rho and mix = 1 - lam, also beyond lam = 1.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: size of the shift, >= 0; a group's own ``"rho"`` overrides it. 0 is the base optimizer, bit for bit,
            at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        lam: weight of the sharpness, >= 0. 0 is the base optimizer.
        samples: M, >= 1.
        sampler: ``"gaussian"``: v ~ N(0, I), as the released code draws it, and the published rho with it;
            ``"sphere"``: v uniform on the unit sphere over all parameters, as the paper has it.
        seed: of the noise, which depends on nothing else and not on torch's own generators.
        replay_rng: draw the same dropout masks in all passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Tahmasebi, Soleymani, Bahri, Jegelka, Jaillet 2024, "A Universal Class of Sharpness-Aware Minimization
    Algorithms", arXiv:2406.03682.

    Example:
        >>> import torch
        >>> from flatmin.step._universal import TraceSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = TraceSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.01, model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: float = 0.01,
        *,
        model: nn.Module | None,
        lam: float = 1.0,
        samples: int = 1,
        sampler: str = "gaussian",
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.lam = _check.number("lam", lam, low=0.0)
        self.samples = _check.integer("samples", samples, low=1)
        self.sampler = _check.choice("sampler", sampler, ("gaussian", "sphere"))
        self._noise = Noise(_check.integer("seed", seed, low=0))
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def _replace_gradient(self, window: Window) -> None:
        if self.lam == 0.0 or not any(group["rho"] for group in self.param_groups):
            return
        with drawing(self._noise):
            smooth(window, self._shift, samples=self.samples, mix=1.0 - self.lam)

    def _shift(self, like: Direction, norm: Tensor) -> Direction:
        shift = self._noise.normal(like)
        if self.sampler == "sphere":
            # scale_ keeps the weights where they are if the norm that it is given is not finite.
            shift.scale_(lambda group: group["rho"], torch.where(torch.isfinite(norm), shift.norm(), norm))
        else:
            shift.scale_(lambda group: group["rho"], norm, divide=False)
        return shift

    def _method_state(self) -> dict[str, Any]:
        return noise_state(self._noise)

    def _load_method_state(self, state: dict[str, Any]) -> None:
        load_noise_state(self._noise, state)


@register(
    "det_sam",
    "step",
    summary="Sharpness of the universal class as the Hessian's determinant, by random differences of losses.",
    source=_SOURCE,
    gradients=lambda o: 1.0 + o["samples"],  # the clean pass and the samples
    copies=2,
    space={"lam": Range(0.1, 2.0), "half_length": Range(0.001, 0.05, log=True)},
)
class DetSAM(Step):
    r"""Det-SAM: the universal class with psi(x) = exp(-x/2) and phi(x) = 1/x^2.

    .. math:: w \leftarrow \text{base}\Big(w,\; g + \lambda \, \varphi'(\bar\psi) \,
              \frac1M \sum_{m=1}^{M} \psi'(d_m) \, (g_m - g)\Big), \qquad
              d_m = \frac{L(w + \rho v_m) - L(w)}{\rho^2}, \quad \bar\psi = \frac1M \sum_{m=1}^{M} \psi(d_m)

    with :math:`g_m = \nabla L(w + \rho v_m)` and v uniform in a cube. For one sample the factor of
    :math:`g_1 - g` is :math:`\lambda e^{d_1}`. A small rho makes d large: where the exponential overflows, the
    gradient handed on is not finite.

    The losses that closures return are used: under data parallelism pass the ``DistributedDataParallel`` module as
    ``model``, so that their mean over the processes is taken. With ``transform``, ``evaluate`` must return the
    window's loss without the loss scale, and ``loss=`` is that of the clean pass; without it the step evaluates at
    w once more.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: factor of the shift, >= 0, the same in all groups. 0 is the base optimizer, bit for bit, at one
            gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        lam: weight of the sharpness, >= 0; it takes up the formula's constants. 0 is the base optimizer.
        half_length: v is uniform in [-half_length, half_length] in each entry, > 0.
        samples: M, >= 1.
        seed: of the noise, which depends on nothing else and not on torch's own generators.
        replay_rng: draw the same dropout masks in all passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it; ``TypeError`` also when
            ``evaluate`` returns no loss, ``ValueError`` when groups differ in ``maximize``.

    Source: Tahmasebi, Soleymani, Bahri, Jegelka, Jaillet 2024, "A Universal Class of Sharpness-Aware Minimization
    Algorithms", arXiv:2406.03682, and its released code.

    Example:
        >>> import torch
        >>> from flatmin.step._universal import DetSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = DetSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: float = 1.0,
        *,
        model: nn.Module | None,
        lam: float = 1.0,
        half_length: float = 0.01,
        samples: int = 1,
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.lam = _check.number("lam", lam, low=0.0)
        self.half_length = _check.number("half_length", half_length, low=0.0, open_low=True)
        self.samples = _check.integer("samples", samples, low=1)
        self._noise = Noise(_check.integer("seed", seed, low=0))
        self._clean_loss: Tensor | float | None = None
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with ``closure``, or finish one that :meth:`transform` has prepared."""
        if not callable(closure):
            return super().step(closure)

        def noting() -> Any:
            loss = closure()
            if self._clean_loss is None:
                self._clean_loss = loss.detach() if isinstance(loss, Tensor) else loss
            return loss

        try:
            return super().step(noting)
        finally:
            self._clean_loss = None

    def transform(
        self,
        evaluate: Callable[[], Any],
        *,
        scale: float | Tensor | None = None,
        loss: float | Tensor | None = None,
    ) -> None:
        """Replace every ``.grad`` by the method's gradient.

        ``evaluate()`` recomputes the window's gradient and returns its loss without the loss scale; ``loss`` is
        that of the clean pass, for which ``evaluate`` is called once more if it is not given.
        """
        self._clean_loss = loss.detach() if isinstance(loss, Tensor) else loss
        try:
            super().transform(evaluate, scale=scale)
        finally:
            self._clean_loss = None

    def _check_group(self, group: Group) -> None:
        _check_shared_rho(self, group)

    def _replace_gradient(self, window: Window) -> None:
        rho = self.param_groups[0]["rho"]
        if self.lam == 0.0 or rho == 0.0:
            return
        sign = _sign(self)
        clean = window.take_gradient(keep=True)
        norm = clean.norm()
        known = self._clean_loss
        start = _loss(self, window.evaluate() if known is None else known)
        differences: list[Tensor] = []
        total = Direction([])
        with drawing(self._noise):
            for _ in range(self.samples):
                with window.moved(_cube(self._noise.uniform(clean), self.half_length, rho, norm)):
                    loss = _loss(self, window.evaluate())
                differences.append(sign * (loss - start) / rho**2)
                # Relative to the first sample's: exp(-d/2) alone may under- or overflow.
                total.add_(window.take_gradient(), torch.exp((differences[0] - differences[-1]) / 2.0))
        d = torch.stack(differences)
        weights = torch.exp((d[0] - d) / 2.0).sum()
        # phi'(psi_bar) psi'(d_m) / M = exp(-d_m / 2) / (M psi_bar^3), psi_bar = exp(-d_1 / 2) weights / M
        factor = self.lam * torch.exp(d[0]) * self.samples**2 / weights**3
        clean.mul_(1.0 - factor * weights).add_(total, factor).put()

    def _method_state(self) -> dict[str, Any]:
        return noise_state(self._noise)

    def _load_method_state(self, state: dict[str, Any]) -> None:
        load_noise_state(self._noise, state)


@register(
    "frob_sam",
    "step",
    summary="Sharpness of the universal class as the Hessian's Frobenius norm, by a random covariance.",
    source=_SOURCE,
    gradients=lambda o: 1.0 + o["samples"],  # the clean pass and the samples
    copies=4,
    space={"rho": Range(0.001, 0.05, log=True), "lam": Range(0.001, 0.1, log=True)},
)
class FrobSAM(Step):
    r"""Frob-SAM: the universal class with the squared Frobenius norm of the Hessian.

    .. math:: w \leftarrow \text{base}\Big(w,\; g + \frac{\lambda}{\rho^2} \, \frac{1}{M - 1} \sum_{m=1}^{M}
              (L_m - \bar L) \, g_m\Big), \qquad L_m = L(w + \rho v_m), \quad g_m = \nabla L(w + \rho v_m)

    with v ~ N(0, I): the covariance of loss and gradient, half the gradient of the loss's variance, since
    :math:`\operatorname{Var}(v^\top H v) = 2 \lVert H \rVert_F^2`.

    The losses that closures return are used: under data parallelism pass the ``DistributedDataParallel`` module as
    ``model``, so that their mean over the processes is taken. With ``transform``, ``evaluate`` must return the
    window's loss without the loss scale.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: size of the shift, >= 0, the same in all groups. 0 is the base optimizer, bit for bit, at one gradient
            a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        lam: weight of the sharpness, >= 0. 0 is the base optimizer.
        samples: M, >= 2.
        seed: of the noise, which depends on nothing else and not on torch's own generators.
        replay_rng: draw the same dropout masks in all passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it; ``TypeError`` also when
            ``evaluate`` returns no loss, ``ValueError`` when groups differ in ``maximize``.

    Source: Tahmasebi, Soleymani, Bahri, Jegelka, Jaillet 2024, "A Universal Class of Sharpness-Aware Minimization
    Algorithms", arXiv:2406.03682, and its released code.

    Example:
        >>> import torch
        >>> from flatmin.step._universal import FrobSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = FrobSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: float = 0.005,
        *,
        model: nn.Module | None,
        lam: float = 0.005,
        samples: int = 2,
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.lam = _check.number("lam", lam, low=0.0)
        self.samples = _check.integer("samples", samples, low=2)
        self._noise = Noise(_check.integer("seed", seed, low=0))
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def _check_group(self, group: Group) -> None:
        _check_shared_rho(self, group)

    def _replace_gradient(self, window: Window) -> None:
        rho = self.param_groups[0]["rho"]
        if self.lam == 0.0 or rho == 0.0:
            return
        sign = _sign(self)
        clean = window.take_gradient(keep=True)
        norm = clean.norm()
        # Welford's sums: L_m g_m summed as they are would lose the small differences between the losses.
        losses, gradients, covariance = torch.zeros(()), Direction([]), Direction([])
        with drawing(self._noise):
            for count in range(1, self.samples + 1):
                shift = self._noise.normal(clean)
                shift.scale_(lambda group: group["rho"], norm, divide=False)
                with window.moved(shift):
                    loss = _loss(self, window.evaluate())
                gradient = window.take_gradient(keep=count < self.samples)
                if count == 1:
                    losses, gradients = loss, gradient
                    continue
                change = gradient.add_(gradients, -1.0)
                difference = loss - losses
                losses = losses + difference / count
                gradients.add_(change, 1.0 / count)
                covariance.add_(change, difference * ((count - 1) / count))
        clean.add_(covariance, sign * self.lam / rho**2 / (self.samples - 1)).put()

    def _method_state(self) -> dict[str, Any]:
        return noise_state(self._noise)

    def _load_method_state(self, state: dict[str, Any]) -> None:
        load_noise_state(self._noise, state)


@torch.no_grad()
def _cube(uniform: Direction, half_length: float, rho: float, norm: Tensor) -> Direction:
    """From [0, 1) to ``rho`` times the cube; zero where ``norm`` is not finite."""
    for bucket in uniform:
        torch._foreach_mul_(bucket.values, 2.0)
        torch._foreach_sub_(bucket.values, 1.0)
    uniform.scale_(lambda group: half_length * rho, norm, divide=False)
    return uniform


def _check_shared_rho(step: Step, group: Group) -> None:
    rho = _check.number("rho", group["rho"], low=0.0)
    shared = step.param_groups[0].get("rho", step._own_defaults["rho"])
    if rho != shared:
        raise ValueError(
            f"rho must be the same in all groups, since one loss difference is divided by its square, got {rho} "
            f"beside {shared}"
        )


def _sign(step: Step) -> float:
    """-1 where the loss is maximized: the sharpness meant is that of the loss which the base minimizes."""
    maximize = {bool(group.get("maximize")) for group in step.param_groups}
    if len(maximize) > 1:
        raise ValueError(f"maximize must be the same in all groups for {type(step).__name__}, which uses the loss")
    return -1.0 if maximize == {True} else 1.0


def _loss(step: Step, returned: Any) -> Tensor:
    """The loss's value as a 0-dim tensor, in data parallelism its mean over the processes."""
    number = isinstance(returned, (int, float)) and not isinstance(returned, bool)
    if not number and not (isinstance(returned, Tensor) and returned.ndim == 0):
        raise TypeError(
            f"evaluate must return the window's loss without the loss scale, a number or a 0-dim tensor, since "
            f"{type(step).__name__} uses it, got {_check.show(returned)}"
        )
    loss: Tensor = torch.tensor(returned, dtype=torch.float64) if number else returned.detach()
    loss = loss.float() if loss.device.type == "mps" else loss.double()  # mps has no float64
    for group in _processes(step):
        # Each process has the loss of its own data; weights that follow it must be the same everywhere.
        torch.distributed.all_reduce(loss := loss.clone(), group=group)
        loss = loss / torch.distributed.get_world_size(group)
    return loss


def _processes(step: Step) -> list[Any]:
    """The process groups over which the gradients are means."""
    if isinstance(step.model, DistributedDataParallel):
        return [step.model.process_group]
    for group in step.param_groups:
        for parameter in group["params"]:
            if is_sharded(parameter):
                mesh = parameter.device_mesh
                return [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return []
