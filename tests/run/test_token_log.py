"""The tokens of some groups of each step, in a file."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import run
from whetstone.run.token_log import choose_groups, observations, thin_out, tokens_file
from whetstone.types import Completion, Finish, Rollout, Score, Turn
from whetstone.update.token_table import NUMBERS, RULES


def read(folder: Path, step: int) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray]:
    with np.load(tokens_file(folder, step), allow_pickle=False) as file:
        description = json.loads(file["description"].tobytes())
        return description, file["token_ids"], file["numbers"].astype(np.float64), file["rules"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("tokens")
    run(
        parent, max_steps=2, log_completions_steps=1, prompts_per_step=4, log_tokens_groups=3,
        eval_num_samples=0, save_strategy="no",
    )  # fmt: skip
    return parent / "run"


def test_the_file_has_the_tokens_of_the_completions(folder: Path) -> None:
    for step in (1, 2):
        description, token_ids, numbers, rules = read(folder, step)
        columns = [name for name in NUMBERS if name not in ("kl", "value")]  # no reference, no critic
        assert description["columns"] == columns and description["rules"] == list(RULES)
        assert numbers.shape == (len(columns), len(token_ids)) and len(rules) == len(token_ids)
        assert len(description["completions"]) == 3 * 4
        lines = (folder / "completions" / f"step_{step}.jsonl").read_text().splitlines()
        written = {(row["problem"], row["sample"]): row for row in map(json.loads, lines)}
        start = 0
        for completion in description["completions"]:
            row = written[completion["problem"], completion["sample"]]
            span = slice(start, start + completion["tokens"])
            assert completion["tokens"] == row["length"] and completion["reward"] == row["reward"]
            text = "".join(description["texts"][str(token)] for token in token_ids[span])
            assert text.startswith(row["completion"])  # a stop token follows
            start = span.stop
        assert start == len(token_ids)


def test_equal_rewards_are_marked_others_sum_to_zero(folder: Path) -> None:
    advantage, weight = NUMBERS.index("advantage"), NUMBERS.index("weight")
    seen = set()
    for step in (1, 2):
        description, _, numbers, rules = read(folder, step)
        lines = (folder / "completions" / f"step_{step}.jsonl").read_text().splitlines()
        rewards: dict[str, list[float]] = {}
        for row in map(json.loads, lines):
            rewards.setdefault(row["problem"], []).append(row["reward"])
        start, totals = 0, {}
        for completion in description["completions"]:
            span = slice(start, start + completion["tokens"])
            equal = len(set(rewards[completion["problem"]])) == 1
            seen.add(equal)
            assert (((rules[span] >> RULES.index("equal_rewards")) & 1) == equal).all()
            assert (numbers[weight, span] == (0 if equal else 1)).all()
            assert len(set(numbers[advantage, span])) == 1
            totals.setdefault(completion["problem"], []).append(numbers[advantage, start])
            start = span.stop
        assert all(abs(sum(values)) < 1e-2 for values in totals.values())
    assert seen == {True, False}


def test_groups_are_chosen_by_the_seed() -> None:
    assert choose_groups(7, 64, 4) == choose_groups(7, 64, 4) != choose_groups(8, 64, 4)
    assert choose_groups(7, 3, 4) == [0, 1, 2]


def test_token_log_stays_within_its_bound_with_even_steps(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    for step in range(1, 101):
        tokens_file(tmp_path, step).write_bytes(b"x" * 1000)
        thin_out(tmp_path, 10_000)
    left = sorted(int(path.stem.removeprefix("tokens_")) for path in tmp_path.glob("completions/*"))
    assert len(left) == 10 and left[0] == 1 and left[-1] == 100
    assert max(np.diff(left)) <= 4 * 100 / 10


def test_rewritten_history_shows_its_new_tokens() -> None:
    said = Completion(token_ids=(7, 8), logprobs=(-1.0, -2.0), finish=Finish.STOP, policy_version=0)
    turns = (
        Turn(completion=said, observation_ids=(6,)),
        Turn(completion=said),
        Turn(completion=said, context_ids=(1, 2, 7, 9)),
        Turn(completion=said, context_ids=(1, 2)),
    )
    score = Score(reward=1.0, parts={}, answer=None)
    rollout = Rollout(prompt_ids=(1, 2), turns=turns, text="", score=score)
    assert list(observations(rollout)) == [(6,), (9,), (), ()]
