"""The optimizer's layouts and arithmetic: split weights, AdamW beside torch's and float64, 8-bit states,
states on the host, and checkpoints that go on as any other kind.
"""

import math

import pytest
import torch
from torch import nn

from tests.conftest import make_policy
from whetstone.config import build, load
from whetstone.errors import UserError
from whetstone.model.reference import Reference, swap_
from whetstone.optimizer import Optimizer
from whetstone.optimizer.adamw import AdamWStep, TorchAdamW, merge_halves, split_halves
from whetstone.optimizer.compact import BUCKET, CompactAdamW, Piece, _fill, _whole
from whetstone.optimizer.quantization import (
    BLOCK,
    FIRST_MOMENT,
    SECOND_MOMENT,
    dequantize,
    noise,
    quantize,
    seed_of,
    table,
)
from whetstone.run.checkpoint import Checkpoint, CheckpointData, Saver

SHAPES = [(1,), (7, 33), (1025,), (61, 97), (3, 4, 5)]


def numbers(rate=1e-3, clip=1.0, weight_decay=0.1) -> AdamWStep:
    return AdamWStep(rate=rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=weight_decay, clip=clip)


def parameters(dtype=torch.bfloat16, shapes=SHAPES, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((0.02 * torch.randn(s, generator=generator)).to(dtype)) for s in shapes]


def heavy(shape, generator, scale=1e-4) -> torch.Tensor:
    """Gradients with tails: normal numbers divided by uniform ones."""
    return scale * torch.randn(shape, generator=generator) / (0.05 + torch.rand(shape, generator=generator))


def masters(adam) -> list[torch.Tensor]:
    return [adam.export(index)["master"].clone() for index in range(len(SHAPES))]


# Split weights


def rounding(weight: torch.Tensor, first: int, *, stochastic: bool):
    piece = Piece(index=0, begin=0, end=len(weight), is_split=True, is_coded=False, is_stochastic=stochastic)
    return piece.state(torch.zeros(piece.size, dtype=torch.uint8)).rounding(weight, first)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_upper_and_lower_half_are_the_float32_number_bit_for_bit(stochastic: bool):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    ends = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x00018000, 0x7F7FFFFF, 0x7F800000, -1, -0x80000000, 0x7FFFFFFF]
    bits = torch.cat([bits, torch.tensor(ends, dtype=torch.int32)])
    whole = bits.view(torch.float32)
    weight, low = torch.empty(len(whole), dtype=torch.bfloat16), torch.empty(len(whole), dtype=torch.int16)
    added = rounding(weight, 77, stochastic=stochastic)
    split_halves(whole, weight, low, added)
    numbers_only = ~whole.isnan()
    again = merge_halves(weight, low, added)
    assert torch.equal(again[numbers_only].view(torch.int32), bits[numbers_only])
    assert weight[~numbers_only].isnan().all() and again[~numbers_only].isnan().all()
    if stochastic:
        # The upper half alone is at most a step off, and the number itself where bf16 has it.
        upper = weight.view(torch.int16).int() << 16
        assert ((upper - bits).abs()[numbers_only] <= 0xFFFF).all()
        exact = numbers_only & (bits & 0xFFFF == 0)
        assert exact.sum() >= 2 and torch.equal(upper[exact], bits[exact])
        assert torch.equal(merge_halves(weight, torch.zeros_like(low), added)[exact], whole[exact])
    else:
        # The upper half alone is the number rounded; where two are as near, the one away from zero.
        is_tie = (bits & 0xFFFF) == 0x8000
        assert torch.equal(weight[numbers_only & ~is_tie], whole[numbers_only & ~is_tie].bfloat16())
        assert is_tie.sum() >= 2


