"""What the machine does to a command is one sentence: no working directory, output, /proc; small files."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whetstone.files import atomic_write
from whetstone.terminal.environment import sentence_of

ROOT = Path(__file__).resolve().parents[2]
PATH = {**os.environ, "PYTHONPATH": str(ROOT)}


def bash(command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`WHET` in the command is ours."""
    command = command.replace("WHET", f"{sys.executable} -m whetstone")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=cwd, env=PATH)


def test_a_working_directory_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    done = bash("mkdir here && cd here && rmdir ../here && WHET config", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("whet: The working directory is gone") and done.stderr.count("\n") == 1


def test_closed_standard_streams_are_no_error(tmp_path: Path) -> None:
    assert bash("WHET --version >&-").returncode == 0
    assert bash("WHET config quickstart >&- 2>&- <&-").returncode == 0
    done = bash("WHET train no_such_recipe >&-")
    assert done.returncode == 2 and done.stderr.startswith("whet: There is no") and done.stdout == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_is_full_is_not_called_a_full_disk() -> None:
    done = bash("WHET config > /dev/full")
    assert done.returncode == 2
    assert "output could not be written" in done.stderr and "output_dir" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert bash("WHET train no_such_recipe > /dev/full").stderr.startswith("whet: There is no")


def test_characters_that_the_output_cannot_encode_are_written_out() -> None:
    code = "from whetstone.__main__ import run; from whetstone.commands import train\n"
    code += "train.DESCRIPTION = '▁'; run(['train', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**PATH, "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0 and b"\\u2581" in done.stdout


def test_a_limit_on_the_size_of_files_is_a_sentence(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            atomic_write(tmp_path / "x.json", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    for error in (
        caught.value,
        RuntimeError("I/O error: File too large (os error 27)"),
    ):  # as safetensors says it
        sentence = sentence_of(error)
        assert sentence is not None and "ulimit -f" in sentence and "auto_resume=true" in sentence
    assert sentence_of(RuntimeError("something else")) is None
    assert sentence_of(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("unshare") is None or os.getuid() != 0,
    reason="needs root and unshare to take /proc away",
)
def test_without_proc_a_run_is_refused_in_one_sentence() -> None:
    done = bash("unshare -m bash -c 'mount -t tmpfs none /proc && WHET train'")
    if "permission denied" in done.stderr.lower() or "unshare failed" in done.stderr:
        pytest.skip("this machine lets nobody make a mount namespace")
    assert done.returncode == 2
    assert done.stderr.startswith("whet: There is no /proc") and done.stderr.count("\n") == 1
