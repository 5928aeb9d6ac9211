"""GPUs as torch sees them: driver, build, kernels, memory, bf16, and what kernels are compiled with.

Without a GPU, training runs on the CPU: a warning, or a problem where the configuration has device: cuda.
"""

import importlib
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whetstone.commands.doctor import nvidia
from whetstone.commands.doctor.check import Check, make_check
from whetstone.commands.doctor.machine import num_ranks
from whetstone.config import Config
from whetstone.errors import first_line
from whetstone.model import fla
from whetstone.run.record import version

SECTION = "GPU"
GB = 2**30
MIN_BF16 = (8, 0)  # Ampere


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch sees."""

    number: int
    name: str
    capability: tuple[int, int]
    memory: int
    uuid: str


def check_gpus(config: Config | None) -> list[Check]:
    if config is not None and config.model.device == "cpu":
        return [] if config.model.torch_compile is not True else [_compiler(is_needed=True)]
    must = config is not None and config.model.device == "cuda"
    try:
        gpus = visible_gpus()
    except RuntimeError as error:
        detail = f"torch can't use the GPU ({first_line(error)[:200]})"
        return [make_check(SECTION, "GPU", detail, "update the driver, or set device=cpu", problem=True)]
    if not gpus:
        needs_compiler = config is not None and config.model.torch_compile is True
        tools = [_triton([]), _compiler(is_needed=False)] if config is None else []
        return [*_without_gpu(must), *tools, *([_compiler(is_needed=True)] if needs_compiler else [])]
    checks = [_driver(), _cuda()]
    for gpu in gpus:
        checks += _gpu(gpu)
    if config is None or config.model.bf16:
        checks.append(_bf16(gpus, is_needed=config is not None))
    checks += [_triton(gpus), _compiler(is_needed=True), _headers()]
    if (problem := fla.installed_problem()) is not None:
        detail = f"{problem}: gated delta layers (Qwen 3.5) are computed by torch's rule"
        checks.append(make_check(SECTION, "flash-linear-attention", detail, fla.REMEDY))
    checks += _nccl(gpus, config)
    return [*checks, *([] if config is None else _ranks(gpus, config))]


def visible_gpus() -> list[Gpu]:
    """The GPUs that torch sees; `RuntimeError` where CUDA can't be initialized."""
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for number in range(torch.cuda.device_count()):
        shape = torch.cuda.get_device_properties(number)
        uuid = str(shape.uuid)
        gpus.append(
            Gpu(
                number=number,
                name=shape.name,
                capability=(shape.major, shape.minor),
                memory=shape.total_memory,
                uuid=uuid if uuid.startswith("GPU-") else f"GPU-{uuid}",
            )
        )
    return gpus


def _without_gpu(must: bool) -> list[Check]:
    """Why torch sees no GPU: there is none, no driver, one that is too old, or a build without CUDA."""
    import torch

    present = nvidia.present_gpus()
    if not present:
        if must:
            return [make_check(SECTION, "GPU", "this machine has none", "set device=cpu", problem=True)]
        detail = "this machine has none: training runs on the CPU, which suits small models only"
        return [make_check(SECTION, "GPU", detail, "use a machine with an NVIDIA GPU for larger models")]
    names, built = ", ".join(present), torch.version.cuda
    if built is None:
        detail = f"torch {torch.__version__} is built without CUDA, and this machine has {names}"
        release = torch.__version__.split("+")[0]
        remedy = f"pip install --force-reinstall torch=={release}, from an index of CUDA builds"
        return [make_check(SECTION, "CUDA", detail, remedy, problem=must)]
    if nvidia.driver_version() is None:
        detail = f"this machine has {names}, but no NVIDIA driver"
        remedy = f"install the NVIDIA driver, {_driver_for(built)} or later"
        return [make_check(SECTION, "driver", detail, remedy, problem=must)]
    if (check := _old_driver(built, must)) is not None:
        return [check]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    detail = f"this machine has {names}, but torch sees none"
    if hidden is not None:
        remedy = f"unset CUDA_VISIBLE_DEVICES, which is '{hidden[:100]}'"
    else:
        remedy = "give the container the GPU (docker run --gpus all), or restart the driver"
    return [make_check(SECTION, "GPU", detail, remedy, problem=must)]


