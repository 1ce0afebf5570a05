"""Activation Decay against its closed form, then its bound, its bookkeeping, and its life with wrappers."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatmin._registry import methods
from flatmin.penalty import ActivationDecay
from tests.reference import penalties


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).to(dtype)


def data(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


# The formula


@pytest.mark.parametrize("sigma", [0.0, 0.1, 1.7])
def test_equals_the_closed_form(sigma: float) -> None:
    features, head = nn.Linear(4, 5, bias=False).double(), nn.Linear(5, 3).double()
    decay = ActivationDecay(head, sigma)
    x = data(7)
    z = features(x)
    head(z)
    penalty = decay.penalty()
    penalty.backward()
    assert penalty.shape == ()
    assert penalty.item() == pytest.approx(penalties.activation_decay([z.detach()], sigma), rel=1e-12)
    right = penalties.activation_decay_gradient(features.weight.detach(), x, sigma)
    torch.testing.assert_close(features.weight.grad, right, rtol=1e-12, atol=1e-12)
    assert head.weight.grad is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([(), (2,), (3, 2)]), st.floats(0, 3))
def test_several_forwards_and_leading_dimensions(rows: list[int], inner: tuple[int, ...], sigma: float) -> None:
    head = nn.Linear(5, 3).double()
    decay = ActivationDecay(head, sigma)
    inputs = [torch.randn(n, *inner, 5, dtype=torch.float64) for n in rows]
    for z in inputs:
        head(z)
    right = penalties.activation_decay(inputs, sigma)
    assert decay().item() == pytest.approx(right, rel=1e-12, abs=1e-300)


def test_one_sample_and_no_sample() -> None:
    head = nn.Linear(2, 3)
    decay = ActivationDecay(head, 1.0)
    head(torch.tensor([3.0, 4.0]))
    assert decay.penalty().item() == 12.5
    head(torch.empty(0, 2))
    assert decay.penalty().item() == 0.0


def test_sigma_zero_has_exactly_no_gradient_even_at_infinity() -> None:
    head = nn.Linear(2, 3)
    decay = ActivationDecay(head, 0.0)
    z = torch.tensor([[math.inf, 1e30]], requires_grad=True)
    head(z)
    penalty = decay.penalty()
    penalty.backward()
    assert penalty.item() == 0.0
    assert z.grad.tolist() == [[0.0, 0.0]]


def test_sigma_may_change_between_calls() -> None:
    head = nn.Linear(1, 1)
    decay = ActivationDecay(head, 1.0)
    head(torch.tensor([[2.0]]))
    decay.sigma = 2.0
    assert decay.penalty().item() == 8.0
    with pytest.raises(ValueError, match="sigma must be a finite number >= 0, got -1"):
        decay.sigma = -1.0
    assert decay.sigma == 2.0


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 60000.0)])
def test_low_precision_is_summed_in_fp32(dtype: torch.dtype, size: float) -> None:
    head = nn.Linear(1000, 2, dtype=dtype)
    decay = ActivationDecay(head, 1.0)
    z = torch.full((3, 1000), size, dtype=dtype)
    head(z)
    penalty = decay.penalty()
    assert penalty.dtype == torch.float32
    assert penalty.item() == pytest.approx(500 * float(z[0, 0]) ** 2, rel=1e-6)


def test_bounds_the_cross_entropy_under_weight_noise() -> None:
    torch.manual_seed(0)
    sigma, samples = 0.3, 40_000
    for label in range(3):
        weight, z = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
        noise = sigma * torch.randn(samples, 4, 5, dtype=torch.float64)
        noisy = penalties.smoothed_cross_entropy(z, weight, label, noise)
        clean = penalties.smoothed_cross_entropy(z, weight, label, torch.zeros(1, 4, 5, dtype=torch.float64))
        head = nn.Linear(5, 4, bias=False).double()
        decay = ActivationDecay(head, sigma)
        head(z[None])
        gap, error = float(noisy.mean() - clean), float(noisy.std()) / math.sqrt(samples)
        bound = decay.penalty().item()
        # The exact gap is (s^2/2)(1 - |p|^2) to second order, so the bound holds with room, and is not idle.
        assert gap < bound + 3 * error
        chance = torch.softmax(weight @ z, 0)
        assert gap == pytest.approx(bound * float(1 - chance @ chance), rel=0.15, abs=4 * error)


# What is kept, and for how long


def test_a_call_uses_the_activations_up() -> None:
    model = network()
    decay = ActivationDecay(model[2])
    model(data(3))
    decay.penalty()
    with pytest.raises(RuntimeError, match="run the model's forward pass first, with gradients enabled"):
        decay.penalty()


def test_nothing_is_kept_without_gradients() -> None:
    model = network()
    decay = ActivationDecay(model[2])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(data(3))
    with pytest.raises(RuntimeError, match="in evaluation leave the penalty out"):
        decay.penalty()


def test_activations_of_older_weights_are_dropped() -> None:
    model = network()
    decay = ActivationDecay(model[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data(3)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no activations"):
        decay.penalty()
    model(data(3)).sum().backward()
    optimizer.step()
    model(data(5, seed=2))
    left = decay.penalty().item()
    model(data(5, seed=2))
    assert left == decay.penalty().item()


def test_clear_forgets() -> None:
    model = network()
    decay = ActivationDecay(model[2])
    model(data(3))
    decay.clear()
    with pytest.raises(RuntimeError, match="no activations"):
        decay.penalty()


def test_uncollected_forwards_are_refused_in_time() -> None:
    model = network()
    decay = ActivationDecay(model[2])
    for _ in range(64):
        model(data(2))
    with pytest.raises(RuntimeError, match=r"64 forward passes are waiting for penalty\(\)"):
        model(data(2))
    decay.clear()
    model(data(2))


@pytest.mark.parametrize("whole", [True, False])
def test_recomputation_is_not_kept(whole: bool) -> None:
    model, plain = network(), network()
    decay, other = ActivationDecay(model[2], 0.7), ActivationDecay(plain[2], 0.7)
    x = data(6)
    if whole:
        out = checkpoint(model, x, use_reentrant=False)
    else:
        out = model[2](checkpoint(model[:2], x, use_reentrant=False))
    (out.sum() + decay.penalty()).backward()
    (plain(x).sum() + other.penalty()).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="no activations"):
        decay.penalty()


# The hook


def test_several_penalties_on_one_layer_are_independent() -> None:
    head = nn.Linear(1, 1)
    one, two = ActivationDecay(head, 1.0), ActivationDecay(head, 2.0)
    head(torch.tensor([[1.0]]))
    assert (one.penalty().item(), two.penalty().item()) == (0.5, 2.0)
    one.detach()
    head(torch.tensor([[1.0]]))
    assert two.penalty().item() == 2.0
    with pytest.raises(RuntimeError, match="was detached"):
        one.penalty()


def test_the_hook_goes_with_its_penalty() -> None:
    head = nn.Linear(1, 1)
    decay = ActivationDecay(head)
    assert len(head._forward_pre_hooks) == 1
    decay.detach()
    decay.detach()
    assert not head._forward_pre_hooks
    decay = ActivationDecay(head)
    del decay
    gc.collect()
    assert not head._forward_pre_hooks
    assert not head._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_of_the_model_feed_nothing(through: str) -> None:
    model = network()
    decay = ActivationDecay(model[2])
    twin = copy.deepcopy(model) if through == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(data(3)), model(data(3)))
    decay.penalty()
    twin(data(3))
    with pytest.raises(RuntimeError, match="no activations"):
        decay.penalty()


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_with_the_model_watch_the_copy(through: str) -> None:
    model = network()
    decay = ActivationDecay(model[2], 0.3)
    pair = (model, decay)
    twin, other = copy.deepcopy(pair) if through == "deepcopy" else pickle.loads(pickle.dumps(pair))
    twin(data(3))
    assert other.sigma == 0.3
    value = other.penalty().item()
    model(data(3))
    assert decay.penalty().item() == value
    decay.detach()
    with pytest.raises(RuntimeError, match="was detached"):
        copy.deepcopy(decay).penalty()


def test_the_input_may_come_by_keyword() -> None:
    head = nn.Linear(1, 1)
    decay = ActivationDecay(head, 1.0)
    head(input=torch.tensor([[2.0]]))
    assert decay.penalty().item() == 2.0


# Wrappers


def test_under_autocast() -> None:
    model = network(torch.float32)
    decay = ActivationDecay(model[2], 1.0)
    seen: list[Tensor] = []
    model[2].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        model(data(6).float())
        penalty = decay.penalty()
    assert (seen[0].dtype, penalty.dtype) == (torch.bfloat16, torch.float32)
    assert penalty.item() == pytest.approx(penalties.activation_decay([seen[0].detach()], 1.0), rel=1e-6)
    penalty.backward()


# Dynamo itself reads .grad of a non-leaf while it traces past a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_compile(backend: str) -> None:
    torch._dynamo.reset()
    model, plain = network(), network()
    decay, other = ActivationDecay(model[2], 0.7), ActivationDecay(plain[2], 0.7)
    compiled = torch.compile(model, backend=backend)
    pairs = ((model, compiled, decay), (plain, plain, other))
    for seed in range(3):
        for owner, call, penalty in pairs:
            owner.zero_grad()
            (call(data(6, seed)).sum() + penalty.penalty()).backward()
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-12, atol=1e-12)
        for owner, _, _ in pairs:
            torch.optim.SGD(owner.parameters(), lr=0.1).step()
    with torch.no_grad():
        compiled(data(6))
    with pytest.raises(RuntimeError, match="no activations"):
        decay.penalty()


def test_full_graph_compile_is_refused() -> None:
    torch._dynamo.reset()
    model = network()
    decay = ActivationDecay(model[2])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(data(2))
    decay.detach()


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = network()
    decay = ActivationDecay(model[2], 0.7)
    wrapped = nn.parallel.DistributedDataParallel(model)
    (wrapped(data(6)[3 * rank : 3 * rank + 3]).square().sum(-1).mean() + decay.penalty()).backward()
    torch.save(gradients(model), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_data_parallel_shards_equal_the_union(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    model = network()
    decay = ActivationDecay(model[2], 0.7)
    (model(data(6)).square().sum(-1).mean() + decay.penalty()).backward()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / str(rank)), gradients(model), rtol=1e-12, atol=1e-12)


# Arguments


def test_wrong_arguments() -> None:
    head = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"layer must be a torch.nn.Module, got str"):
        ActivationDecay("head")
    with pytest.raises(TypeError, match=r"features in its last dimension, got Conv2d, which takes them in its"):
        ActivationDecay(nn.Conv2d(1, 1, 1))
    for sigma in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="sigma must be a finite number >= 0"):
            ActivationDecay(head, sigma)
    for wrong in (True, "0.1", None):
        with pytest.raises(TypeError, match="sigma must be a number"):
            ActivationDecay(head, wrong)
    assert not head._forward_pre_hooks


def test_a_layer_with_other_inputs_is_refused_at_its_call() -> None:
    for layer, inputs in (
        (nn.Bilinear(1, 1, 1), (torch.ones(1, 1), torch.ones(1, 1))),
        (nn.Embedding(3, 2), (torch.tensor([1]),)),
    ):
        decay = ActivationDecay(layer)
        with pytest.raises(TypeError, match="layer must be called with one floating tensor"):
            layer(*inputs)
        decay.detach()


def test_shows_itself() -> None:
    assert repr(ActivationDecay(nn.Linear(1, 1), 0.25)) == "ActivationDecay(Linear, sigma=0.25)"


def test_is_registered() -> None:
    method = methods()["ad"]
    assert (method.place, method.gradients, method.copies) == ("penalty", 0.0, 0.0)
    assert dict(method.options) == {"sigma": 0.1}


def test_a_check_in_evaluation_mode_is_no_part_of_the_training_loss() -> None:
    head = torch.nn.Linear(2, 2)
    decay = ActivationDecay(head, 1.0)
    head.eval()
    head(torch.full((4, 2), 100.0))
    head.train()
    head(torch.ones(4, 2))
    assert decay().item() == 1.0
    head.eval()
    head(torch.full((4, 2), 2.0))
    assert decay().item() == 4.0  # trained in that mode
