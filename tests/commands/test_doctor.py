"""`whet doctor`: each line under conditions that are simulated by what torch, the OS and importlib report."""

import errno
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich
import torch
from rich.console import Console

from tests.support.doctor import GB, FakeGpus, by_name, config_of
from whetstone.__main__ import run
from whetstone.commands import doctor
from whetstone.commands.doctor import document, examine, gpu, machine, model, packages
from whetstone.commands.doctor.check import Check
from whetstone.engines.packages import is_supported, supported_versions
from whetstone.errors import UserError
from whetstone.run import host
from whetstone.sandbox.languages import LANGUAGES, missing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"


@pytest.fixture(scope="module")
def here() -> list[Check]:
    """The lines of this machine, as it is."""
    return examine()


# --- this machine, the output, the exit codes ---


def test_this_machine(here: list[Check]) -> None:
    found = {(check.section, check.name): check for check in here}
    assert len(found) == len(here)
    for check in here:
        assert (check.status == "ok") == (check.remedy == ""), check
    for name in LANGUAGES:
        check = found["Languages of programs", name]
        assert (check.status == "ok") == (missing(name) is None)
    assert found["Engines (rollout_engine)", "native"].status == "ok"
    assert found["Packages", "reasoning-gym"].status == "ok"
    assert ("GPU", "GPU") not in found or not torch.cuda.is_available()