def test_stochastic_rounding_is_unbiased_and_changes_once():
    """A weight on bf16's grid that moves by 1/128 of a step, 128 times."""
    weight, low = torch.ones(100_000, dtype=torch.bfloat16), torch.zeros(100_000, dtype=torch.int16)
    added = rounding(weight, 0, stochastic=True)
    step = torch.finfo(torch.bfloat16).eps
    changes = torch.zeros(len(weight))
    for number in range(1, 129):
        before = weight.clone()
        split_halves(merge_halves(weight, low, added) + step / 128, weight, low, added)
        changes += weight != before
        moved = (weight.double().mean().item() - 1) / step
        assert moved == pytest.approx(number / 128, abs=0.007)  # 4 deviations
    assert (changes == 1).all()


@pytest.mark.parametrize(("name", "least"), [("nearest", 0.0), ("stochastic", 0.9)])
def test_small_steps_show_under_stochastic_rounding(name: str, least: float):
    """Three steps at 1e-6, below half a step of bf16 for most weights of 0.02."""
    weights = parameters(torch.bfloat16, [(500, 400), (3, 70_000)])
    start = [weight.detach().float() for weight in weights]
    update = build({"learning_rate": 1e-6, "lr_scheduler_type": "constant", "bf16_rounding": name}).update
    optimizer = Optimizer(weights, update, num_steps=10, warmup_steps=0)
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(weight.shape, generator=generator).bfloat16() for weight in weights]
    for _ in range(3):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = None
            (weight * gradient).sum().backward()
        optimizer.step(1.0)
    exact = [optimizer.adam.export(index)["master"] - start[index] for index in range(len(weights))]
    found = [weight.detach().float() - before for weight, before in zip(weights, start, strict=True)]
    kept = sum((f * e).sum() for f, e in zip(found, exact, strict=True)) / sum(
        e.square().sum() for e in exact
    )
    assert least <= kept < least + 0.2


# AdamW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_twenty_steps_equal_those_of_torch_on_float32(dtype):
    weights = parameters(dtype)
    theirs = [nn.Parameter(weight.detach().float().clone()) for weight in weights]
    matrices, vectors = ([p for p in theirs if (p.dim() > 1) is decays] for decays in (True, False))
    adam = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], weight_decay=0.1
    )
    ours = CompactAdamW(weights, coded=False, offload=False)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        gradients = [heavy(weight.shape, generator) for weight in weights]
        for other, gradient in zip(theirs, gradients, strict=True):
            other.grad = gradient * 0.5
        for group in adam.param_groups:
            group["lr"] = 1e-3 / (1 + step)
        adam.step()
        ours.step(gradients, numbers(rate=1e-3 / (1 + step), clip=0.5))
    for index, (weight, other) in enumerate(zip(weights, theirs, strict=True)):
        found, state = ours.export(index), adam.state[other]
        scale = other.detach().abs().max()
        assert ((found["master"] - other.detach()).abs() / scale).max() < 1e-6
        assert torch.allclose(found["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-6)
        assert torch.allclose(found["exp_avg"], state["exp_avg"], rtol=1e-5, atol=1e-9)
        assert found["step"] == state["step"] == 20
        assert torch.equal(weight.detach(), found["master"].to(dtype)) or dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [TorchAdamW, CompactAdamW])
def test_weight_decay_acts_on_what_transformers_decays(kind):
    """Not on norms and biases: parameters, gradients of 0, beside the groups of its Trainer."""
    import transformers

    model = make_policy("qwen2").model  # with biases
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    weights = dict(model.named_parameters())
    assert {"bias", "norm"} <= {word for name in weights.keys() - set(decayed) for word in name.split(".")}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    settings = {} if kind is TorchAdamW else {"coded": False, "offload": False}
    adam = kind(list(weights.values()), **settings)
    adam.step([torch.zeros_like(weight) for weight in weights.values()], numbers(rate=0.1, weight_decay=0.5))
    for name, weight in weights.items():
        factor = 1 - 0.1 * 0.5 if name in decayed else 1.0
        assert torch.allclose(weight, factor * before[name], rtol=1e-6), name


def test_updates_of_a_millionth_are_not_lost_beside_float64():
    """Weights near 0.02 are 1.2e-4 apart in bf16; a hundred steps of 1e-6 go where float64 goes."""
    (weight,) = parameters(shapes=[(2000,)])
    start = weight.detach().double()
    ours = CompactAdamW([weight], coded=False, offload=False)
    exact, mean, square = start.clone(), torch.zeros(2000).double(), torch.zeros(2000).double()
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 101):
        gradient = heavy((2000,), generator) + 2e-4
        ours.step([gradient], numbers(rate=1e-6, weight_decay=0.0))
        g = gradient.double()
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        corrected = (square / (1 - 0.999**step)).sqrt() + 1e-8
        exact -= 1e-6 * (mean / (1 - 0.9**step)) / corrected
    way, own = exact - start, ours.export(0)["master"].double() - start
    assert way.abs().median() > 1e-5
    assert (own - way).norm() / way.norm() < 1e-3
    assert (weight.detach().double() - start).norm() / way.norm() > 0.5  # some bf16 weights have moved


