"""`whet doctor`: what it finds is what is there."""

import pytest
import torch

from whetstone.advice.doctor import examine
from whetstone.cli import run
from whetstone.sandbox.languages import LANGUAGES, missing


def test_the_doctor_tells_what_is_there_and_how_to_get_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    found = {(finding.section, finding.name): finding for finding in examine()}
    for name in LANGUAGES:
        finding = found["Languages of programs", name]
        assert finding.there == (missing(name) is None)
        assert finding.there or LANGUAGES[name].get in finding.says
    (sandbox,) = [finding for (section, _), finding in found.items() if section == "Sandbox for programs"]
    assert "rlimits" in sandbox.says or not sandbox.there
    assert found["Engines (rollout_engine)", "native"].there
    assert ("Machine", "GPU") not in found or not torch.cuda.is_available()
    assert run(["doctor"]) == 0
    assert "PyKX" in capsys.readouterr().out or not missing("q")


def test_it_takes_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "me"]) == 2
    assert "takes no words" in capsys.readouterr().err
