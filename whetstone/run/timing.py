"""Where a step's time went and how well it used the machine: seconds by stage, tokens a second, model flops
utilisation, peak memory.

`Clock` times one step; `Meter` knows the model and the device, and makes the step's row of these numbers.
Model flops utilisation counts what the mathematics needs, not what the program did: 6 N operations for a
token that is run forward and backward, where N is every parameter of the model, embeddings included. Under
LoRA frozen weights have no gradient of their own: 4 per parameter, and 6 per parameter of the adapter.
Recomputed activations, passes without gradients and attention's own products are not counted. Moves nothing.
"""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from whetstone.model.policy import Policy
from whetstone.parallel.collectives import sum_of_data
from whetstone.rollout.collector import Round
from whetstone.update.packing import Batch
from whetstone.update.profile_range import mark

# Part of the device's name -> dense bf16 TFLOP/s by its data sheet (without sparsity). The first that fits
# counts, so what is more special stands first.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "A10": 125.0,
    "A30": 165.0,
    "A40": 150.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX A6000": 155.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


class Clock:
    """The stages of one step, in seconds and in peak memory."""

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        self.device = device
        self.exact = exact  # wait for the device at the end of each stage, so that its work counts there
        self.seconds: dict[str, float] = {}
        self.peaks_gb: dict[str, float] = {}
        self.begun = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        reset_peak_memory(self.device)
        begun = time.monotonic()
        with mark(stage):
            yield
            self._settle()
        self.seconds[stage] = time.monotonic() - begun
        self.peaks_gb[stage] = peak_memory_gb(self.device)

    def _settle(self) -> None:
        if self.exact and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def row(self, made: Round) -> dict[str, float]:
        """Where the loop's seconds went (a batch that was sampled in the background costs it only the wait),
        and sampled tokens a second.
        """
        num_tokens = sum(len(r.completion.token_ids) for group in made.groups for r in group.rollouts)
        waited = self.seconds["rollout"]
        sync = min(made.sync_s, waited)
        score = min(made.scoring_s, waited - sync)
        seconds = {**self.seconds, "rollout": waited - sync - score}
        seconds |= {"reward_wait": score, "weight_sync": sync}
        return {
            **{f"time/{stage}": value for stage, value in seconds.items()},
            "step_time": time.monotonic() - self.begun,
            "tokens_per_s": num_tokens / (waited + self.seconds["update"]),
            "rollout_tokens_per_s": num_tokens / (made.seconds - made.scoring_s),
        }


class Meter:
    """Knows what a token costs this model, and what this device could do."""

    def __init__(self, policy: Policy, *, num_iterations: int, peak_tflops: float | None):
        self.device = policy.device
        self.exact = False
        self._ranks = policy.ranks
        self._num_iterations = num_iterations
        trained = sum(parameter.numel() for parameter in policy.parameters)
        everything = sum(parameter.numel() for parameter in policy.model.parameters())
        self.flops_per_token = flops_per_token(trained, everything - trained)
        self.peak_flops = peak_flops(device_name(policy.device), peak_tflops)
        self.clock = Clock(policy.device)
        self._num_tokens: float | None = None  # that the update of this step ran, on all ranks

    def start(self) -> Clock:
        """A new step begins."""
        self.clock = Clock(self.device, exact=self.exact)
        self._num_tokens = None
        return self.clock

    def row(self, made: Round, minibatches: Sequence[Sequence[Batch]]) -> dict[str, float]:
        """The numbers of the step as far as the clock has timed it; `minibatches` are what its update ran."""
        if self._num_tokens is None:
            mine = sum(len(batch.token_ids) for part in minibatches for batch in part)
            self._num_tokens = float(
                sum_of_data(self._ranks, torch.tensor(float(mine * self._num_iterations)))
            )
        tokens = self._num_tokens
        seconds = self.clock.seconds["update"]
        row = {**self.clock.row(made), "update_tokens_per_s": tokens / seconds}
        if self.peak_flops is not None:
            possible = self.peak_flops * self._ranks.world_size * seconds
            row["mfu"] = self.flops_per_token * tokens / possible
        row["peak_memory_gb"] = max(self.clock.peaks_gb.values())
        return row


def flops_per_token(trained: int, frozen: int) -> float:
    """Operations for a token forward and backward: 2 per parameter to go forward, 2 for the gradient of what
    flows through it, 2 for the gradient of the parameter itself, if it trains.
    """
    return 6.0 * trained + 4.0 * frozen


def device_name(device: torch.device) -> str | None:
    """What the device calls itself; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def peak_flops(name: str | None, peak_tflops: float | None) -> float | None:
    """Operations a second that the device could do; None where nobody knows, as on a CPU."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    known = next((rate for part, rate in PEAK_TFLOPS.items() if name is not None and part in name), None)
    return None if known is None else known * 1e12


def reset_peak_memory(device: torch.device) -> None:
    """From here on the peak is counted anew. Linux lets a process do that for its own memory; elsewhere the
    peak is that of the whole run so far.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gb(device: torch.device) -> float:
    """Most memory (10^9 bytes) since the last reset: what torch's allocator gave out on a GPU, the resident
    memory of this process on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")
    if os.access(status, os.R_OK):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