def test_a_parameter_without_a_gradient_stays_and_its_step_too():
    weights = parameters()
    before = weights[1].detach().clone()
    ours = CompactAdamW(weights, coded=False, offload=False)
    gradients: list[torch.Tensor | None] = [torch.ones_like(weight) for weight in weights]
    gradients[1] = None
    ours.step(gradients, numbers())
    assert torch.equal(weights[1].detach(), before) and ours.steps == [1, 0, 1, 1, 1]


def test_weights_with_other_strides_are_moved_all_the_same():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 30, generator=generator).bfloat16().t())
    straight = nn.Parameter(weight.detach().contiguous())
    gradient = torch.randn(30, 40, generator=generator)
    for one in (weight, straight):
        CompactAdamW([one], coded=False, offload=False).step([gradient], numbers())
    assert torch.equal(weight, straight) and not weight.is_contiguous()


# Gradients


def test_gradients_of_micro_batches_are_summed_in_float32():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], build({}).update, num_steps=1, warmup_steps=0)
    parts = torch.tensor([[256.0, 1.0, 3.0], [1.0, 1.0, 2**-9], [1.0, 0.0, 0.0]])  # bf16 can't hold 257
    for count, part in enumerate(parts, 1):
        (weight * part.bfloat16()).sum().backward()
        (gradient,) = optimizer.gradients()
        assert gradient is not None and weight.grad is None
        assert gradient.dtype == (torch.bfloat16 if count == 1 else torch.float32)
        assert torch.equal(gradient.float(), parts[:count].sum(0))
        assert optimizer.gradient_norm() == pytest.approx(parts[:count].sum(0).norm().item(), rel=1e-6)


def test_gradients_are_summed_in_reserved_accumulators(monkeypatch):
    monkeypatch.setattr("whetstone.optimizer.BLOCK_NUMEL", 70)
    config = build({"max_steps": 4}).update
    ways = []
    for expected in (1, 3):
        weights = parameters()
        optimizer = Optimizer(weights, config, num_steps=4, warmup_steps=0)
        optimizer.reserve_accumulators(expected)
        blocks = {id(g.untyped_storage()) for g in optimizer._accumulators.values()}
        for scale in (0.3, 7.0, -2.1):
            torch.stack([(scale * w.float() ** 2).sum() for w in weights]).sum().backward()
        ways.append([g.clone() for g in optimizer.gradients() if g is not None])
        if expected > 1:
            assert optimizer._accumulators and len(blocks) > 1
            assert all(g is optimizer._accumulators[n] for n, g in enumerate(optimizer.gradients()))
        optimizer.finish()
        assert not optimizer._accumulators
    assert all(torch.equal(*pair) and pair[0].dtype == torch.float32 for pair in zip(*ways, strict=True))


# 8 bits


