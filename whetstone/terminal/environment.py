"""Errors of the machine as sentences: full disk or GPU, file-size limit, no working directory or /proc; how
this program is called.
"""

import errno
import os
import shlex
import shutil
import sys
from pathlib import Path

from whetstone.errors import UserError, first_line, is_out_of_memory, is_panic, known_failure

# What every installation has, by the names that are imported.
REQUIRED = frozenset(
    {"torch", "transformers", "peft", "reasoning_gym", "math_verify", "pydantic", "datasets", "numpy"}
    | {"safetensors", "gguf", "yaml", "rich", "matplotlib"}
)


def is_main_rank() -> bool:
    """Whether this is the rank that prints for all (set by torchrun before torch is imported)."""
    return os.environ.get("RANK", "0") == "0"


def program() -> str:
    """What to type for `whet`: its path where the shell would not find this one, as after `make train`."""
    own = Path(sys.executable).with_name("whet")
    on_path = shutil.which("whet")
    if not own.is_file() or (on_path is not None and os.path.realpath(on_path) == os.path.realpath(own)):
        return "whet"
    relative = os.path.relpath(own)
    return shlex.quote(str(own) if relative.startswith("..") else relative)


def check_working_directory() -> None:
    """Relative paths and every process that we start need one that exists."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"The working directory is gone ({error.strerror}): change to a folder that exists (cd), then "
            "give the command again."
        ) from None


def check_proc() -> None:
    """torch reads the processors from there, and the sandbox its own processes."""
    if sys.platform == "linux" and not os.path.isdir("/proc/self"):
        raise UserError(
            "There is no /proc, without which torch does not run: mount it (mount -t proc proc /proc), or "
            "start the container with it."
        )


def sentence_of(error: BaseException) -> str | None:
    """The sentence for an error that the machine caused and the user can mend; None for any other."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in REQUIRED:
        return (
            f"The Python package {error.name} is not installed in {sys.prefix}: install whetstone with what "
            "it needs (python -m pip install -e . in a clone, or a wheel without --no-deps)."
        )
    if (meaning := known_failure(str(error))) is not None:  # before the disk: /dev/shm is another
        return f"{meaning} ({first_line(error)[:200]})."
    if is_panic(error):
        return f"A tokenizer failed ({first_line(error)[:200]}): give the tokenizer files of this model."
    if is_out_of_memory(str(error)):
        return (
            f"The GPU's memory ran out ({first_line(error)[:200]}): set use_peft=true or a smaller "
            "model_name_or_path, and let `whet doctor` show who else uses the GPU."
        )
    named = f" while writing {error.filename}" if isinstance(error, OSError) and error.filename else ""
    if is_full_disk(error):
        return (
            f"The disk is full{named}: free some space, set save_total_limit=2 or set output_dir to another "
            "disk, then give the same command with auto_resume=true; checkpoints written before are whole."
        )
    if _has_number_or_words(error, errno.EFBIG):
        return (
            f"A file would be larger than this process may write{named} (ulimit -f): raise the limit, then "
            "give the same command with auto_resume=true; checkpoints written before are whole."
        )
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return (
            "There is no folder for temporary files that can be written: free some space in /tmp, raise the "
            "limit on the size of files (ulimit -f), or set TMPDIR to another folder."
        )
    if isinstance(error, FileNotFoundError):
        try:
            check_working_directory()
        except UserError as gone:
            return str(gone)
    return None


def is_full_disk(error: BaseException) -> bool:
    """Whether a disk or quota ran out: Python says so by number, writers in other languages only in words."""
    short_write_of_torch = "inline_container" in str(error) and "unexpected pos" in str(error)
    return short_write_of_torch or _has_number_or_words(error, errno.ENOSPC, errno.EDQUOT)


def _has_number_or_words(error: BaseException, *numbers: int) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    return any(os.strerror(number).lower() in str(error).lower() for number in numbers)
