"""`whet completion`: each script in its own shell, installed as `whet completion --help` says. One that is
not here is skipped.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from whetstone.__main__ import run
from whetstone.commands import COMMANDS
from whetstone.config import Config, flatten

# What is typed before Tab, and the line after it. `folder/` and `my rows.yaml` are in the current folder.
LINES = {
    "whet pro": "whet profile ",
    "whet --ver": "whet --version ",
    "whet train quick": "whet train quickstart ",
    "whet train max_st": "whet train max_steps=",
    "whet train fold": "whet train folder/",
    "whet train output_dir=fold": "whet train output_dir=folder/",
    "whet train my": r"whet train my\ rows.yaml ",
    "whet profile --st": "whet profile --steps ",
    "whet completion z": "whet completion zsh ",
}
# An interactive zsh in a pseudo-terminal: Tab completes, Ctrl-B writes the line that came of it.
ZSH_TYPES = r"""
zmodload zsh/zpty
zpty shell zsh -d -i
for line; do zpty -w -n shell "$line"$'\t\x02'; done
zpty -w shell exit
zpty -r shell screen '*never shown*'
"""
ZSHRC = r"""
fpath=(~/.zfunc $fpath)
autoload -Uz compinit && compinit -u
tell() { print -r -- "$BUFFER" >> ~/lines; BUFFER= }
zle -N tell && bindkey '^B' tell
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and current folder with `whet` in $PATH: fish completes only commands that exist."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "my rows.yaml").touch()
    command = tmp_path / "bin/whet"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    for name in ("HOME", "ZDOTDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def install(shell: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert run(["completion", shell]) == 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(capsys.readouterr().out)


def in_shell(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_bash(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("bash", home / "completion.bash", capsys)
    code = """
source ~/completion.bash
compopt() { echo "$2"; }
for line; do
  COMP_WORDS=($line) COMP_CWORD=$(($(wc -w <<< "$line") - 1)) && _whet && echo "${COMPREPLY[@]}"
done
"""
    words = [line for line in LINES if "=" not in line]  # bash itself splits at =
    shown = in_shell("bash", "-c", code, "bash", *words)
    assert shown == [
        *("profile", "--version", "quickstart", "nospace", "max_steps="),
        *("filenames", "folder", "filenames", "my rows.yaml", "--steps", "zsh"),
    ]


def test_zsh(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("zsh", home / ".zfunc/_whet", capsys)
    (home / ".zshrc").write_text(ZSHRC)
    in_shell("zsh", "-f", "-c", ZSH_TYPES, "zsh", *LINES)
    assert (home / "lines").read_text().splitlines() == list(LINES.values())
    (home / ".zshrc").write_text(ZSHRC + "source ~/.zfunc/_whet\n")  # as `source <(whet completion zsh)`
    in_shell("zsh", "-f", "-c", ZSH_TYPES, "zsh", "whet pro")
    assert (home / "lines").read_text().splitlines()[-1] == "whet profile "


def test_fish(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("fish", home / ".config/fish/completions/whet.fish", capsys)
    offered = in_shell("fish", "-c", "for line in $argv; complete -C $line; end", *LINES)
    last_words = [line.split(" ", len(typed.split()) - 1)[-1] for typed, line in LINES.items()]
    assert [line.split("\t")[0] for line in offered] == [
        word.strip().replace("\\", "") for word in last_words
    ]
    assert offered[0] == f"profile\t{COMMANDS['profile']}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_everything(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*COMMANDS, "multi_tasks", *flatten(Config())))