@pytest.mark.parametrize("kind", [FIRST_MOMENT, SECOND_MOMENT])
@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38, 1e-30, 1e-24, 1e-12, 1.0, 1e30])
def test_what_was_codes_once_comes_back_as_the_same_codes(kind, scale):
    generator = torch.Generator().manual_seed(3)
    for length in (1, 255, 256, 4099):
        values = torch.randn(length, generator=generator) * 10 ** -(
            6 * torch.rand(length, generator=generator)
        )
        values = (values if kind.is_signed else values.abs()) * scale
        chance = noise(0, length, 77, values) & 0xFFFF
        codes, scales = quantize(kind, values, chance)
        assert len(scales) == math.ceil(length / BLOCK)
        back = dequantize(kind, codes, scales)
        codes_again, scales_again = quantize(kind, back)
        assert torch.equal(codes, codes_again)
        assert torch.equal(back, dequantize(kind, codes_again, scales_again))


def test_codes_are_near_and_a_square_never_becomes_nothing():
    generator = torch.Generator().manual_seed(0)
    values = 10 ** (-12 * torch.rand(256 * 40, generator=generator))
    codes, scales = quantize(SECOND_MOMENT, values)
    back, relative = dequantize(SECOND_MOMENT, codes, scales), values / scales.repeat_interleave(BLOCK)
    assert (back > 0).all() and (back >= values * (1 - 0.048)).all()  # the tiniest are rounded up
    assert ((back / values - 1).abs()[relative > 1e-10] < 0.048).all()
    signed = torch.where(torch.rand(len(values), generator=generator) < 0.5, -values, values)
    codes, scales = quantize(FIRST_MOMENT, signed)
    back = dequantize(FIRST_MOMENT, codes, scales)
    assert ((back / signed - 1).abs()[relative > 1e-4] < 0.038).all()
    assert (codes[relative < 4e-5] == 0).all() and codes.min() >= -127


def test_rounding_at_random_is_right_on_the_mean():
    """The reason for it: 0.999 of a square, again and again, must decay."""
    value = torch.tensor([1.0, 0.0123]).repeat(128)
    drawn = [
        dequantize(
            SECOND_MOMENT, *quantize(SECOND_MOMENT, value, noise(0, 256, seed_of(seed, 0), value) >> 16)
        )
        for seed in range(500)
    ]
    mean = torch.stack(drawn)[:, 1::2].mean()
    assert mean.item() == pytest.approx(0.0123, rel=1e-3)
    nearest = dequantize(SECOND_MOMENT, *quantize(SECOND_MOMENT, value))[1]
    assert abs(nearest.item() / 0.0123 - 1) > 0.005
    assert (
        table(SECOND_MOMENT, torch.device("cpu"))[255] == table(FIRST_MOMENT, torch.device("cpu"))[127] == 1
    )


def test_steps_with_8_bits_follow_those_of_float32():
    """300 steps on gradients with heavy tails, of sizes that differ by decades within a block and change by a
    factor of 3 half way.
    """
    generator = torch.Generator().manual_seed(0)
    count = 64 * BLOCK
    sizes = 1e-5 * torch.exp(torch.randn(count, generator=generator))
    mean = 0.3 * torch.randn(count, generator=generator) * sizes
    ours, exact = (nn.Parameter(torch.zeros(count)) for _ in range(2))
    coded, plain = CompactAdamW([ours], coded=True, offload=False), TorchAdamW([exact])
    worst, ways = 0.0, []
    for step in range(300):
        gradient = (mean + heavy(count, generator, 1.0) * sizes) * (1.0 if step < 150 else 0.3)
        before = torch.stack([ours.detach().clone(), exact.detach().clone()])
        for adam in (coded, plain):
            adam.step([gradient.clone()], numbers(rate=1.0, weight_decay=0.0))
        one, other = torch.stack([ours.detach(), exact.detach()]) - before
        worst = max(worst, (one - other).abs().max().item())
        ways.append(((one - other).norm() / other.norm()).item())
    way, own = exact.detach(), ours.detach()
    apart, length = ((own - way).norm() / way.norm()).item(), (own @ way / (way @ way)).item()
    print(f"steps differ by at most {max(ways):.3f}, those of one weight by {worst:.2f} rates; "
          f"the whole way by {apart:.3f}, its length by {length - 1:+.3f}")  # fmt: skip
    assert max(ways) < 0.15 and worst < 1.0
    assert apart < 0.1 and length == pytest.approx(1, abs=0.02)


