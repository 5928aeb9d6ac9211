"""How much memory a device may give to this process, and how much of it is left."""

import torch


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU that torch may use: all of it, or the share that was set."""
    number = torch.cuda.current_device() if device.index is None else device.index
    share = torch.cuda.get_per_process_memory_fraction(number)
    return int(torch.cuda.get_device_properties(device).total_memory * share)


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now: what nobody has, and what torch holds but does not use."""
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + held - used
    return max(0, min(free, memory_of(device) - used))