def _driver() -> Check:
    supported = nvidia.driver_cuda()
    upto = "" if supported is None else f", for CUDA up to {supported[0]}.{supported[1]}"
    return make_check(SECTION, "driver", f"NVIDIA {nvidia.driver_version() or 'of unknown version'}{upto}")


def _old_driver(built: str, must: bool) -> Check | None:
    """A driver runs builds of its own major version of CUDA and of older ones."""
    supported = nvidia.driver_cuda()
    if supported is None or int(built.split(".")[0]) <= supported[0]:
        return None
    newest = f"{supported[0]}.{supported[1]}"
    detail = f"NVIDIA {nvidia.driver_version()} is for CUDA up to {newest}, torch is built for {built}"
    remedy = f"install the NVIDIA driver, {_driver_for(built)} or later"
    return make_check(SECTION, "driver", detail, remedy, problem=must)


def _driver_for(cuda: str) -> str:
    return nvidia.MIN_DRIVERS.get(int(cuda.split(".")[0]), max(nvidia.MIN_DRIVERS.values()))


def _cuda() -> Check:
    import torch

    architectures = " ".join(torch.cuda.get_arch_list())
    return make_check(SECTION, "CUDA", f"torch is built for CUDA {torch.version.cuda} with {architectures}")


def _gpu(gpu: Gpu) -> Iterator[Check]:
    """Whether kernels run on it, and how much of its memory is free."""
    import torch

    name = f"GPU {gpu.number}"
    architectures = torch.cuda.get_arch_list()
    major, minor = gpu.capability
    detail = f"{gpu.name}, sm_{major}{minor}, {gpu.memory / GB:.0f} GB"
    if not has_kernels(gpu.capability, architectures):
        oldest = min((parsed[1] for entry in architectures if (parsed := _parse(entry))), default=(0, 0))
        other = "CUDA 12.6, which has older GPUs" if gpu.capability < oldest else "the newest CUDA"
        detail += f": torch has no kernels for it, only {' '.join(architectures)}"
        remedy = f"install the build of torch {torch.__version__.split('+')[0]} for {other}"
        yield make_check(SECTION, name, detail, remedy, problem=True)
        return
    failure = try_kernel(gpu.number)
    if failure is not None:
        remedy = "end the processes on it (nvidia-smi), or choose another with CUDA_VISIBLE_DEVICES"
        yield make_check(SECTION, name, f"{detail}: a kernel fails ({failure})", remedy, problem=True)
        return
    yield make_check(SECTION, name, detail)
    free, total = torch.cuda.mem_get_info(gpu.number)
    detail = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    remedy = ""
    if free < total / 2:
        others = nvidia.processes(gpu.uuid)
        detail += f", used by {'; '.join(others) or 'processes that are not visible from here'}"
        remedy = "end these processes, or choose another GPU with CUDA_VISIBLE_DEVICES"
    yield make_check(SECTION, f"{name} memory", detail, remedy, problem=free < GB)


def has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a build runs on a GPU: by a binary of its major version, or by PTX of an older architecture."""
    parsed = [entry for entry in map(_parse, architectures) if entry is not None]
    if not parsed:  # another kind of GPU (ROCm): not known
        return True
    for kind, built, suffix in parsed:
        if suffix == "a":  # of this very GPU
            fits = built == capability
        elif kind == "sm" or suffix == "f":
            fits = built[0] == capability[0] and built[1] <= capability[1]
        else:
            fits = built <= capability
        if fits:
            return True
    return False


def _parse(architecture: str) -> tuple[str, tuple[int, int], str] | None:
    """`sm_90a` -> (sm, (9, 0), a)."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    return None if match is None else (match[1], (int(match[2]), int(match[3])), match[4])


