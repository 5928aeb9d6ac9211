"""Run by tests/support/kernels.py in a process of its own with Triton's interpreter: the fused AdamW
pass, on the CPU, beside the same arithmetic in plain torch.
"""

import torch

from tests.support import triton_interpreter as interpreter  # noqa: F401
from whetstone.optimizer import adamw, kernels
from whetstone.optimizer.adamw import AdamWStep, merge_halves
from whetstone.optimizer.compact import Piece


def both(
    count: int,
    *,
    is_split: bool,
    is_coded: bool,
    is_stochastic: bool = False,
    gradient_dtype=torch.float32,
    begin: int = 0,
) -> None:
    """8 steps by each; float32 states agree to 1e-6, codes but for ties."""
    generator = torch.Generator().manual_seed(count)
    start = 0.02 * torch.randn(count, generator=generator)
    results = []
    for adamw_step in (adamw.adamw_step, kernels.adamw_step):
        generator.manual_seed(1)
        piece = Piece(
            index=0,
            begin=begin,
            end=begin + count,
            is_split=is_split,
            is_coded=is_coded,
            is_stochastic=is_stochastic,
        )
        state = piece.state(torch.zeros(piece.size, dtype=torch.uint8))
        weight = start.bfloat16() if is_split else start.clone()
        for step in range(1, 9):
            noise = torch.randn(count, generator=generator) / torch.rand(count, generator=generator)
            numbers = AdamWStep(
                rate=1e-6 * step, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1, clip=0.7,
                step=step, seed=1234567 * step,
            )  # fmt: skip
            adamw_step(weight, (1e-5 * noise).to(gradient_dtype), state, numbers, begin)
        whole = merge_halves(weight, state.low_bits, state.rounding(weight, begin))
        results.append((whole, *state.moments(), state.mean, state.square))
    (plain, *ours), (fused, *theirs) = results
    if is_coded:
        for mine, other in zip(ours[2:], theirs[2:], strict=True):
            differing = (mine != other).float().mean().item()
            assert differing < 1e-3, f"{differing:.1e} of the codes differ"
    else:
        mean, square = ours[:2]
        assert torch.allclose(square, theirs[1], rtol=1e-6, atol=0)
        assert ((theirs[0] - mean).abs() / square.sqrt()).max() < 1e-6
    # A few roundings of weights of 0.05, or a few codes that differ; the way was 4e-5.
    error = (fused - plain).abs().max().item()
    assert error <= (1e-6 if is_coded else 2e-8), error


def not_a_number() -> None:
    """Patterns at the end of the range: NaN stays NaN, the largest number becomes bf16's infinity."""
    weight = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    piece = Piece(index=0, begin=0, end=3, is_split=True, is_coded=False)
    state = piece.state(torch.zeros(piece.size, dtype=torch.uint8))
    numbers = AdamWStep(
        rate=1.0, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, clip=1.0, step=1, seed=0
    )
    gradient = torch.tensor([0x7FFFFFFF, -1, 0], dtype=torch.int32).view(torch.float32)
    kernels.adamw_step(weight, gradient, state, numbers)
    whole = merge_halves(weight, state.low_bits)
    assert weight.isnan().tolist() == whole.isnan().tolist() == [True, True, False], whole
    assert weight[2] == whole[2] == 3.0


def together() -> None:
    """Small parameters in few launches: one after another number of steps, one without weight decay."""
    results = []
    for adamw_steps in (adamw.adamw_steps, kernels.adamw_steps):
        generator = torch.Generator().manual_seed(0)
        weights, states = [], []
        for index, (count, is_split) in enumerate(
            [(3000, True), (1, True), (1024, True), (700, False), (500, True)]
        ):
            start = 0.02 * torch.randn(count, generator=generator)
            piece = Piece(index=index, begin=0, end=count, is_split=is_split, is_coded=index == 2,
                          is_stochastic=index == 1)  # fmt: skip
            states.append(piece.state(torch.zeros(piece.size, dtype=torch.uint8)))
            weights.append(start.bfloat16() if is_split else start)
        for step in range(1, 4):
            jobs = []
            for index, weight in enumerate(weights):
                gradient = torch.randn(len(weight), generator=generator)
                gradient = gradient.bfloat16() if index == 1 else gradient
                decay = 0.0 if index == 4 else 0.1
                numbers = AdamWStep(
                    rate=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=decay, clip=0.7,
                    step=step + (index == 3), seed=step,
                )  # fmt: skip
                jobs.append(adamw.Job(weight, gradient, states[index], numbers, 1000 * index))
            adamw_steps(jobs)
        results.append(
            [
                merge_halves(weight, state.low_bits, state.rounding(weight, 1000 * index))
                for index, (weight, state) in enumerate(zip(weights, states, strict=True))
            ]
        )
    for plain, fused in zip(*results, strict=True):
        assert (plain - fused).abs().max() < 1e-7, (plain - fused).abs().max()
    assert (results[0][0] - 0.02 * torch.randn(3000, generator=generator.manual_seed(0))).abs().max() > 1e-3


CASES = {
    "small parameters together": together,
    "one value": lambda: both(1, is_split=True, is_coded=False),
    "bf16 weights": lambda: both(3000, is_split=True, is_coded=False),
    "bf16 weights, stochastic": lambda: both(
        3000, is_split=True, is_coded=False, is_stochastic=True, begin=7
    ),
    "bf16 weights and gradients": lambda: both(
        2048, is_split=True, is_coded=False, gradient_dtype=torch.bfloat16
    ),
    "float32 weights": lambda: both(1025, is_split=False, is_coded=False),
    "8-bit states": lambda: both(3000, is_split=True, is_coded=True),
    "8-bit states, stochastic": lambda: both(
        3000, is_split=True, is_coded=True, is_stochastic=True, begin=512
    ),
    "8-bit states of float32 weights": lambda: both(1100, is_split=False, is_coded=True),
    "8-bit states of a later piece": lambda: both(1300, is_split=True, is_coded=True, begin=3 * 2**30),
    "not a number": not_a_number,
}