def test_the_document_and_the_exit_codes(
    here: list[Check], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        Check("Machine", "CPU", "ok", "2 cores"),
        Check("Machine", "memory", "warning", "[red]1 GB\x1b[2J", "buy some"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda config: lines)
    assert run(["doctor", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert list(whole) == ["whetstone", "ok", "checks"] and whole["ok"] is True
    assert [list(entry) for entry in whole["checks"]] == [
        ["section", "name", "status", "detail", "remedy"]
    ] * 2
    assert whole["checks"][1]["detail"] == "[red]1 GB\x1b[2J" and whole["checks"][0]["remedy"] == ""
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "[red]1 GB\\x1b[2J" in shown and "0 problems, 1 warning" in shown
    lines.append(Check("GPU", "GPU 0", "problem", "no kernels", "another build"))
    assert run(["doctor"]) == 1
    capsys.readouterr()
    assert run(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert len(json.loads(document(here))["checks"]) == len(here)


def test_a_configuration_is_loaded_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []
    monkeypatch.setattr(doctor, "examine", lambda config: given.append(config) or [])
    assert run(["doctor", "quickstart", "max_steps=7"]) == 0 and given[-1].update.max_steps == 7
    assert run(["doctor", "max_steps=8"]) == 0 and given[-1].update.max_steps == 8
    assert run(["doctor"]) == 0 and given[-1] is None
    assert run(["doctor", "no_such_recipe"]) == 2
    assert run(["doctor", "max_stepz=7"]) == 2
    assert "'max_steps'" in capsys.readouterr().err


def test_long_lines_continue_in_their_column(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check("Machine", "GPU", "warning", "[none] " + "words " * 30, "do it")
    monkeypatch.setattr(doctor, "examine", lambda config: [check])
    out = io.StringIO()
    monkeypatch.setattr(rich, "_console", Console(file=out, width=80, force_terminal=True, color_system=None))
    run(["doctor"])
    _, first, *others, _ = out.getvalue().splitlines()
    assert first.startswith("  warning  GPU  [none] words")
    assert others and all(line.startswith(" " * 16 + "words") for line in others[:-1])
    assert max(len(line) for line in (first, *others)) <= 80


# --- machine, folders ---


def machine_line(name: str, config: Any = None) -> Check:
    return by_name(machine.check_machine(config))[name]


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_line("Python").status == "ok"
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.10.4")
    assert machine_line("Python").status == "problem"


def test_memory_and_the_limit_of_a_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {30 << 20} kB\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{8 * GB}\n")
    (group.parent / "memory.current").write_text(f"{5 * GB}\n")
    (group.parent / "memory.stat").write_text(f"anon 1\ninactive_file {GB}\n")
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "total_memory", lambda: 32 * GB)
    assert host.memory_limit() == 8 * GB
    assert host.available_memory() == 4 * GB  # 8 less the 5 that are used, without a cache of 1
    assert machine_line("memory").status == "ok" and "32.0 GB" in machine_line("memory").detail
    (group.parent / "memory.current").write_text(f"{8 * GB}\n")
    assert host.available_memory() == GB
    assert machine_line("memory").status == "warning"
    # Version 1: its own files beneath `memory`, and a number near 2^63 for no limit.
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:cpu,memory:/a\n")
    first = tmp_path / "cgroup" / "memory" / "a"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (first.parent / "memory.limit_in_bytes").write_text(f"{3 * GB}\n")
    (first.parent / "memory.usage_in_bytes").write_text("0\n")
    assert host.memory_limit() == 3 * GB and host.available_memory() == 3 * GB


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    usage = SimpleNamespace(total=GB // 16, free=GB // 16)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert machine_line("shared memory").status == "warning"
    assert "shared memory" not in by_name(machine.check_machine(config_of()))  # one process needs none
    for setting in ("tp_size=2", "rollout_engine=vllm"):
        assert machine_line("shared memory", config_of(setting)).status == "problem"
    usage.free = 8 * GB
    assert machine_line("shared memory").status == "ok"


def test_folders_and_disks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of(f"output_dir={tmp_path}/new/runs")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    checks = by_name(machine.check_folders(config))
    assert list(checks) == ["output_dir", "model cache", "own cache", "temporary"]
    assert checks["output_dir"].status == "ok" and f"{tmp_path}/hf/hub" in checks["model cache"].detail
    assert list(tmp_path.iterdir()) == []  # nothing is left, and nothing is made
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GB))
    assert by_name(machine.check_folders(config))["output_dir"].status == "warning"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GB // 100))
    checks = by_name(machine.check_folders(config))
    assert checks["output_dir"].status == "problem" and checks["model cache"].status == "warning"

    def refuse(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    checks = by_name(machine.check_folders(config))
    assert checks["output_dir"].status == "problem" and "output_dir" in checks["output_dir"].remedy
    assert checks["own cache"].status == "warning" and "WHETSTONE_CACHE" in checks["own cache"].remedy


# --- packages, engines, extras ---


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Package -> version; a test changes it."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(packages, "is_installed", lambda name: name.replace("_", "-") in versions)
    monkeypatch.setattr(packages, "version", lambda name: versions.get(name))
    yield versions


def test_requirements(installed: dict[str, str]) -> None:
    installed |= {
        "torch": "2.13.0+cu128",
        "transformers": "5.16.1",
        "peft": "0.19.0",
        "reasoning-gym": "0.1.26",
    }
    checks = by_name(packages.check_requirements(None))
    assert [check.status for check in checks.values()] == ["ok", "ok", "ok", "warning"]
    assert checks["reasoning-gym"].remedy == "pip install 'reasoning-gym==0.1.25'"
    del installed["torch"]
    assert by_name(packages.check_requirements(None))["torch"].status == "problem"


def test_without_torch_no_gpu_is_looked_for(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "whetstone.commands.doctor.gpu", SimpleNamespace(check_gpus=None))
    monkeypatch.setattr(machine, "check_sandbox", lambda config: [])
    assert by_name(examine(config_of()))["torch"].status == "problem"


def test_engines_and_their_versions(installed: dict[str, str]) -> None:
    vllm = config_of("rollout_engine=vllm")
    assert supported_versions("vllm") == ">=0.22,<0.33"
    assert is_supported("vllm", "0.32.1") and not is_supported("vllm", "0.33.0")
    installed |= {"torch": "2.13.0", "transformers": "5.16.1"}
    statuses = [check.status for check in packages.check_engines(None)]
    assert statuses == ["ok", "ok", "warning", "warning"]
    (check,) = packages.check_engines(vllm)
    assert check.status == "problem" and check.remedy == "pip install 'vllm>=0.22,<0.33'"
    installed["vllm"] = "0.33.0"
    assert by_name(packages.check_engines(None))["vllm"].status == "warning"
    assert packages.check_engines(vllm)[0].status == "problem"
    installed["vllm"] = "0.32.0"
    assert packages.check_engines(vllm)[0].status == "ok"
    assert [check.name for check in packages.check_engines(config_of())] == ["native"]


def test_running_servers_and_own_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of("rollout_engine=vllm", "rollout_servers=node1:8000,node2:8000")
    monkeypatch.setattr(packages.HttpClient, "is_healthy", lambda self: "node1" in self.url)
    assert [check.status for check in packages.check_engines(config)] == ["ok", "problem"]
    file = tmp_path / "mine.py"
    file.write_text("class Engine: ...\n")
    (check,) = packages.check_engines(config_of(f"rollout_engine={file}:Engine"))
    assert check.status == "ok"
    (check,) = packages.check_engines(config_of(f"rollout_engine={tmp_path}/other.py:Engine"))
    assert check.status == "problem"


def test_extras(installed: dict[str, str]) -> None:
    checks = packages.check_extras(None)
    assert [check.name for check in checks] == ["ray", "wandb", "tensorboard", "trackio"]
    assert {check.status for check in checks} == {"warning"}
    needed = config_of("report_to=tensorboard", "sandbox_pool=ray")
    checks = packages.check_extras(needed)
    assert [check.name for check in checks] == ["tensorboard", "ray"]
    assert {check.status for check in checks} == {"problem"}
    assert packages.check_extras(config_of()) == []
    installed["tensorboard"] = "2.18.0"
    assert packages.check_extras(needed)[0].status == "ok"


def test_the_token_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hub login" not in by_name(packages.check_extras(config_of()))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    check = by_name(packages.check_extras(config_of("push_to_hub=true")))["hub login"]
    assert check.status == "ok" and "secret" not in check.detail
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)  # this machine may have one in a file
    check = by_name(packages.check_extras(config_of("push_to_hub=true")))["hub login"]
    assert check.status == "warning" and "hf auth login" in check.remedy


def test_the_key_of_wandb(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed["wandb"] = "0.20.1"
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))

    def status(*settings: str) -> str:
        config = config_of("report_to=wandb") if settings else None
        check = by_name(packages.check_extras(config))["wandb login"]
        assert "secret" not in check.detail + check.remedy
        return check.status

    assert status() == "warning" and status("config") == "problem"
    file.write_text("machine elsewhere.org login user password secret\n")
    assert status() == "warning"
    file.write_text("machine api.wandb.ai login user password secret\n")
    file.chmod(0o600)
    assert status() == "ok"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert status() == "warning"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert status() == "ok"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert status("config") == "ok"
    file.write_text("machine\n")  # broken
    monkeypatch.delenv("WANDB_MODE")
    assert status() == "warning"
    assert "wandb login" not in by_name(packages.check_extras(config_of("report_to=tensorboard")))


# --- model, sandbox, languages ---


def test_the_model_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers: dict[str, str | None] = {}
    monkeypatch.setattr(model, "ask_hub", lambda name: answers[name])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("WHETSTONE_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def line(name: str) -> Check:
        (check,) = model.check_model(config_of(f"model_name_or_path={name}"))
        return check

    assert model.check_model(None) == []
    assert line("pebble").status == "ok"
    assert line("./nowhere").status == "problem"
    answers["a/b"] = None
    assert line("a/b").status == "ok"
    answers["a/b"] = "GatedRepoError: 403"
    assert line("a/b").status == "problem" and "hf auth login" in line("a/b").remedy
    answers["a/b"] = "ConnectError: no route"
    assert line("a/b").status == "problem" and "folder" in line("a/b").remedy
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in line("a/b").remedy
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).touch()
    assert line("a/b").status == "ok"
    assert line("smollm2-135m").status == "warning"  # the package registry may have it
    (tmp_path / "own" / "smollm2-135m").mkdir(parents=True)
    assert line("smollm2-135m").status == "ok"
    answers["a/c"] = None
    (check,) = model.check_model(config_of("eval_only=true", f"checkpoint_path={tmp_path}"))
    assert check.status == "problem"  # no model in it


def test_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakePool:
        kind, statement = "filters", "seccomp"

        def __init__(self, isolation: str) -> None:
            if isolation == "namespaces":
                raise UserError("No safe way: allow something.")

        def __enter__(self) -> "FakePool":
            return self

        def __exit__(self, *_: object) -> None: ...
        def start(self, language: str) -> None: ...

    monkeypatch.setattr(machine, "LocalPool", FakePool)
    assert machine.check_sandbox(None)[0].status == "warning"
    assert machine.check_sandbox(config_of("sandbox_isolation=filters"))[0].status == "ok"
    (check,) = machine.check_sandbox(config_of("sandbox_isolation=namespaces"))
    assert check.status == "problem" and check.detail == "No safe way"


def test_languages_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "missing", lambda name: "no" if name == "q" else None)
    assert by_name(machine.check_languages(None))["q"].status == "warning"
    assert machine.check_languages(config_of()) == []
    code = "datasets={code: {config: {path: problems, language: %s}}}"
    (check,) = machine.check_languages(config_of(code % "q"))
    assert check.status == "problem" and check.remedy == LANGUAGES["q"].install_hint
    (check,) = machine.check_languages(config_of(code % "py"))
    assert check.name == "python" and check.status == "ok"


# --- docs/doctor.md ---


def test_the_page_has_every_line(
    here: list[Check], installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table names the lines of this machine, of one with GPUs, and of the CONFIG form; no others."""
    rows = re.findall(r"^\| ([^|]+) \| `([^`|]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 20
    seen = {(check.section, check.name) for check in here}
    installed["wandb"] = "0.20.1"
    for settings in (None, config_of("push_to_hub=true")):
        seen |= {(check.section, check.name) for check in packages.check_extras(settings)}
    seen |= {
        ("Engines (rollout_engine)", "server"),
        ("Engines (rollout_engine)", "your own"),
        ("Model", "model"),
    }
    FakeGpus(monkeypatch, (9, 0), (9, 0))
    config = config_of("bf16=true", "tp_size=2", "rollout_engine=vllm", "server_devices=[1]")
    seen |= {(check.section, check.name) for check in gpu.check_gpus(config)}
    seen |= {("GPU", "GPU"), ("Machine", "shared memory")}
    named = {(section, re.sub(r"^GPU \d", "GPU <n>", name)) for section, name in seen}
    languages = {("Languages of programs", name) for name in LANGUAGES}
    assert languages <= named
    named = (named - languages) | {("Languages of programs", "<language>")}
    assert sorted(rows) == sorted(named)
