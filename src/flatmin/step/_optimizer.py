"""The base of all steps: an optimizer around an optimizer, with two ways in and one implementation."""

from __future__ import annotations

import numbers
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from flatmin import _check
from flatmin.step._direction import Group, is_sharded
from flatmin.step._graph import hold_backward
from flatmin.step._guard import Buffers, Generators, modules_of
from flatmin.step._window import Backup, Window, ZeroingWatch

_NOT_OURS = (
    "{name} wraps an instance of a torch.optim.Optimizer: pass {name}(torch.optim.SGD(model.parameters(), lr=0.1), "
    "model=model), got {got}"
)


class Step(Optimizer):
    """An optimizer that hands its base another gradient: one measured at moved weights.

    It shares ``param_groups`` and ``state`` with ``base``, so that schedulers, checkpoints and
    ``add_param_group`` see one optimizer. There are two ways in:

    - ``loss = opt.step(closure)``: the closure zeroes, runs forward and backward, returns the loss. The
      clean loss is returned. If the closure raises, nothing has happened: weights, buffers, generators and
      optimizer state are bitwise as before, and ``.grad`` is ``None``.
    - ``opt.begin_window()`` before the first forward, ``opt.transform(evaluate)`` after the last backward,
      in loops that own the step; then unscale, clip and ``opt.base.step()`` as always.

    A non-finite clean gradient does not move the weights; the gradient handed to the base is then as
    non-finite as it would be without flatmin, for a loss scaler to see.

    ``model`` also tells which parameters belong to another optimizer: their gradients stay those of the clean
    pass. With ``model=None`` there must be none. Torch's generators are replayed from :meth:`begin_window` on,
    so draws of other kinds between it and the passes (augmentation by torch in this process) must come before
    it. A clean ``.grad`` tensor is used up; an error of the base's own ``step`` is not undone.

    A method overrides :meth:`_replace_gradient` and names its per-group options in ``defaults``.
    """

    #: Whether the method uses |g| itself, so that a loss scale must be known.
    needs_true_gradient = False

    #: Whether the method differentiates twice: :meth:`step` then hands it the clean pass's loss with its
    #: graph (``window.loss()``) in place of a gradient; ``transform`` has to evaluate for it once more.
    needs_graph = False

    # Optimizer.__init__ is not called on purpose: groups, state and hooks are those of the base.
    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None,
        defaults: Mapping[str, Any],
        replay_rng: bool = True,
        sync: str = "global",
    ) -> None:
        name = type(self).__name__
        if not isinstance(base, Optimizer):
            raise TypeError(_NOT_OURS.format(name=name, got=_check.show(base)))
        if isinstance(base, Step):
            raise TypeError(f"base must be a plain optimizer, got {type(base).__name__}: a step cannot wrap a step")
        if isinstance(base, torch.optim.LBFGS):
            raise TypeError(
                "base must take one gradient a step, got LBFGS, whose line search calls the closure itself; "
                "use SGD, AdamW or another first-order optimizer"
            )
        if getattr(base, "_flatmin_wrapped", False):
            raise ValueError(
                f"base is wrapped by a flatmin step already, and its groups carry that step's options; build a new "
                f"{type(base).__name__} for {name}"
            )
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be the torch.nn.Module whose buffers to protect, or None, got {_check.show(model)}"
            )
        _check.boolean("replay_rng", replay_rng)
        _check_members(model, base.param_groups)
        _check.choice("sync", sync, ("global", "per_worker"))
        if sync == "per_worker":
            _check_per_worker(base, model)
        self.sync = sync
        self.base = base
        self.model = model
        self.replay_rng = replay_rng
        self.evaluations = 0.0
        self._own_defaults = dict(defaults)
        self._reset_transient()
        self._prepare()
        checked = [self._with_defaults(group) for group in base.param_groups]
        for group, options in zip(base.param_groups, checked, strict=True):
            group.update(options)
        base._flatmin_wrapped = True  # type: ignore[attr-defined]
        self._watch_base()

    def _watch_base(self) -> None:
        self.base.register_step_post_hook(_Stepped(self))

    def _reset_transient(self) -> None:
        self._backup = Backup()
        self._running = False
        self._transformed = False
        self._closures_watched = 0
        self._window_start: Generators | None = None

    # --- what a method defines ---------------------------------------------------------------------

    def _prepare(self) -> None:
        """Raise if the method cannot work with this base and model; the base is still untouched then."""

    @abstractmethod
    def _replace_gradient(self, window: Window) -> None:
        """Replace the clean gradient in ``.grad`` by the method's."""

    def _check_group(self, group: Group) -> None:
        """Raise if an option of ``group`` is nonsense; called at construction and before every step."""
        _check.number("rho", group["rho"], low=0.0)

    def _method_state(self) -> dict[str, Any]:
        """State of the method itself, for ``state_dict``; empty if it has none."""
        return {}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`_method_state` gave."""

    # --- the two ways in ---------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with ``closure``, or finish one that :meth:`transform` has prepared.

        Returns the clean loss as the closure returned it. Raises ``RuntimeError`` without a closure and
        without a preceding ``transform``, when called inside its own closure, and when the closure leaves
        no gradient or does not zero; ``TypeError`` when it returns anything but a number or a 0-dim tensor.
        """
        if closure is None:
            if not self._transformed:
                raise RuntimeError(
                    f"{type(self).__name__}.step needs a closure that zeroes, runs forward and backward and returns "
                    "the loss; in a loop that owns the step call transform(evaluate) after the last backward first"
                )
            self._transformed = False
            self.base.step()
            return None
        if not callable(closure):
            raise TypeError(f"closure must be callable, got {_check.show(closure)}")
        with self._exclusive():
            modules, devices = modules_of(self.model), self._devices()
            buffers = Buffers(modules)
            generators = Generators(devices)
            try:
                clean = None
                watch = ZeroingWatch(self.param_groups) if self._closures_watched < 3 else None
                with torch.enable_grad(), self._local_gradients():
                    if self.needs_graph:
                        with hold_backward() as held:
                            loss = _checked_loss(closure())
                        clean = held.total
                    else:
                        loss = _checked_loss(closure())
                if watch is not None:
                    # What is seen once holds for good; a closure that sets .grad itself is never seen.
                    self._closures_watched = 3 if watch.end() else self._closures_watched + 1
                self._run(
                    lambda: _checked_loss(closure()),
                    modules,
                    devices,
                    generators if self.replay_rng else None,
                    clean=clean,
                )
            except BaseException:
                buffers.restore()
                generators.restore()
                self._drop_gradients()
                raise
            self._transformed = False
            self.base.step()
        return loss

    @contextmanager
    def clean_pass(self) -> Iterator[None]:
        """The window's clean forward and backward passes, in a loop that owns its step.

        It calls :meth:`begin_window`, and with ``sync="per_worker"`` keeps the gradients from being reduced.
        """
        self.begin_window()
        with self._local_gradients():
            yield

    def _local_gradients(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if self.sync == "per_worker" else nullcontext()  # type: ignore[union-attr,operator]

    def begin_window(self) -> None:
        """Mark the start of a window, before its first forward: what the random generators are now."""
        if self._running:
            raise RuntimeError("begin_window() was called during an evaluation of this optimizer")
        self._transformed = False
        self._window_start = Generators(self._devices())

    def transform(self, evaluate: Callable[[], Any], *, scale: float | Tensor | None = None) -> None:
        """Replace every ``.grad`` by the method's gradient.

        ``evaluate()`` recomputes the gradient of the same window (all its micro-batches, scaled as before)
        at the weights as they are. ``scale`` is the loss scale that the gradients carry
        (``scaler.get_scale()``), needed by methods that use the gradient's length. Buffers and generators
        end as after the clean pass; after an error too, and then ``.grad`` is ``None``.
        """
        if not callable(evaluate):
            raise TypeError(f"evaluate must be callable, got {_check.show(evaluate)}")
        if self.needs_true_gradient and scale is None:
            raise ValueError(
                f"scale is required: {type(self).__name__} uses the length of the gradient; pass "
                "scale=scaler.get_scale(), or scale=1.0 where no loss scaler is in use"
            )
        factor = 1.0
        if scale is not None:
            value = scale.item() if isinstance(scale, Tensor) and scale.numel() == 1 else scale
            factor = _check.number("scale", value, low=0.0, open_low=True)
        start, self._window_start = self._window_start, None
        if self.replay_rng and start is None:
            raise RuntimeError(
                "begin_window() must be called before the window's first forward, so that both passes draw the same "
                "dropout masks; or construct the step with replay_rng=False"
            )
        with self._exclusive():
            devices = self._devices()
            generators = Generators(devices)
            try:
                self._run(evaluate, modules_of(self.model), devices, start if self.replay_rng else None, scale=factor)
            except BaseException:
                generators.restore()
                self._drop_gradients()
                raise
        self._transformed = True
        # The loop steps the base; a scheduler built on this wrapper must not warn that nothing stepped.
        self._opt_called = True

    def _run(
        self,
        evaluate: Callable[[], Any],
        modules: list[nn.Module],
        devices: set[torch.device],
        start: Generators | None,
        *,
        scale: float = 1.0,
        clean: Tensor | None = None,
    ) -> None:
        for group in self.param_groups:
            for key, default in self._own_defaults.items():
                group.setdefault(key, default)  # a group added to the base behind our back
            self._check_group(group)
        if clean is None and all(p.grad is None for group in self.param_groups for p in group["params"]):
            raise RuntimeError("no parameter has a gradient: the clean pass must call backward() on its loss")
        end = Generators(devices)
        window = Window(
            evaluate,
            groups=self.param_groups,
            modules=modules,
            backup=self._backup,
            start=start,
            scale=scale,
            clean=clean,
        )
        self._replace_gradient(window)
        if start is not None:
            end.restore()
        self.evaluations += 1 + window.evaluations

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._running:
            raise RuntimeError(f"{type(self).__name__} was called inside its own closure or evaluate function")
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _devices(self) -> set[torch.device]:
        devices = [parameter.device for group in self.param_groups for parameter in group["params"]]
        # One comparison where all are alike: hashing hundreds of devices would be felt on small layers.
        return {devices[0]} if devices.count(devices[0]) == len(devices) else set(devices)

    def _drop_gradients(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    # --- one optimizer with the base ---------------------------------------------------------------

    @property
    def param_groups(self) -> list[Group]:
        """The base optimizer's parameter groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # a defaultdict of the base's own making
        """The base optimizer's state."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base optimizer's defaults and the method's."""
        return {**self.base.defaults, **self._own_defaults}

    def _with_defaults(self, group: Group) -> Group:
        options = {key: group.get(key, default) for key, default in self._own_defaults.items()}
        self._check_group({**group, **options})
        return options

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base, with the method's own options checked and defaulted."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {_check.show(param_group)}")
        params = param_group.get("params", [])
        # A generator can be gone through once, and options may be judged by the parameters.
        param_group = {**param_group, "params": params if isinstance(params, Tensor) else list(params)}
        options = self._with_defaults(param_group)
        before = len(self.param_groups)
        self.base.add_param_group({**param_group, **options})
        try:
            _check_members(self.model, self.param_groups[before:])
        except ValueError:
            del self.param_groups[before:]
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the base does."""
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The base's state, with the method's own under ``"flatmin"`` where it has any."""
        state = self.base.state_dict()
        own = self._method_state()
        if own:
            state["flatmin"] = own
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this wrapper or of a plain base optimizer."""
        before = [{key: group[key] for key in self._own_defaults} for group in self.param_groups]
        self.base.load_state_dict({key: value for key, value in state_dict.items() if key != "flatmin"})
        for group, options in zip(self.param_groups, before, strict=True):
            for key, value in options.items():
                group.setdefault(key, value)
        if "flatmin" in state_dict:
            self._load_method_state(state_dict["flatmin"])

    # A hook fires once for every update of the weights, whichever way in the loop uses.
    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Register a hook before every update of the weights."""
        return self.base.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Register a hook after every update of the weights."""
        return self.base.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the base."""
        return self.base.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the base."""
        return self.base.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the base."""
        return self.base.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook with the base."""
        return self.base.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler replaces ``step`` on the instance; a copy must not step the original.
        transient = {"_backup", "_running", "_transformed", "_closures_watched", "_window_start", "step"}
        return {key: value for key, value in self.__dict__.items() if key not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_transient()
        self.base._flatmin_wrapped = True  # type: ignore[attr-defined]
        self._watch_base()

    def __repr__(self) -> str:
        group = self.param_groups[0] if self.param_groups else {}
        options = ", ".join(f"{key}={group.get(key, value)!r}" for key, value in self._own_defaults.items())
        return f"{type(self).__name__}({options}, base={self.base!r})"


def _check_per_worker(base: Optimizer, model: nn.Module | None) -> None:
    """Raise unless each process can have a clean gradient of its own."""
    if any(is_sharded(parameter) for group in base.param_groups for parameter in group["params"]):
        raise ValueError(
            "sync must be 'global' for sharded parameters, got 'per_worker': FSDP2 gives no process a gradient "
            "of its own"
        )
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "sync='per_worker' needs model= the DistributedDataParallel module whose reduction it holds back"
        )
    if model.static_graph:
        raise ValueError(
            "sync must be 'global' with static_graph=True, got 'per_worker': DistributedDataParallel cannot hold back "
            "the reduction of its first iteration then"
        )


class _Stepped:
    """A hook of the base that tells its wrapper that a prepared step has been taken."""

    def __init__(self, step: Step) -> None:
        self._step = weakref.ref(step)

    def __call__(self, *_: Any) -> None:
        step = self._step()
        if step is not None:
            step._transformed = False


def _check_members(model: nn.Module | None, groups: list[Group]) -> None:
    """Raise unless ``model`` holds all parameters of ``groups``: what lies outside would be unprotected."""
    if model is None:
        return
    members = {id(parameter) for parameter in model.parameters()}
    outside = sum(id(parameter) not in members for group in groups for parameter in group["params"])
    if outside:
        raise ValueError(
            f"model must hold every parameter that base optimizes, {outside} are not in it: pass the model being "
            "trained, or torch.nn.ModuleList([model, ...]) where there are several"
        )


def _checked_loss(loss: Any) -> Any:
    if isinstance(loss, Tensor):
        if loss.ndim == 0:
            return loss
        raise TypeError(f"closure must return the loss as a number or a 0-dim tensor, got shape {tuple(loss.shape)}")
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        raise TypeError(f"closure must return the loss as a number or a 0-dim tensor, got {_check.show(loss)}")
    return loss
