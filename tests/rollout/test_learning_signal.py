"""A run that can learn nothing says so after three steps, once, with the reason and the remedy."""

import pytest

from whetstone.config import load
from whetstone.rollout.learning_signal import LearningSignal
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn


def group(*rewards: float, answer: str | None = "1", finish: Finish = Finish.STOP, **changes) -> Group:
    return Group(
        problem=Problem(id="x/0", task="x", messages=({"role": "user", "content": "?"},), answer="1"),
        rollouts=tuple(
            Rollout(
                prompt_ids=(1,),
                turns=(
                    Turn(
                        completion=Completion(
                            token_ids=(1,), logprobs=(0.0,), finish=finish, policy_version=0
                        )
                    ),
                ),
                text="",
                score=Score(reward=r, parts={"correct": float(r >= 1)}, answer=answer, **changes),
            )
            for r in rewards
        ),
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


WRONG, RIGHT = (0.0, 0.0), (1.0, 1.0)


@pytest.mark.parametrize(
    ("batch", "reason", "remedy"),
    [
        ([group(*WRONG)], "all 6 completions were wrong", "num_generations"),
        ([group(*RIGHT)], "all 6 completions were right", "harder"),
        (
            [group(*WRONG, finish=Finish.LENGTH)],
            "6 of 6 completions reached max_completion_length (128)",
            "Raise it",
        ),
        ([group(*WRONG, answer=None)], "no answer was found in 6 of 6 completions", "developer_prompt"),
        (
            [group(*WRONG, answer=None, failure="ValueError")],
            "scoring failed on 6 of 6 completions (first: ValueError)",
            "reward function",
        ),
        ([group(*WRONG), group(*RIGHT)], "6 of 12 completions were right, but", "temperature"),
    ],
)
def test_the_third_step_without_variance_is_told_with_its_reason(
    caplog: pytest.LogCaptureFixture, batch: list[Group], reason: str, remedy: str
) -> None:
    signal = LearningSignal(load("quickstart").config)
    for _ in range(2):
        signal.observe(batch)
    early = warnings(caplog)  # a failure is named at once, and once
    assert [w[0] for w in early] == ["S"] * reason.startswith("scoring")
    signal.observe(batch)
    (warning,) = warnings(caplog)[len(early) :]
    assert "3 steps in a row" in warning and reason in warning and remedy in warning
    for _ in range(5):
        signal.observe(batch)
    assert len(warnings(caplog)) == 1 + len(early)


def test_one_step_with_variance_begins_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    signal = LearningSignal(load("quickstart").config)
    for batch in ([group(*WRONG)] * 2, [group(*WRONG)], [group(*WRONG), group(0.0, 1.0)], [group(*WRONG)]):
        signal.observe(batch)
    assert warnings(caplog) == []


def test_batch_baseline_needs_variance_between_groups(
    caplog: pytest.LogCaptureFixture,
) -> None:
    signal = LearningSignal(load("quickstart", ["advantage=reinforce_pp"]).config)
    for _ in range(4):
        signal.observe([group(*WRONG), group(*RIGHT)])
    assert warnings(caplog) == []