def test_second_moment_decays_by_a_thousandth():
    """Rounded to the nearest code it would stay: half of the weights get no gradient any more, the others go
    on.
    """
    weight = nn.Parameter(torch.zeros(16 * BLOCK))
    coded = CompactAdamW([weight], coded=True, offload=False)
    gradient = torch.full((len(weight),), 1e-3)
    coded.step([gradient], numbers())
    first = coded.export(0)["exp_avg_sq"]
    gradient[::2] = 0
    for _ in range(500):
        coded.step([gradient], numbers())
    now = coded.export(0)["exp_avg_sq"]
    assert (now / first)[::2].mean().item() == pytest.approx(0.999**500, rel=0.02)
    assert now[1::2].mean().item() == pytest.approx(1e-6 * (1 - 0.999**501), rel=0.02)


def train_regression(optim: str, steps: int = 200) -> tuple[float, torch.Tensor]:
    """A small network that learns a function from batches of examples: its loss, and what it says."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1))
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    room = build({"learning_rate": 3e-3, "lr_scheduler_type": "linear", "optim": optim}).update
    optimizer = Optimizer(list(network.parameters()), room, num_steps=steps, warmup_steps=0)
    for step in range(steps):
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        (network(inputs) - teacher(inputs).detach()).square().mean().backward()
        optimizer.step(optimizer.gradient_norm())
        optimizer.finish()
    inputs = torch.randn(2000, 16, generator=torch.Generator().manual_seed(10**6))
    with torch.no_grad():
        said = network(inputs)
        return (said - teacher(inputs)).square().mean().item() / teacher(inputs).var().item(), said


def test_a_network_learns_with_8_bits_as_with_float32():
    (exact, said), (coded, said_coded) = (train_regression(name) for name in ("adamw_torch", "adamw_8bit"))
    apart = ((said - said_coded).square().mean() / said.var()).item()
    print(f"unexplained: {exact:.5f} with float32, {coded:.5f} with 8 bits; between the two {apart:.1e}")
    assert exact < 0.03 and coded == pytest.approx(exact, rel=0.1)
    assert 1e-7 < apart < 0.1 * exact


# The host's memory


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_that_go_through_the_device_give_the_same_bits(coded, dtype):
    shapes = [(1,), (100, 60), (33,), (5000,), (64, 80)]
    one, other = parameters(dtype, shapes), parameters(dtype, shapes)
    here = CompactAdamW(one, coded=coded, offload=False)
    away = CompactAdamW(other, coded=coded, offload=True, bucket_size=16 * 1024)
    assert len(away._buckets) >= 3
    assert away._offload is not None
    assert len(away._offload._buffers[0]) <= 16 * 1024
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradients = [heavy(weight.shape, generator) for weight in one]
        for adam in (here, away):
            adam.step(gradients, numbers())
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b)
        found, expected = away.export(index), here.export(index)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("coded, per_value", [(False, 10), (True, 4 + 8 / BLOCK)])
def test_buckets_are_full_and_pieces_cover_every_value_once(coded, per_value):
    sizes = [10_000_000, 1536, 7, 4096, 30_000_001, 2048]
    pieces = [
        _whole(n, torch.empty(size, dtype=torch.bfloat16, device="meta"), coded)
        for n, size in enumerate(sizes)
    ]
    buckets = list(_fill(pieces, BUCKET))
    assert all(0.99 * BUCKET < bucket.size <= BUCKET for bucket in buckets[:-1])
    for index, size in enumerate(sizes):
        parts = [(p.begin, p.end) for bucket in buckets for p in bucket.pieces if p.index == index]
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])] and parts[-1][1] == size
        assert all(begin % BLOCK == 0 for begin, _ in parts)
    assert sum(bucket.size for bucket in buckets) == pytest.approx(sum(sizes) * per_value, rel=2e-3)


# Checkpoints

KINDS = {
    "float32": (torch.float32, {"coded": False, "offload": False}),
    "split": (torch.bfloat16, {"coded": False, "offload": False}),
    "split, stochastic": (torch.bfloat16, {"coded": False, "offload": False, "stochastic": True}),
    "split, stochastic, host": (
        torch.bfloat16,
        {"coded": False, "offload": True, "stochastic": True, "bucket_size": 12 * 1024},
    ),
    "split, host": (torch.bfloat16, {"coded": False, "offload": True, "bucket_size": 12 * 1024}),
    "8 bits": (torch.bfloat16, {"coded": True, "offload": False}),
    "8 bits, host": (torch.float32, {"coded": True, "offload": True, "bucket_size": 12 * 1024}),
}
PLACES = ["exp_avg", "exp_avg_sq", "master"]


def make(kind: str):
    if kind == "torch's own":
        weights = parameters(torch.float32)
        return weights, TorchAdamW(weights)
    dtype, settings = KINDS[kind]
    weights = parameters(dtype)
    return weights, CompactAdamW(weights, **settings)


def go(weights, adam, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        adam.step([heavy(weight.shape, generator) for weight in weights], numbers())


@pytest.mark.parametrize("to", [*KINDS, "torch's own"])
@pytest.mark.parametrize("start", KINDS)
def test_states_of_one_kind_go_on_as_any_other(start, to):
    weights, adam = make(start)
    go(weights, adam, 0, 3)
    others, other = make(to)
    go(others, other, 7, 9)  # something else, which must leave no trace
    exported = [{name: value.clone() for name, value in adam.export(i).items()} for i in range(len(SHAPES))]
    for index, state in enumerate(exported):
        other.load(index, state)
    for before, after in zip(masters(adam), masters(other), strict=True):
        assert torch.equal(before, after)
    rounds = "8" in to and "8" not in start
    for index, state in enumerate(exported):
        again = other.export(index)
        for name in ("exp_avg", "exp_avg_sq"):
            close = torch.allclose(
                state[name], again[name], rtol=0.05, atol=1e-4 * state[name].abs().max().item()
            )
            assert close if rounds else torch.equal(state[name], again[name])
    go(weights, adam, 3, 6)
    go(others, other, 3, 6)
    for before, after in zip(masters(adam), masters(other), strict=True):
        if ("8" in start) == ("8" in to):  # bit for bit, but for the order of torch's own arithmetic
            assert (
                torch.allclose(before, after, atol=1e-8)
                if to == "torch's own"
                else torch.equal(before, after)
            )
        else:
            assert (before - after).abs().max() < 5e-4  # of 3 steps of 1e-3


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_a_checkpoint_on_the_disk_goes_on_bit_for_bit(tmp_path, optim, rounding):
    def optimiser_of(weights):
        settings = {"optim": optim, "bf16_rounding": rounding, "weight_decay": 0.1}
        room = build({"learning_rate": 1e-3, **settings}).update
        return Optimizer(weights, room, num_steps=8, warmup_steps=2)

    def steps(weights, optimizer, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for weight in weights:
                (weight * heavy(weight.shape, generator).to(weight.dtype)).sum().backward()
            optimizer.step(optimizer.gradient_norm())
            optimizer.finish()

    weights = [*parameters(), *parameters(torch.float32)]
    optimizer = optimiser_of(weights)
    steps(weights, optimizer, 0, 4)
    saver = Saver(tmp_path, None)
    saver.save(
        CheckpointData(
            step=4,
            write_model=lambda folder: None,
            tensors={"o": optimizer.state_tensors()},
            scalars=optimizer.state_scalars(),
        )
    )
    steps(weights, optimizer, 4, 8)  # while it is being written
    saver.finish()
    others = [*parameters(seed=5), *parameters(torch.float32, seed=5)]
    resumed = optimiser_of(others)
    found = Checkpoint(folder=tmp_path / "checkpoint-4", step=4)
    into = {"o": resumed.state_tensors()}
    found.load_tensors(into)
    resumed.load_state_tensors(into["o"])
    resumed.load_state_scalars(found.scalars())
    steps(others, resumed, 4, 8)
    for one, other in zip(weights, others, strict=True):
        assert torch.equal(one, other)
    for index, state in optimizer.state_tensors().items():
        assert all(torch.equal(state[name], value) for name, value in resumed.state_tensors()[index].items())


# The reference


def test_exchange_in_pieces_is_restored_bitwise(monkeypatch):
    monkeypatch.setattr("whetstone.model.reference.CHUNK", 100)
    torch.manual_seed(0)
    one, other = torch.randn(30, 11).bfloat16(), torch.randn(30, 11).bfloat16()
    wide = torch.randn(30, 22).bfloat16()
    for here in (one, wide[:, ::2], torch.tensor(3.0), torch.empty(0, 4)):
        there = other if here.dim() == 2 and len(here) else torch.zeros_like(here)
        before = here.clone(), there.clone()
        swap_(here, there)
        assert torch.equal(here, before[1]) and torch.equal(there, before[0])
        swap_(here, there)
        assert torch.equal(here, before[0]) and torch.equal(there, before[1])


def test_offloaded_reference_swaps_with_the_policy_and_back(policy):
    """`exchange` is what `active` does where the reference is on another device; both see the same here."""
    reference = Reference.from_policy(policy, policy, moving=True, offload=True)
    assert reference.weights is not None
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    now = [parameter.detach().clone() for parameter in policy.parameters()]
    first = [weight.clone() for weight in reference.weights]
    places = [parameter.data_ptr() for parameter in policy.parameters()]
    with reference.swapped_in():
        assert all(torch.equal(p, w) for p, w in zip(policy.parameters(), first, strict=True))
    for parameter, weight in zip(policy.parameters(), reference.weights, strict=True):
        swap_(parameter.detach(), weight)
    assert all(torch.equal(p, w) for p, w in zip(policy.parameters(), first, strict=True))
    for parameter, weight in zip(policy.parameters(), reference.weights, strict=True):
        swap_(parameter.detach(), weight)
    assert all(torch.equal(p, w) for p, w in zip(policy.parameters(), now, strict=True))
    assert places == [parameter.data_ptr() for parameter in policy.parameters()]
    reference.ema_update(0.25, seed=1)
    for weight, old, new in zip(reference.weights, first, now, strict=True):
        assert torch.equal(weight, old.lerp(new, 0.25))


# Configuration


@pytest.mark.parametrize(
    "name, ours",
    [
        ("adamw_torch_fused", "adamw_torch"),
        ("adamw_hf", "adamw_torch"),
        ("adamw", "adamw_torch"),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("paged_adamw_8bit", "adamw_8bit"),
    ],
)
def test_names_of_other_trainers_are_understood_and_said(name, ours):
    loaded = load(None, [f"optim={name}"])
    assert loaded.config.update.optim == ours
    (note,) = loaded.notes
    assert note.startswith(f"optim: {name} (command line) is taken for optim: {ours}.")
    assert ("cpu_offload: optimizer" in note) == ("paged" in name)


def test_an_unknown_optimiser_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"^optim: .*'adamw_torch'.*'adamw_8bit'.*'lion_8bit'"):
        load(None, ["optim=lion_8bit"])


def test_float32_weights_on_a_cpu_stay_with_torchs_own():
    weights, settings = parameters(torch.float32), {"num_steps": 1, "warmup_steps": 0, "offload": True}
    assert isinstance(Optimizer(weights, build({}).update, **settings).adam, TorchAdamW)
    coded = Optimizer(weights, build({"optim": "adamw_8bit"}).update, **settings).adam
    assert isinstance(coded, CompactAdamW) and coded._offload is None
