"""GPU memory: usable, free, peak of a piece of work; asynchronous uploads."""

from collections.abc import Callable

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """To the device from pinned memory, so that the host does not wait for what the GPU was given before."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def usable_memory(device: torch.device) -> int:
    """Bytes of a GPU that torch may use: all of it, or the share that was set."""
    number = torch.cuda.current_device() if device.index is None else device.index
    share = torch.cuda.get_per_process_memory_fraction(number)
    return int(torch.cuda.get_device_properties(device).total_memory * share)


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now: what nobody has, and what torch holds but does not use."""
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + held - used
    return max(0, min(free, usable_memory(device) - used))


def unreserved_memory(device: torch.device) -> int:
    """Bytes that nobody has, torch included: they can be allocated in one piece."""
    free = torch.cuda.mem_get_info(device)[0]
    return max(0, min(free, usable_memory(device) - torch.cuda.memory_reserved(device)))


class MemoryProbe:
    """Free and peak memory of one GPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def free(self) -> int:
        return free_memory(self.device)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Peak bytes allocated during `work`, above those before it."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before
