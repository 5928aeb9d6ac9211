"""Environments of GEM, TextArena and SkyRL-gym, by name: the real packages, real episodes.

Slow, and skipped where a package is absent: each wants an environment of its own (gem-llm pins another
reasoning-gym).
"""

import importlib
import json
import random
import re
from pathlib import Path

import pytest

from tests.environments.playing import play, playing
from whetstone.config import build, load
from whetstone.environments.packages import PACKAGES, package_factory
from whetstone.errors import UserError
from whetstone.tasks.registry import environments_of, make_task
from whetstone.types import Finish, Rollout


def needs(prefix: str) -> None:
    kind = PACKAGES[prefix]
    pytest.importorskip(kind.module, reason=f"needs {kind.distribution} (pip install {kind.distribution})")


def observations(rollout: Rollout) -> list[str]:
    assert rollout.episode is not None
    return [str(m["content"]) for m in rollout.episode.messages if m["role"] == "user"]


def bisect(low: int, high: int, write: str):
    bounds = [low, high]

    def script(turn: int, new: str) -> str:
        middle = sum(bounds) // 2
        if turn and ("higher than" in new or "number is higher" in new):
            bounds[0] = middle + 1
        elif turn and ("lower than" in new or "number is lower" in new):
            bounds[1] = middle - 1
        return write.format(sum(bounds) // 2)

    return script


@pytest.mark.parametrize("prefix", PACKAGES)
def test_an_absent_package_is_named_with_its_remedy(prefix, monkeypatch):
    kind = PACKAGES[prefix]

    def absent(name: str, package: str | None = None):
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UserError, match=f"pip install {kind.distribution}"):
        package_factory(f"{prefix}:anything")


def test_the_key_environment_is_an_environment_factory():
    loaded = load(None, ["environment=gem:game:GuessTheNumber-v0-easy"])
    assert loaded.config.tasks.datasets["environment"].config == {
        "factory": "gem:game:GuessTheNumber-v0-easy"
    }
    assert environments_of(loaded.config) == ["gem:game:GuessTheNumber-v0-easy"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_gem_plays_as_it_does_by_itself(seed):
    needs("gem")
    name = "gem:game:GuessTheNumber-v0-easy"
    with playing({"datasets": {name: {}}, "dataset_seed": seed + 1}) as session:
        rollout = play(session, bisect(1, 10, "I guess \\boxed{{{}}}"))
        problem = session.mixture.problem(0)
    assert rollout.episode is not None and rollout.episode.error is None
    own = importlib.import_module("gem").make("game:GuessTheNumber-v0-easy")
    opening, info = own.reset(seed=problem.answer["seed"] % (1 << 32))
    assert problem.question == f"{opening}{info['suffix']}"
    said = [m["content"] for m in rollout.episode.messages if m["role"] == "assistant"]
    steps = [own.step(text) for text in said]
    assert [step[2] or step[3] for step in steps] == [False] * (len(steps) - 1) + [True]
    expected = [f"{text}\n{info['suffix']}" if not done else text for text, _, done, _, info in steps]
    assert observations(rollout) == expected
    assert rollout.episode.rewards == tuple(step[1] for step in steps)
    assert rollout.score.reward == rollout.score.parts["correct"] == 1.0  # 4 turns suffice for 10 numbers


@pytest.mark.slow
def test_gem_scores_reasoning_gym_and_refuses_programs():
    needs("gem")
    name = "gem:rg:chain_sum"
    config = build({"datasets": {name: {"config": {"size": 50}}}, "eval_num_samples": 0})
    task = make_task(config, name, config.tasks.datasets[name], "train")
    state = random.getstate()
    problem = task.problem(3)
    assert random.getstate() == state  # GEM seeds the global generator
    assert problem.question == task.problem(3).question
    episode = package_factory(name)(size=50)
    assert problem.question.startswith(str(episode.reset(problem.answer["seed"])).strip())
    assert episode.step(f"\\boxed{{{episode.environment.data['answer']}}}")[1:3] == (1.0, True)
    with pytest.raises(UserError, match="run_programs"):
        package_factory("gem:code:CodeContest")()
    with pytest.raises(UserError, match="GuessTheNumber-v0-easy"):
        package_factory("gem:game:GuesTheNumber-v0-easy")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "-raw", "-train"])
def test_textarena_is_told_each_thing_once(version):
    needs("textarena")
    name = f"textarena:GuessTheNumber-v0{version}"
    with playing({"datasets": {name: {}}}) as session:
        rollout = play(session, bisect(1, 20, "My guess: [{}]"))
        problem = session.mixture.problem(0)
    assert problem.question.startswith("You are Player 0. You are playing Guess The Number.")
    *hints, last = observations(rollout)
    assert all(re.fullmatch("The target number is (higher|lower).", hint) for hint in hints)
    assert "You guessed the correct number" in last
    assert rollout.score.reward == rollout.score.parts["correct"] == 1.0
    assert rollout.completion.finish is Finish.STOP
    with playing({"datasets": {name: {}}}) as session:
        lost = play(session, lambda turn, new: "nonsense")
    assert "invalid move" in observations(lost)[0].lower() and lost.score.parts["correct"] == 0.0
    assert len(lost.turns) == 2  # one error is allowed


@pytest.mark.slow
def test_textarena_refuses_games_of_several_players():
    needs("textarena")
    config = build({"datasets": {"textarena:TicTacToe-v0": {}}, "eval_num_samples": 0})
    [(name, spec)] = config.tasks.datasets.items()
    with pytest.raises(UserError, match="several players"):
        make_task(config, name, spec, "train").problem(0)


@pytest.mark.slow
def test_skyrl_gets_its_rows(tmp_path: Path):
    needs("skyrl")
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 times 4?"}]
    row = {"prompt": question, "reward_spec": {"method": "rule", "ground_truth": "12"}, "extra_info": {}}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**row, "env_class": "gsm8k_multi_turn"}) + "\n")
    settings = {"factory": "skyrl:gsm8k_multi_turn", "path": str(file), "settings": {"max_turns": 3}}
    values = {"datasets": {"environment": {"config": settings}}, "developer_prompt": None}
    with playing(values) as session:
        assert [dict(m) for m in session.mixture.problem(0).messages] == question
        won = play(session, lambda turn, new: ["#### 11", "It is 3 * 4.\n#### 12"][turn])
        lost = play(session, lambda turn, new: "#### 11")
    assert won.episode is not None and won.episode.rewards == pytest.approx((0.2 / 3, 1.0))
    assert won.score.reward == pytest.approx(1 + 0.2 / 3) and won.score.parts["correct"] == 1.0
    assert "tentative numeric answer" in observations(won)[0]
    assert lost.episode is not None and lost.score.parts["correct"] == 0.0 and len(lost.turns) == 3
    assert observations(lost)[1].startswith("Now provide only the final numeric answer")
    with pytest.raises(UserError, match="run_programs"):
        package_factory("skyrl:searchcode")()
