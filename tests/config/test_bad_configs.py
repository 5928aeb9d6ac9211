"""Every bad configuration of the corpus ends in one sentence and exit code 2, at once."""

import time

import pytest

from tests.corpora.configs import CASES, BadConfig, arguments
from whetstone.__main__ import run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:60])
def test_it_ends_in_one_sentence(case: BadConfig, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.process_time()
    assert run(arguments(case, tmp_path, verb="config")) == case.exit_code
    assert time.process_time() - begun < 5  # of this process alone, whatever else the machine does
    error = capsys.readouterr().err
    assert error.startswith("whet: ") and error.count("\n") == 1 and len(error) < 2_000, error
    assert not (tmp_path / "runs").exists()
