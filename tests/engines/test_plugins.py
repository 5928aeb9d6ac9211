"""An engine in a file of the user, `rollout_engine: my_engine.py:Engine`."""

from pathlib import Path

import pytest

from tests.conftest import make_policy
from whetstone.__main__ import run
from whetstone.config import build, load
from whetstone.config.engine_traits import ENGINE_TRAITS, engine_traits
from whetstone.engines import ENGINES, make_engine
from whetstone.engines.packages import check_packages
from whetstone.errors import UserError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extending" / "engine.py"
HALF = "class Half:\n    def generate(self, requests, sampling): ...\n"


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "my_engine.py").write_text(EXAMPLE.read_text() + HALF)
    return f"{tmp_path}/my_engine.py:PlainEngine"


# tests/docs/test_extending.py has a run with this engine that samples no batch ahead.
@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.slow), ["async_rollouts=1"]])
def test_it_trains(tmp_path: Path, spec: str, more: list[str]) -> None:
    settings = f"output_dir={tmp_path} run_name=own max_steps=2 prompts_per_step=2 num_generations=2"
    limits = "max_completion_length=4 eval_num_samples=0 reward_workers=1 preflight=off"
    words = [f"rollout_engine={spec}", *settings.split(), *limits.split(), *more]
    assert run(["train", "quickstart", *words]) == 0
    rows = (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) >= 2


def test_every_engine_has_traits_and_a_constructor() -> None:
    assert list(ENGINES) == list(ENGINE_TRAITS)
    assert engine_traits("my_engine.py:Engine").in_process


def test_what_is_missing_is_named(tmp_path: Path, spec: str) -> None:
    with pytest.raises(UserError, match=r"rollout_engine.*'absent\.py:Engine'"):
        check_packages(load("quickstart", ["rollout_engine=absent.py:Engine"]).config)
    check_packages(load("quickstart", [f"rollout_engine={spec}"]).config)
    with pytest.raises(UserError, match="update_weights"):
        make_engine(build({"rollout_engine": spec.replace("PlainEngine", "Half")}), make_policy())
