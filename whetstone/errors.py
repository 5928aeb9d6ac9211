"""`UserError`: an error that the user can correct, and what its message suggests.

Its message is one sentence with the remedy. The command line prints it without a traceback and exits with
code 2. Any other exception is a bug and keeps its traceback.
"""

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator


class UserError(ValueError):
    """The user's input cannot work; the message says what is wrong and what to do."""


@contextlib.contextmanager
def explained(describe: Callable[[Exception], str | None]) -> Iterator[None]:
    """Inside, an error becomes a `UserError` with the sentence that `describe` has for it; None: it stays."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (sentence := describe(error)) is None:
            raise
        raise UserError(sentence) from error


def close_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is spelled most like `name`; None where none is near."""
    matches = difflib.get_close_matches(name[:200], list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'X'?`, or an empty text."""
    match = close_match(name, known)
    return f": did you mean '{match}'?" if match else ""


def message_of(error: BaseException) -> str:
    """The type and the message of an error of somebody else's code, whose `__str__` may fail as well."""
    try:
        text = str(error)
    except Exception:
        text = "its message can't be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def non_finite(**values: float) -> str:
    """Names and values of those that are NaN or infinite, for a message; empty if there are none.

    NaN makes every comparison false, so this is asked before one decides anything.
    """
    parts = [f"{name} {value}" for name, value in values.items() if not math.isfinite(value)]
    return ", ".join(parts).replace("_", " ")


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust (tokenizers) gave up: pyo3 raises it as no `Exception`."""
    return type(error).__name__ == "PanicException"


# What torch, CUDA, NCCL, Triton and servers say -> what it means and what to change. The first match counts.
FAILURES: tuple[tuple[str, str], ...] = (
    (
        r"no kernel image is available",
        "This build of torch has no kernels for this GPU: `whet doctor` names the build to install; "
        "device=cpu trains without the GPU",
    ),
    (
        r"driver version is insufficient|driver on your system is too old|forward compatibility was",
        "The NVIDIA driver is older than this build of torch requires: `whet doctor` names the driver to "
        "install; device=cpu trains without the GPU",
    ),
    (
        r"device\(s\) is/are busy or unavailable|exclusive process",
        "Another process has the GPU for itself: end it (`nvidia-smi` lists it), or choose another GPU with "
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        r"(no space left|unable to|error while (creating|attaching)).*(/dev/shm|shared memory|</?torch_\d)"
        r"|(/dev/shm|</?torch_\d).*no space left|bus error|sigbus",
        "Shared memory (/dev/shm) is full: give the container more (docker run --shm-size=8g, or "
        "--ipc=host), then give the same command with auto_resume=true",
    ),
    (
        r"no available memory for the cache blocks|free memory on device .* is less than desired",
        "The engine has too little GPU memory: set server_gpu_memory_utilization or server_max_model_length "
        "to what fits beside the other processes of that GPU",
    ),
    (
        r"collective operation timeout|nccl.*time(d )?out|time(d )?out.*nccl|gloo.*timed out"
        r"|timed out waiting \d+ms for (send|recv)",
        "A rank waited for the others longer than collective_timeout_s: raise collective_timeout_s if they "
        "were only slow; otherwise the log of the first rank that failed has the reason",
    ),
    (
        r"failed to find c compiler",
        "Triton needs a C compiler: install gcc (apt install gcc), or set CC to one",
    ),
    (
        r"python\.h: no such file",
        "Triton needs the headers of this Python: install them (apt install python3-dev)",
    ),
)
_OUT_OF_MEMORY = r"cuda out of memory|cuda error: out of memory|cublas_status_alloc_failed"


def known_failure(text: str) -> str | None:
    """What a message of torch, CUDA, NCCL or a server means and what to change; None: not known."""
    lowered = text.lower()
    return next((meaning for pattern, meaning in FAILURES if re.search(pattern, lowered, re.DOTALL)), None)


def is_out_of_memory(text: str) -> bool:
    """Whether a message says that a GPU's memory ran out. The remedy depends on the stage."""
    return re.search(_OUT_OF_MEMORY, text.lower()) is not None


def first_line(error: BaseException) -> str:
    """The first line of a message, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
