"""`whet doctor`: what it finds is what is there."""

import io

import pytest
import rich
import torch
from rich.console import Console

from whetstone.__main__ import run
from whetstone.commands import doctor
from whetstone.commands.doctor import Check, examine
from whetstone.sandbox.languages import LANGUAGES, missing


def test_the_doctor_tells_what_is_there_and_how_to_get_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    found = {(finding.section, finding.name): finding for finding in examine()}
    for name in LANGUAGES:
        finding = found["Languages of programs", name]
        assert finding.there == (missing(name) is None)
        assert finding.there or LANGUAGES[name].install_hint in finding.says
    sandbox, scoring = [
        f for (section, _), f in found.items() if section == "Sandbox for programs and scorers"
    ]
    assert scoring.name == "scoring" and scoring.there == sandbox.there
    assert "rlimits" in sandbox.says or not sandbox.there
    assert found["Engines (rollout_engine)", "native"].there
    assert ("Machine", "GPU") not in found or not torch.cuda.is_available()
    assert run(["doctor"]) == 0
    assert "PyKX" in capsys.readouterr().out or not missing("q")


def test_it_takes_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "me"]) == 2
    assert "'me'" in capsys.readouterr().err


def test_long_lines_go_on_in_their_column(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Check(section="Machine", name="GPU", there=False, says="[none] " + "words " * 30)
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    out = io.StringIO()
    monkeypatch.setattr(rich, "_console", Console(file=out, width=80, force_terminal=True, color_system=None))
    run(["doctor"])
    _, first, *others = out.getvalue().splitlines()
    assert first.startswith("  no   GPU          [none] words")
    assert others and all(line.startswith(" " * 20 + "words") for line in others)
    assert max(len(line) for line in (first, *others)) <= 80
