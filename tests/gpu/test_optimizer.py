"""The optimizer on a real GPU: the fused pass beside plain torch, states on the host beside states on the
device bit for bit, the memory that each takes, and how long a step of 1.5 B parameters lasts.

python -m pytest -m gpu -s tests/gpu/test_optimizer.py
"""

import time

import pytest
import torch
from torch import nn

from tests.conftest import make_policy
from whetstone.config import build
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.optimizer import Optimizer, adamw, compact
from whetstone.optimizer.adamw import AdamWStep
from whetstone.optimizer.compact import CompactAdamW
from whetstone.run.checkpoint import Checkpoint, CheckpointData, Saver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda")
SHAPES = [(1,), (1536,), (301, 1024), (5000,), (64, 80), (2**20 + 3,)]
CHOICES = {
    "adamw_torch": {"coded": False, "offload": False},
    "adamw_8bit": {"coded": True, "offload": False},
    "adamw_torch, on the host": {"coded": False, "offload": True},
    "adamw_8bit, on the host": {"coded": True, "offload": True},
}


def numbers(rate=1e-4) -> AdamWStep:
    return AdamWStep(rate=rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1, clip=0.7)


def parameters(dtype=torch.bfloat16, shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((0.02 * torch.randn(s, generator=generator)).to(CUDA, dtype)) for s in shapes]


def steps(weights, ours: CompactAdamW, first: int = 0, last: int = 20, dtype=torch.float32) -> None:
    for step in range(first, last):
        generator = torch.Generator(CUDA).manual_seed(step)
        gradients = []
        for weight in weights:
            noise = torch.randn(weight.shape, generator=generator, device=CUDA)
            noise /= 0.05 + torch.rand(weight.shape, generator=generator, device=CUDA)
            gradients.append((1e-4 * noise).to(dtype))
        ours.step(gradients, numbers())


def plain(weights, monkeypatch, **settings) -> CompactAdamW:
    with monkeypatch.context() as patch:
        patch.setattr(compact, "pick_kernel", lambda device: adamw.adamw_steps)
        return CompactAdamW(weights, **settings)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_pass_equals_plain_torch(monkeypatch, dtype, gradients):
    one, other = parameters(dtype), parameters(dtype)
    fused, exact = (
        CompactAdamW(one, coded=False, offload=False),
        plain(other, monkeypatch, coded=False, offload=False),
    )
    assert fused._adamw_steps is not exact._adamw_steps
    for weights, ours in ((one, fused), (other, exact)):
        steps(weights, ours, dtype=gradients)
    for index in range(len(SHAPES)):
        found, expected = fused.export(index), exact.export(index)
        scale = expected["master"].abs().max()
        assert ((found["master"] - expected["master"]).abs() / scale).max() < 1e-6
        assert torch.allclose(found["exp_avg_sq"], expected["exp_avg_sq"], rtol=1e-5)
        error = (found["exp_avg"] - expected["exp_avg"]).abs() / expected["exp_avg_sq"].sqrt()
        assert error.max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_of_the_fused_pass_are_those_of_plain_torch(monkeypatch, dtype):
    """After one step; later ones may differ where a rounding decided otherwise."""
    one, other = parameters(dtype), parameters(dtype)
    fused, exact = (
        CompactAdamW(one, coded=True, offload=False),
        plain(other, monkeypatch, coded=True, offload=False),
    )
    steps(one, fused, 0, 1)
    steps(other, exact, 0, 1)
    for bucket, expected in zip(fused._buckets, exact._buckets, strict=True):
        piece = bucket.pieces[0]
        mine, its = piece.state(bucket.memory), piece.state(expected.memory)
        if piece.is_coded:
            assert (mine.mean != its.mean).float().mean() < 1e-3
            assert (mine.square != its.square).float().mean() < 1e-3
    steps(one, fused, 1, 20)
    steps(other, exact, 1, 20)
    for index in range(len(SHAPES)):
        a, b = fused.export(index)["master"], exact.export(index)["master"]
        assert (a - b).abs().max() < 4e-4 and (a - b).abs().mean() < 2e-6  # of 20 steps of 1e-4


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_states_equal_device_states_bitwise(coded, dtype):
    one, other = parameters(dtype), parameters(dtype)
    here = CompactAdamW(one, coded=coded, offload=False)
    away = CompactAdamW(other, coded=coded, offload=True, bucket_size=2**20)
    assert len(away._buckets) > 2 and all(bucket.memory.is_pinned() for bucket in away._buckets)
    for weights, ours in ((one, here), (other, away)):
        steps(weights, ours)
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b)
        found, expected = away.export(index), here.export(index)
        for name, value in expected.items():
            assert torch.equal(found[name].cpu(), value.cpu()), name


