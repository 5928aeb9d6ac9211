"""Memory-efficient AdamW: low 16 bits instead of master weights, moments in float32 or 8 bits, offloading.

The state of a parameter is split into pieces, which are stored in buckets of bytes. On the device a bucket is
one parameter. On the host it has `BUCKET` bytes and is streamed through the device. `export` and
`load` use float32 whatever is stored, so a checkpoint can be resumed with another `optim` or offload.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.optimizer.adamw import AdamWStep, Job, State, adamw_steps, merge_halves, split_halves
from whetstone.optimizer.quantization import BLOCK, seed_of
from whetstone.parallel.fsdp import local

BUCKET = 64 * 2**20  # bytes; a power of two, since pinned memory is handed out in those
SMALL = 4096  # parameters with fewer values (norms, biases) keep float32 moments
UNIT = 1024  # pieces begin at multiples of so many values, whole blocks of codes
CHUNK = 2**22  # values that are put together at once for a checkpoint
ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Values begin:end of one flat parameter, with their state in a bucket from byte `at` on."""

    index: int
    begin: int
    end: int
    is_split: bool
    is_coded: bool
    is_stochastic: bool = False
    at: int = 0

    def __len__(self) -> int:
        return self.end - self.begin

    def _fields(self) -> Iterator[tuple[str, torch.dtype, int]]:
        if self.is_split:
            yield "low_bits", torch.int16, len(self)
        yield "mean", torch.int8 if self.is_coded else torch.float32, len(self)
        yield "square", torch.uint8 if self.is_coded else torch.float32, len(self)
        if self.is_coded:
            yield "mean_scale", torch.float32, -(-len(self) // BLOCK)
            yield "square_scale", torch.float32, -(-len(self) // BLOCK)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(_aligned(count * kind.itemsize) for _, kind, count in self._fields())

    def state(self, bucket: Tensor) -> State:
        """Views into the bytes of a bucket."""
        views: dict[str, Any] = {"low_bits": None, "mean_scale": None, "square_scale": None}
        at = self.at
        for name, kind, count in self._fields():
            views[name] = bucket[at : at + count * kind.itemsize].view(kind)
            at += _aligned(count * kind.itemsize)
        return State(**views, is_stochastic=self.is_stochastic)

    def fitting(self, room: int) -> int:
        """How many of its values a bucket with `room` bytes left can take: all, or whole units."""
        if self.size <= room:
            return len(self)
        per_unit = replace(self, begin=0, end=UNIT).size
        return min(len(self), max(0, room // per_unit * UNIT))


@dataclass(kw_only=True)
class Bucket:
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    states: list[State] = field(default_factory=list)  # of the pieces, where `memory` is on the device

    def add(self, piece: Piece) -> None:
        self.pieces.append(replace(piece, at=self.size))
        self.size += piece.size


class OffloadStream:
    """Host memory streamed through two device buffers; copies and work overlap on CUDA streams."""

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


class CompactAdamW:
    """Moves parameters that are bf16 or float32; a sharded one in this rank's part.

    `stochastic`: how bf16 weights are rounded.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        coded: bool,
        offload: bool,
        stochastic: bool = False,
        bucket_size: int = BUCKET,
    ):
        self.parameters = parameters
        self.steps = [0] * len(parameters)
        device = local(parameters[0]).device
        self._adamw_steps = pick_kernel(device)
        pieces = [
            replace(_whole(index, local(parameter), coded), is_stochastic=stochastic)
            for index, parameter in enumerate(parameters)
        ]
        pieces = [piece for piece in pieces if len(piece)]  # a rank may have nothing of a small parameter
        self._offload: OffloadStream | None = None
        if offload:
            self._buckets = list(_fill(pieces, bucket_size))
            self._offload = OffloadStream(device, max((bucket.size for bucket in self._buckets), default=0))
        else:
            self._buckets = [bucket for piece in pieces for bucket in _fill([piece], piece.size)]
        self._locations: list[list[tuple[Piece, Bucket]]] = [[] for _ in parameters]
        for bucket in self._buckets:
            if offload:
                is_pinned = device.type == "cuda"
                bucket.memory = torch.zeros(bucket.size, dtype=torch.uint8, pin_memory=is_pinned)
            else:
                home = local(parameters[bucket.pieces[0].index]).device
                bucket.memory = torch.zeros(bucket.size, dtype=torch.uint8, device=home)
                bucket.states = [piece.state(bucket.memory) for piece in bucket.pieces]
            for piece in bucket.pieces:
                self._locations[piece.index].append((piece, bucket))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], settings: AdamWStep) -> None:
        """One step; `step`, `seed` and `weight_decay` of `settings` are set for each parameter."""
        for index, gradient in enumerate(gradients):
            self.steps[index] += gradient is not None
        now = [settings.for_parameter(p, step) for p, step in zip(self.parameters, self.steps, strict=True)]

        def jobs(bucket: Bucket, states: Iterable[State]) -> Iterator[Job]:
            for piece, state in zip(bucket.pieces, states, strict=True):
                gradient = gradients[piece.index]
                if gradient is not None:
                    weight, gradient = flat[piece.index], gradient.reshape(-1)
                    if len(piece) < len(weight):
                        weight, gradient = weight[piece.begin : piece.end], gradient[piece.begin : piece.end]
                    seeded = now[piece.index]
                    if piece.is_coded:
                        seeded = replace(seeded, seed=seed_of(seeded.step, piece.index))
                    yield Job(weight, gradient, state, seeded, piece.begin)

        with contextlib.ExitStack() as stack:
            flat = [stack.enter_context(_flat(parameter)) for parameter in self.parameters]
            if self._offload is None:
                self._adamw_steps([job for bucket in self._buckets for job in jobs(bucket, bucket.states)])
                return

            def work(number: int, memory: Tensor) -> None:
                bucket = self._buckets[number]
                self._adamw_steps([*jobs(bucket, (piece.state(memory) for piece in bucket.pieces))])

            self._offload.stream([bucket.memory for bucket in self._buckets], work)

    def zero_grad(self) -> None:
        """Gradients are not stored here."""

    @torch.no_grad()
    def export(self, index: int) -> dict[str, Tensor]:
        """Step, moments and master of one parameter: the memory itself if it is float32, else a host copy."""
        self._synchronize()
        here = local(self.parameters[index].detach())
        step = torch.tensor(float(self.steps[index]))
        locations = self._locations[index]
        is_split = here.dtype != torch.float32
        is_live = self._offload is None and len(locations) == 1 and not locations[0][0].is_coded
        if is_live:
            state = locations[0][0].state(locations[0][1].memory)
            exported = {"exp_avg": state.mean.view(here.shape), "exp_avg_sq": state.square.view(here.shape)}
        else:
            exported = {n: torch.empty(here.shape, dtype=torch.float32) for n in ("exp_avg", "exp_avg_sq")}
        exported["master"] = torch.empty(here.shape, dtype=torch.float32) if is_split else here
        for state, part, at in self._chunks(index):
            if not is_live:
                for name, moment in zip(("exp_avg", "exp_avg_sq"), state.moments(part), strict=True):
                    exported[name].view(-1)[at].copy_(moment)
            if is_split:
                assert state.low_bits is not None
                low = state.low_bits[part].to(here.device)
                weight = here.reshape(-1)[at]
                whole = merge_halves(weight, low, state.rounding(weight, at.start))
                exported["master"].view(-1)[at].copy_(whole)
        return {"step": step, **exported}

    @torch.no_grad()
    def load(self, index: int, state: dict[str, Tensor]) -> None:
        """`export` undone: the weight follows its master."""
        self._synchronize()
        self.steps[index] = int(state["step"].item())
        mean, square, master = (state[name].reshape(-1) for name in ("exp_avg", "exp_avg_sq", "master"))
        with _flat(self.parameters[index]) as weight:
            for own, part, at in self._chunks(index):
                own.store(mean[at].to(own.mean.device), square[at].to(own.mean.device), part)
                low = None if own.low_bits is None else own.low_bits[part].to(weight.device)
                rounding = own.rounding(weight[at], at.start)
                split_halves(master[at].to(weight.device), weight[at], low, rounding)
                if low is not None and own.low_bits is not None:
                    own.low_bits[part].copy_(low)

    def _chunks(self, index: int) -> Iterator[tuple[State, slice, slice]]:
        """The state of a parameter in chunks: that of a piece, which part of it, and of the parameter."""
        for piece, bucket in self._locations[index]:
            state = piece.state(bucket.memory)
            for begin in range(0, len(piece), CHUNK):
                end = min(len(piece), begin + CHUNK)
                yield state, slice(begin, end), slice(piece.begin + begin, piece.begin + end)

    def _synchronize(self) -> None:
        if self._offload is not None:
            self._offload.synchronize()


def pick_kernel(device: torch.device) -> Callable[[Sequence[Job]], None]:
    """The pass over the weights: fused on a GPU, plain torch elsewhere."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):  # a torch without Triton: slower, the same numbers
            from whetstone.optimizer import kernels

            return kernels.adamw_steps
    return adamw_steps


@contextlib.contextmanager
def _flat(parameter: nn.Parameter) -> Iterator[Tensor]:
    """This rank's part of a parameter as [n]; changes arrive in the parameter, whatever its strides."""
    here = local(parameter.detach())
    flat = here.reshape(-1)
    yield flat
    if not here.is_contiguous():
        here.copy_(flat.view(here.shape))


def _whole(index: int, here: Tensor, coded: bool) -> Piece:
    assert here.dtype in (torch.float32, torch.bfloat16), f"parameters of {here.dtype} can't be trained"
    return Piece(
        index=index,
        begin=0,
        end=here.numel(),
        is_split=here.dtype == torch.bfloat16,
        is_coded=coded and here.numel() >= SMALL,
    )


def _fill(pieces: Iterable[Piece], size: int) -> Iterator[Bucket]:
    """Buckets of at most `size` bytes, every one but the last as full as it can be."""
    bucket = Bucket()
    for piece in pieces:
        while len(piece):
            num = piece.fitting(size - bucket.size)
            if num == 0:
                assert bucket.pieces, f"a bucket of {size} bytes is too small for {UNIT} values"
                yield bucket
                bucket = Bucket()
                continue
            bucket.add(replace(piece, end=piece.begin + num))
            piece = replace(piece, begin=piece.begin + num)
    if bucket.pieces:
        yield bucket


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
