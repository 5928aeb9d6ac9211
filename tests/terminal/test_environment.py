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
from whetstone.terminal.environment import program, sentence_of

ROOT = Path(__file__).resolve().parents[2]
PATH = {**os.environ, "PYTHONPATH": str(ROOT)}


def bash(command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`WHET` in the command is ours."""
    command = command.replace("WHET", f"{sys.executable} -m whetstone")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=cwd, env=PATH)


def test_the_program_is_named_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "whet").write_text("#!/bin/sh\n")
    (folder / "whet").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/whet"
    monkeypatch.chdir("/")
    assert program() == str(folder / "whet").lstrip("/")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program() == str(folder / "whet")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert program() == "whet"
    (folder / "whet").unlink()
    assert program() == "whet"


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


def test_unencodable_characters_are_escaped() -> None:
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


@pytest.mark.parametrize(
    ("message", "setting"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "device=cpu"),
        ("The NVIDIA driver on your system is too old (found version 12020).", "whet doctor"),
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "CUDA_VISIBLE",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", "use_peft"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "use_peft"),
        ("unable to write to file </torch_12_34_0>: No space left on device (28)", "--shm-size"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)", "--shm-size"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error.", "--shm-size"),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", "collective_timeout_s"),
        ("gloo/transport: Timed out waiting 1800000ms for recv operation", "collective_timeout_s"),
        ("No available memory for the cache blocks. Try increasing", "server_gpu_memory_utilization"),
        ("Failed to find C compiler. Please specify via CC environment variable", "gcc"),
        ("[enforce fail at inline_container.cc:595] . unexpected pos 64 vs 0", "save_total_limit"),
        ("I/O error: No space left on device (os error 28)", "output_dir"),
    ],
)
def test_a_known_failure_names_what_to_change(message: str, setting: str) -> None:
    sentence = sentence_of(RuntimeError(message))
    assert sentence is not None and setting in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected scalar type Float but found Half"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/dev/shm/run/x"),
    ],
)
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    assert sentence_of(error) is None


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
