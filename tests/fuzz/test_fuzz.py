"""Thirty random configurations of `make fuzz`, with one further check each."""

from pathlib import Path

import pytest

from tests.fuzz.draw import undrawn, write_files
from tests.fuzz.trial import Trial, describe, some_checks
from whetstone.config.load import SECTION_OF


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def test_every_key_is_drawn_or_left_out_for_a_reason() -> None:
    assert not undrawn(set(SECTION_OF))


@pytest.mark.parametrize("seed", range(30))
def test_a_random_configuration_keeps_the_invariants(seed: int, files: Path, tmp_path: Path) -> None:
    result = Trial(seed, tmp_path, files).run(some_checks(seed, 1))
    assert not result.violations, describe(result)
