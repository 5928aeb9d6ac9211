"""CPU offload: host memory streamed through two device buffers; copies and work overlap on CUDA streams."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class OffloadStream:
    def __init__(self, device: torch.device, size: int):
        """`size`: bytes of the largest piece."""
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def stream(self, pieces: Sequence[Tensor], work: Callable[[int, Tensor], None]) -> None:
        """Call `work(number, bytes)` with each piece (uint8 [n] of the host) on the device, and copy it back.

        Returns before that is done: see `synchronize`.
        """
        if not self._is_cuda:
            for number, piece in enumerate(pieces):
                here = self._buffers[number % 2][: len(piece)].copy_(piece)
                work(number, here)
                piece.copy_(here)
            return
        main = torch.cuda.current_stream(self._buffers[0].device)
        self._inward.wait_stream(main)
        self._inward.wait_stream(self._outward)  # what went out last time has to have arrived
        is_free: list[Any] = [None, None]  # events
        for number, piece in enumerate(pieces):
            here = self._buffers[number % 2][: len(piece)]
            with torch.cuda.stream(self._inward):
                before = is_free[number % 2]
                if before is not None:
                    self._inward.wait_event(before)
                here.copy_(piece, non_blocking=True)
            main.wait_stream(self._inward)
            work(number, here)
            self._outward.wait_stream(main)
            with torch.cuda.stream(self._outward):
                piece.copy_(here, non_blocking=True)
                is_free[number % 2] = self._outward.record_event()

    def synchronize(self) -> None:
        """Wait until everything is back: before the host reads or writes its pieces."""
        if self._is_cuda:
            self._outward.synchronize()


def host_memory(size: int, device: torch.device) -> Tensor:
    """Zeros on the host, pinned where a GPU copies from it."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
