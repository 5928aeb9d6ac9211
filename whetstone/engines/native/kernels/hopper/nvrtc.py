"""CUDA C++ kernels: compiled by the NVRTC that comes with torch, launched through the CUDA driver.

No compiler has to be installed. Binaries are stored in Triton's cache folder.
"""

import ctypes
import functools
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

logger = logging.getLogger("whetstone")

WARP = Path(__file__).with_name("warp.cuh")  # included by every kernel
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Unavailable(Exception):
    """Why kernels cannot be compiled or launched here."""


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


_PDL = _Attribute(name=6, value=(1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Launch(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """A function on one device. Arguments are tensors, tensor maps, integers and floats (32 bits each)."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int, device: torch.device):
        self.shared_bytes, self.device = shared_bytes, device
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._binary = binary
        driver = _driver()
        with torch.cuda.device(device):
            _check(driver.cuModuleLoadData(ctypes.byref(self._module), binary))
            _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
            _check(driver.cuFuncSetAttribute(self._function, _MAX_SHARED, shared_bytes))

    def __call__(self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any]) -> None:
        """Programmatic dependent launch (PDL): the kernel itself waits for the one before it."""
        values = [_as_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        with torch.cuda.device(self.device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            config = _Launch(*grid, threads, 1, 1, self.shared_bytes, stream, ctypes.pointer(_PDL), 1)
            status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(status)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a kernel is compiled for: a subclass adds sizes and flags."""

    bf16: bool
    architecture: str

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; the kernel checks it."""
        raise NotImplementedError

    def headers(self) -> str:
        return WARP.read_text()

    def macros(self) -> list[str]:
        return definitions(BFLOAT16=self.bf16, SHARED_BYTES=self.shared_bytes)


def compile_kernel(source: Path, name: str, variant: Variant, device: torch.device) -> Kernel | None:
    """The kernel `name` of `source`; None if it cannot be compiled here."""
    try:
        code = variant.headers() + source.read_text()
        binary = compile_source(code, variant.macros(), variant.architecture)
        return Kernel(binary, name, variant.shared_bytes, device)
    except Unavailable as reason:
        logger.info(f"The native engine does without {source.name}, since {reason}.")
        return None


class TensorMap(ctypes.Structure):
    """CUtensorMap: a tensor and its tile, for TMA."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def definitions(**names: int) -> list[str]:
    """Options for the compiler."""
    return [f"-D{name}={int(value)}" for name, value in names.items()]


def tensor_map(tensor: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> TensorMap:
    """Tiles `box` of a half-precision tensor of `sizes`, fastest first; `strides` are those of the others, in
    elements. Rows of a tile have 128 bytes, swizzled for wgmma.
    """
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)  # aligned to 64 bytes
    aligned = TensorMap.from_buffer(buffer, -ctypes.addressof(buffer) % 64)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(aligned),
        9 if tensor.dtype == torch.bfloat16 else 6,  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _FLOAT16
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(stride * tensor.element_size() for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        3,  # CU_TENSOR_MAP_SWIZZLE_128B
        2,  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        0,  # zeros outside
    )
    _check(status)
    return aligned


def compile_source(source: str, options: Sequence[str], architecture: str) -> bytes:
    """CUDA C++ -> machine code for `architecture` (sm_90), from the cache if it was compiled before."""
    nvrtc = _library(f"libnvrtc.so.{(torch.version.cuda or '12').split('.')[0]}")
    version = (ctypes.c_int(), ctypes.c_int())
    _check(nvrtc.nvrtcVersion(*map(ctypes.byref, version)))
    flags = [f"--gpu-architecture={architecture}", "-std=c++17", *options]
    key = hashlib.sha256(repr((source, flags, [v.value for v in version])).encode()).hexdigest()
    cache = get_cache_manager(key)
    cached = cache.get_file("kernel.cubin")
    if cached is not None:
        return Path(cached).read_bytes()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    arguments = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    if nvrtc.nvrtcCompileProgram(program, len(flags), arguments) != 0:
        raise Unavailable(f"it does not compile: {_text(nvrtc, 'ProgramLog', program).decode()}")
    binary = _text(nvrtc, "CUBIN", program)
    _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    cache.put(binary, "kernel.cubin", binary=True)
    return binary


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.raw


def _as_c(argument: Any) -> Any:
    if isinstance(argument, TensorMap):
        return argument
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def _check(status: int) -> None:
    if status != 0:
        raise Unavailable(f"CUDA says {status}")


def _driver() -> ctypes.CDLL:
    return _library("libcuda.so.1")


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise Unavailable(f"there is no {name}") from error