@pytest.mark.parametrize("start", CHOICES)
@pytest.mark.parametrize("to", CHOICES)
def test_a_checkpoint_goes_on_as_any_other_choice(tmp_path, start, to):
    weights = parameters()
    ours = CompactAdamW(weights, **CHOICES[start])
    steps(weights, ours, 0, 5)
    saver = Saver(tmp_path, None)
    tensors = {str(index): ours.export(index) for index in range(len(SHAPES))}
    saver.save(CheckpointData(step=5, write_model=lambda folder: None, tensors=tensors, scalars={}))
    steps(weights, ours, 5, 10)
    saver.finish()
    others = parameters()
    other = CompactAdamW(others, **CHOICES[to])
    into = {str(index): other.export(index) for index in range(len(SHAPES))}
    Checkpoint(folder=tmp_path / "checkpoint-5", step=5).load_tensors(into)
    for index in range(len(SHAPES)):
        other.load(index, into[str(index)])
    steps(others, other, 5, 10)
    for index in range(len(SHAPES)):
        a, b = ours.export(index)["master"], other.export(index)["master"]
        if ("8" in start) == ("8" in to):
            assert torch.equal(a.cpu(), b.cpu())
        else:
            assert (a.cpu() - b.cpu()).abs().max() < 4e-4


def test_the_norm_of_mixed_gradients_is_that_of_float64():
    weights = [*parameters(), *parameters(torch.float32)]
    optimizer = Optimizer(weights, build({}).update, num_steps=1, warmup_steps=0)
    total = 0.0
    for index, weight in enumerate(weights):
        gradient = torch.randn_like(weight)
        total += gradient.double().square().sum().item()
        (weight * gradient).sum().backward()
        assert (weight.grad is None) == (index < len(SHAPES))
    assert optimizer.gradient_norm() == pytest.approx(total**0.5, rel=1e-5)


def test_device_holds_two_buckets_of_an_offloaded_state():
    weights = parameters(shapes=[(200, 2**20)])  # 2.1 GB of float32 states and lower halves
    gradient = torch.full_like(weights[0], 1e-4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours = CompactAdamW(weights, coded=False, offload=True)
    for _ in range(3):
        ours.step([gradient], numbers())
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{taken / 2**20:.0f} MiB on the device for {200 * 2**20 * 10 / 2**20:,.0f} MiB of states")
    assert taken <= 2 * compact.BUCKET + 2**20
    assert ours.export(0)["step"] == 3


def test_offloaded_reference_has_logprobs_of_device_reference():
    made = make_policy("llama", head_dim=32, hidden_size=128)
    policy = Policy(made.model.to(CUDA, torch.bfloat16), made.tokenizer, CUDA)
    here = Reference.from_policy(policy, policy, moving=True)
    away = Reference.from_policy(policy, policy, moving=True, offload=True)
    assert away.weights is not None and all(weight.is_pinned() for weight in away.weights)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    now = [parameter.detach().clone() for parameter in policy.parameters()]
    ids = torch.randint(3, 97, (1, 20), device=CUDA)
    said = []
    for reference in (here, away):
        with reference.swapped_in(), torch.no_grad():
            policy.set_attention("eager")
            said.append(policy.lm(input_ids=ids, use_cache=False).logits)
        assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), now, strict=True))
        reference.ema_update(0.25, seed=1)
    assert torch.equal(*said)
    assert here.weights is not None
    assert all(torch.equal(a.cpu(), b) for a, b in zip(here.weights, away.weights, strict=True))


def test_seconds_of_a_step_at_one_and_a_half_billion():
    """Printed, not judged. The shapes of Qwen2.5-1.5B."""
    layer = [(1536, 1536), (256, 1536), (256, 1536), (1536, 1536), (8960, 1536), (8960, 1536), (1536, 8960),
             (1536,), (1536,), (1536,), (256,), (256,)]  # fmt: skip
    shapes = [(151936, 1536), *layer * 28, (1536,)]
    count = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"\n{count / 1e9:.2f} B parameters")
    for name, settings in CHOICES.items():
        weights = [
            nn.Parameter(torch.full(shape, 0.02, dtype=torch.bfloat16, device=CUDA)) for shape in shapes
        ]
        gradients = [torch.full_like(weight, 1e-4, dtype=torch.float32) for weight in weights]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ours = CompactAdamW(weights, **settings)
        seconds = []
        for _ in range(6):
            torch.cuda.synchronize()
            begun = time.monotonic()
            ours.step(gradients, numbers(1e-6))
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - begun)
        taken = (torch.cuda.max_memory_allocated() - before) / count
        print(f"{name:26s} {1000 * min(seconds[1:]):7.1f} ms a step, {taken:5.2f} bytes a parameter there")
        del ours, weights, gradients
        torch.cuda.empty_cache()
    weights = [nn.Parameter(torch.full(shape, 0.02, device=CUDA)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-4)
    theirs = torch.optim.AdamW(weights, lr=1e-6, fused=True)
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.monotonic()
        theirs.step()
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun
    print(f"torch's fused AdamW on float32 weights {1000 * seconds:7.1f} ms a step")