def try_kernel(number: int) -> str | None:
    """Run a kernel; the reason where it fails."""
    import torch

    try:
        torch.ones(1, device=f"cuda:{number}").add_(1).item()
    except RuntimeError as error:
        return first_line(error)[:200]
    return None


def _bf16(gpus: list[Gpu], *, is_needed: bool) -> Check:
    without = [f"GPU {gpu.number}" for gpu in gpus if gpu.capability < MIN_BF16]
    if not without:
        return make_check(SECTION, "bf16", "supported by every GPU")
    detail = f"{', '.join(without)} can't compute in bfloat16"
    return make_check(SECTION, "bf16", detail, "set bf16=false", problem=is_needed)


def _triton(gpus: list[Gpu]) -> Check:
    """Imported: a version that does not fit torch fails there."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # an ImportError, or what a broken installation raises
        detail = f"can't be imported ({first_line(error)[:200]})"
        if not gpus:
            return make_check(SECTION, "Triton", f"{detail}; only a GPU needs it")
        remedy = "pip install --force-reinstall torch, which brings the Triton that fits it"
        return make_check(SECTION, "Triton", detail, remedy, problem=True)
    return make_check(SECTION, "Triton", version("triton") or "of unknown version")


def _compiler(*, is_needed: bool) -> Check:
    """For Triton's launchers and torch.compile."""
    names = (os.environ.get("CC"), "gcc", "clang", "cc")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is not None:
        return make_check(SECTION, "C compiler", compiler)
    detail = "none on the PATH, and Triton and torch.compile need one"
    return make_check(SECTION, "C compiler", detail, "apt install gcc", problem=is_needed)


def _headers() -> Check:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return make_check(SECTION, "Python headers", str(header))
    detail = f"there is no {header}, which Triton compiles with"
    return make_check(SECTION, "Python headers", detail, "apt install python3-dev", problem=True)


def _nccl(gpus: list[Gpu], config: Config | None) -> list[Check]:
    """Several ranks exchange gradients by it."""
    from torch.cuda import nccl

    is_needed = config is not None and num_ranks(config) > 1
    if len(gpus) < 2 and not is_needed:
        return []
    try:
        release = nccl.version()
    except (AttributeError, RuntimeError):
        release = None
    if release is not None:
        return [make_check(SECTION, "NCCL", ".".join(map(str, release)))]
    remedy = "pip install --force-reinstall torch, from an index of CUDA builds for Linux"
    return [make_check(SECTION, "NCCL", "torch is built without it", remedy, problem=is_needed)]


def _ranks(gpus: list[Gpu], config: Config) -> list[Check]:
    """Whether there is a GPU for each rank of this host, and for each server that the run starts."""
    parallel, num_gpus = config.parallel, len(gpus)
    ranks = num_ranks(config)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks
    sizes = f"tp_size {parallel.tp_size} x ddp_size {parallel.ddp_size}"
    detail = f"{local} on this host ({sizes}), which has {num_gpus}"
    remedy, problem = "", True
    if ranks % (parallel.tp_size * parallel.ddp_size):
        detail = f"{ranks} ranks, which {sizes} does not divide"
        remedy = "change tp_size or ddp_size"
    elif local > num_gpus:
        problem = "LOCAL_WORLD_SIZE" in os.environ or parallel.tp_size > num_gpus
        remedy = f"set tp_size and ddp_size to {num_gpus} ranks a host"
        if not problem:  # replicas may be on other hosts
            remedy = f"start {ranks} ranks on several hosts (docs/scale.md), or set ddp_size lower"
    checks = [make_check(SECTION, "GPUs for ranks", detail, remedy, problem=problem)] if ranks > 1 else []
    named = [device for entry in config.engines.server_devices for device in entry.split(",")]
    if named:
        missing = [device for device in named if device.isdigit() and int(device) >= num_gpus]
        detail = f"server_devices names {', '.join(named)}, and this host has {num_gpus}"
        remedy = f"set server_devices to numbers below {num_gpus}" if missing else ""
        checks.append(make_check(SECTION, "GPUs for servers", detail, remedy, problem=True))
    return checks
