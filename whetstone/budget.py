"""How many tokens go through one forward and backward pass, and how many layers are run again in between:
found by trying.

On a GPU, made-up batches of growing size are run (nothing is learnt from them), and memory grows in line with
tokens, so two sizes tell the third. Where too few tokens would fit, the first layers forget their activations
and are run again in the backward pass: as few of them as it takes. Elsewhere, and on several ranks, `auto`
is a fixed number and no layer is run again. Memory that runs out in mid-run halves the budget (update.py).
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from whetstone.batch import Batch, Sample, pack
from whetstone.errors import UserError
from whetstone.model.memory import free_memory
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish, Group, Rollout, Score

logger = logging.getLogger("whetstone")

UNTRIED = 8192  # where there is nothing to try it on
MOST = 16384  # a GPU gains nothing from more: 60 % of an H200's matrix rate at 1.5 B with 16 k and with 32 k
ENOUGH = 8192  # fewer than these are worth running layers again for
LEAST = 256  # fewer are not tried
SHARE = 0.92  # of the memory that is free; the rest is for what lies between the pieces


@dataclass
class Budget:
    """`tokens` 0: not found yet."""

    tokens: int
    layers_run_again: int | None = None  # None: as the configuration says

    def row(self) -> dict[str, float]:
        again = {} if self.layers_run_again is None else {"layers_run_again": float(self.layers_run_again)}
        return {"micro_batch_tokens": float(self.tokens), **again}


def find(
    policy: Policy, attempt: Callable[[list[Batch]], None], groups: Sequence[Group], may_run_again: bool
) -> Budget:
    """The budget for batches such as `groups`, by passes of made-up ones."""
    samples = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(one.prompt_ids) + len(one.completion.token_ids) for one in samples]
    prompt = max(len(one.prompt_ids) for one in samples)

    def attempt_tokens(tokens: int) -> None:
        words = policy.config.vocab_size
        batch = made_up(tokens, longest=max(lengths), prompt=prompt, vocabulary=words)
        attempt([batch, batch])  # twice: a single one would not need its gradients summed

    finder = Finder(policy, attempt_tokens, longest=max(lengths), wanted=sum(lengths))
    budget = finder.find(may_run_again=may_run_again)
    text = f"Micro-batches of {budget.tokens:,} tokens fit"
    if budget.layers_run_again:
        layers = f"{budget.layers_run_again} of {len(policy.trunk.layers)} layers"
        text += f", with {layers} run again in the backward pass"
    logger.info(text + ".")
    return budget


def made_up(tokens: int, *, longest: int, prompt: int, vocabulary: int) -> Batch:
    """A batch of about so many tokens: sequences as long as they come, nearly all of it completions."""
    samples = []
    while tokens > 1:
        length = min(tokens, longest)
        head = max(1, min(prompt, length // 8))
        count = max(1, length - head)
        # Different prompts, or they would be shared.
        ids = tuple((len(samples) + n) % vocabulary for n in range(head))
        completion = Completion(
            token_ids=(1,) * count, logprobs=(-1.0,) * count, finish=Finish.LENGTH, policy_version=0
        )
        rollout = Rollout(
            prompt_ids=ids,
            completion=completion,
            text="",
            score=Score(reward=float(len(samples) % 2), parts={}, answer=None),
        )
        samples.append(Sample(rollout=rollout, place=len(samples), keep=True))
        tokens -= head + count
    [batch] = pack(samples, 1 << 40)
    return batch


class Finder:
    """Looks for a budget by `attempt(tokens)`: one forward and backward pass of a made-up batch."""

    def __init__(self, policy: Policy, attempt: Callable[[int], None], *, longest: int, wanted: int):
        self.policy, self.attempt = policy, attempt
        self.longest = longest  # tokens of the longest sequence: it can't be cut
        self.most = max(longest, min(MOST, wanted))

    def find(self, *, may_run_again: bool) -> Budget:
        """The largest budget that fits; or, where that is too small, the fewest layers to run again."""
        self._peak(LEAST)  # compiles, and makes what is made once
        points = self._points()
        enough = min(ENOUGH, self.most)
        budget = Budget(tokens=max(points, default=0))
        if may_run_again and budget.tokens < enough:
            budget = self._with_layers_run_again(enough, points)
        if budget.tokens < self.longest:
            raise UserError(
                f"One sequence of {self.longest:,} tokens does not fit into the GPU's memory beside the "
                "model and its optimiser: set gradient_checkpointing=auto, optim=adamw_8bit, "
                "cpu_offload=optimizer, or lower max_completion_length."
            )
        return budget

    def _points(self) -> dict[int, int]:
        """Tokens that fit, the most that do among them, and the bytes they take; empty if none do."""
        tokens, points = min(self.most, ENOUGH), {}
        while (peak := self._peak(tokens)) is None:
            tokens //= 2
            if tokens < LEAST:
                return {}
        points[tokens] = peak
        half = self._peak(tokens // 2)
        assert half is not None
        points[tokens // 2] = half
        reach = min(self.most, Line(points).reach(SHARE * free_memory(self.policy.device)))
        for more in (reach, (reach + tokens) // 2):
            if more > 1.1 * tokens and (peak := self._peak(more)) is not None:
                points[more] = peak
                break
        return points

    def _with_layers_run_again(self, enough: int, kept: dict[int, int]) -> Budget:
        """Memory is in line with the number of layers, too."""
        num_layers = len(self.policy.trunk.layers)
        self.policy.run_layers_again(num_layers)
        dropped = self._points()
        tokens = max(dropped, default=0)
        if tokens >= enough and len(kept) > 1:
            most = Line(kept).at(enough)
            too_much = most - SHARE * free_memory(self.policy.device)
            saved = max(1.0, (most - Line(dropped).at(enough)) / num_layers)
            for layers in range(max(1, math.ceil(too_much / saved)), num_layers):
                self.policy.run_layers_again(layers)
                if self._peak(enough) is not None:
                    return Budget(tokens=enough, layers_run_again=layers)
            self.policy.run_layers_again(num_layers)
        return Budget(tokens=tokens, layers_run_again=num_layers)

    def _peak(self, tokens: int) -> int | None:
        """Bytes that a pass takes on top of what is there; None if there are not so many."""
        device = self.policy.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        failed = False
        try:
            self.attempt(tokens)
        except torch.OutOfMemoryError:
            failed = True
        if failed:  # outside the handler: the exception holds everything that was on its way
            torch.cuda.empty_cache()
            return None
        return torch.cuda.max_memory_allocated(device) - before


class Line:
    """Bytes by tokens, through the two largest points."""

    def __init__(self, points: dict[int, int]):
        less, more = sorted(points)[-2:]
        self.slope = max(1.0, (points[more] - points[less]) / (more - less))
        self.fixed = points[more] - self.slope * more

    def at(self, tokens: int) -> float:
        return self.fixed + self.slope * tokens

    def reach(self, size: float) -> int:
        return max(0, int((size - self.fixed) / self.slope))
