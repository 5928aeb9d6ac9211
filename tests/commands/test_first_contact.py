"""What a newcomer meets before anything runs: another Python, another system, a traceback, a README."""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from whetstone import __main__ as cli
from whetstone.commands import train as train_command
from whetstone.terminal.environment import REQUIRED

ROOT = Path(__file__).resolve().parents[2]


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('echo "pyenv: python3: command not found" >&2; exit 127', "does not start"),  # a shim that is off
        ('test "$1" = --version && echo Python 3.10.13; test -z "$2"', "Python 3.10.13 does not suit"),
    ],
)
def test_make_names_the_python_that_it_can_not_use(tmp_path: Path, text: str, says: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "-C", str(tmp_path), f"PYTHON={script(tmp_path, text)}", "train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    assert says in done.stdout and "make:  " not in done.stdout


def test_the_build_refuses_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile((ROOT / "scripts" / "build_backend.py").read_text(encoding="utf-8"), "build", "exec")
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11"):
        exec(code, {})


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_a_source_distribution_holds_everything_that_is_checked() -> None:
    """Code and tests, and what the tests read."""
    targets = project()["tool"]["hatch"]["build"]["targets"]
    assert {f"/{name}" for name in project()["tool"]["pyright"]["include"]} <= set(
        targets["sdist"]["include"]
    )


def test_a_required_package_that_is_missing_is_a_sentence() -> None:
    required = [text for text in project()["project"]["dependencies"] if ";" not in text]
    names = {re.split("[<>=]", text)[0] for text in required}
    assert {name.replace("-", "_").replace("pyyaml", "yaml") for name in names} == REQUIRED
    code = "import sys; sys.modules['rich'] = None; from whetstone.__main__ import main; main(['train'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("whet: The Python package rich is not installed")
    assert len(done.stderr.splitlines()) == 1


def test_every_page_names_the_same_pythons() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', text)
    assert bounds is not None
    versions = [f"3.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))]
    assert re.findall(r"Python :: (3\.\d+)", text) == versions
    assert re.search(rf"Python {versions[0]} to\s+{versions[-1]}", (ROOT / "README.md").read_text("utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"(3, {bounds[1]}) <= sys.version_info[:2] < (3, {bounds[2]})" in makefile
    assert makefile.count(f"{', '.join(versions[:-1])} or {versions[-1]}") == 2


def test_another_system_gets_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.run(["train"]) == 2
    assert "WSL" in capsys.readouterr().err
    assert cli.run(["--version"]) == 0


def test_a_traceback_says_where_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: argparse.Namespace) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(train_command, "run", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train"])
    told = capsys.readouterr().err
    assert ended.value.code == 1 and "ZeroDivisionError: of the test" in told
    page, section = re.search(r'(\w+\.md), "([^"]+)"', told.splitlines()[-1]).groups()  # type: ignore[union-attr]
    assert f"## {section}\n" in (ROOT / page).read_text(encoding="utf-8")
