"""Time and throughput of a step: seconds by stage, tokens per second, model FLOPs utilization, peak memory.

Model FLOPs utilization (MFU) counts 6 N operations per token, where N is every parameter of the model,
embeddings included. Frozen weights under LoRA have no gradient: 4 per parameter. A pass without gradients
(reference logprobs, old logprobs) adds 2. Recomputed activations and attention's products are not counted.
"""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from whetstone.cost.chips import find_chip
from whetstone.model.policy import Policy
from whetstone.model.size import num_active
from whetstone.parallel.collectives import all_reduce_data
from whetstone.rollout.source import RolloutBatch
from whetstone.update.gradient import profile_range
from whetstone.update.packing import Batch


class StageTimer:
    """Seconds and peak memory of the stages of one step."""

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        self.device = device
        self.exact = exact  # synchronize with the device at the end of each stage
        self.seconds: dict[str, float] = {}
        self.peaks_gb: dict[str, float] = {}
        self.started = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        reset_peak_memory(self.device)
        started = time.monotonic()
        with profile_range(stage):
            yield
            if self.exact and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.seconds[stage] = time.monotonic() - started
        self.peaks_gb[stage] = peak_memory_gb(self.device)

    def metrics(self, rollouts: RolloutBatch) -> dict[str, float]:
        """Seconds of the loop by stage (a batch sampled in the background costs only the wait)."""
        num_tokens = sum(len(r.completion.token_ids) for group in rollouts.groups for r in group.rollouts)
        waited = self.seconds["rollout"]
        sync = min(rollouts.sync_s, waited)
        score = min(rollouts.scoring_s, waited - sync)
        seconds = {**self.seconds, "rollout": waited - sync - score}
        seconds |= {"reward_wait": score, "weight_sync": sync}
        return {
            **{f"time/{stage}": value for stage, value in seconds.items()},
            "step_time": time.monotonic() - self.started,
            "tokens_per_s": num_tokens / (waited + self.seconds["update"]),
            "rollout_tokens_per_s": num_tokens / (rollouts.seconds - rollouts.scoring_s),
        }


class ThroughputMeter:
    """Throughput and MFU from the cost of a token and the peak of the device."""

    def __init__(
        self, policy: Policy, *, num_iterations: int, num_passes: int = 0, peak_tflops: float | None
    ) -> None:
        """`num_passes`: without gradients, once for a batch."""
        self.device = policy.device
        self.exact = False
        self._ranks = policy.ranks
        self._num_iterations = num_iterations
        trained, frozen = num_active(policy.model, policy.config)
        self.flops_per_token = flops_per_token(trained, frozen)
        self._flops_per_token_once = 2.0 * (trained + frozen) * num_passes
        self.peak_flops = peak_flops(device_name(policy.device), peak_tflops)
        self.timer = StageTimer(policy.device)
        self._num_tokens: float | None = None  # of the update of this step, on all ranks

    def start_step(self) -> StageTimer:
        self.timer = StageTimer(self.device, exact=self.exact)
        self._num_tokens = None
        return self.timer

    def metrics(self, rollouts: RolloutBatch, minibatches: Sequence[Sequence[Batch]]) -> dict[str, float]:
        """The metrics of the step so far; `minibatches` are those of its update."""
        if self._num_tokens is None:
            trained = [batch for minibatch in minibatches for batch in minibatch if not batch.is_skipped]
            local = sum(len(batch.token_ids) for batch in trained)
            total = torch.tensor(float(local * self._num_iterations))
            self._num_tokens = float(all_reduce_data(self._ranks, total))
        tokens = self._num_tokens
        seconds = self.timer.seconds["update"]
        metrics = {**self.timer.metrics(rollouts), "update_tokens_per_s": tokens / seconds}
        if self.peak_flops is not None:
            possible = self.peak_flops * self._ranks.world_size * seconds
            per_token = self.flops_per_token + self._flops_per_token_once / self._num_iterations
            metrics["mfu"] = per_token * tokens / possible
        metrics["peak_memory_gb"] = max(self.timer.peaks_gb.values())
        return metrics


def flops_per_token(trained: int, frozen: int) -> float:
    """Per parameter 2 for the output, 2 for the input's gradient, and 2 for its own if it is trained."""
    return 6.0 * trained + 4.0 * frozen


def device_name(device: torch.device) -> str | None:
    """The name of a GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def peak_flops(name: str | None, peak_tflops: float | None) -> float | None:
    """Peak operations per second of the device; None if unknown, as on a CPU."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    chip = find_chip(name)
    return None if chip is None else chip.tflops * 1e12


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak. Without a GPU this works on Linux only; elsewhere the peak is that of the whole run."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory (10^9 bytes) since the last reset: torch's allocator on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")
    if os.access(status, os.R_OK):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
