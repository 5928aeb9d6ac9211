"""`python -m benchmarks.trl` with environments and tools: TRL's own loop calls them, our scorer pays.

Real TRL and the embedded model, which was taught to call a tool.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.corpora.model_folders import PEBBLE
from tests.environments import counter, toolkit
from tests.model.test_observations import FAMILIES, make_chat
from tests.serving.test_tools import teach
from whetstone.config import LoadedConfig, build, load
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.policy import load_policy
from whetstone.tasks.mixture import build_tasks
from whetstone.types import Problem

trl = pytest.importorskip("trl")


from benchmarks.trl.environments import episode_class, judge  # noqa: E402
from benchmarks.trl.run import train_with_trl  # noqa: E402
from whetstone.environments.toolbox import tool_schemas  # noqa: E402

COUNTER = f"{Path(counter.__file__)}:Counter"
ADD = f"{Path(toolkit.__file__)}:plus"
SMALL: dict[str, Any] = {
    "device": "cpu",
    "developer_prompt": "null",
    "reward_funcs": "[accuracy]",
    "prompts_per_step": 1,
    "num_generations": 3,
    "max_completion_length": 160,
    "learning_rate": 1e-5,
    "temperature": 0.3,
    "max_steps": 1,
    "eval_num_samples": 0,
    "reward_workers": 1,
    "preflight": "off",
}


def loaded(folder: Path | str = "unused", **changes: Any) -> LoadedConfig:
    settings = {**SMALL, "output_dir": folder, "run_name": "run", **changes}
    return load(None, [f"{key}={value}" for key, value in settings.items()])


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call><|im_end|>"


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with the tokens and the template of Qwen 2.5, which TRL can read calls of."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_chat(FAMILIES["qwen2.5"]).tokenizer
    model = AutoModelForCausalLM.from_pretrained(PEBBLE)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.max_position_embeddings = 4096
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def taught(source: Path, folder: Path, problem: Problem, answer: str) -> Path:
    policy = load_policy(build({"model_name_or_path": str(source)}).model, None, torch.device("cpu"))
    chat = Chat(policy.tokenizer, build({"model_name_or_path": str(source)}).model)
    teach(policy, chat.prompt(problem), answer, 40)
    policy.lm.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_an_environment_in_trls_loop(untaught: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    question = [{"role": "user", "content": "Use the tool. "}]
    rows.write_text("".join(json.dumps({"prompt": question, "start": 3}) + "\n" for _ in range(4)))
    keys = {"environment_factory": COUNTER, "data_path": rows, "max_tool_calling_iterations": 2}
    problem = build_tasks(loaded(model_name_or_path=untaught, **keys).config, "train").problem(0)
    model = taught(untaught, tmp_path / "model", problem, call("add", number=7))
    train_with_trl(loaded(tmp_path, model_name_or_path=model, **keys))
    folder = tmp_path / "run"
    (metrics,) = [row for row in lines(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert metrics["episodes/tool_calls"] >= 1 and metrics["episodes/mean_turns"] > 1
    written = lines(folder / "completions" / "step_1.jsonl")
    assert len(written) == 3 and all(
        row["messages"][-1]["content"].endswith("Bring it to 10.") for row in written
    )
    for row in written:
        results = [message["content"] for message in row["turns"] if message["role"] == "tool"]
        last = ([text for text in results if "error" not in text] or ["3"])[-1]
        assert row["reward"] == row["parts"]["accuracy"] == float(last == "10")
        assert row["length"] < 160
    assert any(row["turns"][1] == {"role": "tool", "name": "add", "content": "10"} for row in written)
    assert (folder / "final_model").is_dir()


@pytest.mark.slow
def test_tools_of_ordinary_tasks_in_trls_loop(untaught: Path, tmp_path: Path) -> None:
    """A function of the user's, and one of ours; the task scores the last turn."""
    keys = {
        "datasets": "{chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}",
        "tools": f"[calculator, {ADD}]",
        "max_turns": 2,
        "eval_num_samples": 1,
        "eval_num_examples_to_print": 0,
    }
    config = loaded(model_name_or_path=untaught, **keys).config
    plain = build_tasks(config, "train").problem(0)
    schemas = tool_schemas(config.environments.tools)
    problem = Problem(id="p", task="t", messages=plain.messages, answer=None, tools=schemas)
    model = taught(untaught, tmp_path / "model", problem, call("plus", a=1, b=2))
    train_with_trl(loaded(tmp_path, model_name_or_path=model, **keys))
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    (metrics,) = [row for row in rows if row["kind"] == "train"]
    assert metrics["episodes/tool_calls"] >= 1 and metrics["episodes/mean_turns"] <= 2
    written = lines(tmp_path / "run" / "completions" / "step_1.jsonl")
    assert any(message["content"] == "3" for row in written for message in row["turns"])
    for row in written:
        assert row["completion"] == row["turns"][-1]["content"]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 1]


@pytest.mark.slow
def test_environments_beside_ordinary_tasks(untaught: Path, tmp_path: Path) -> None:
    keys = {"datasets": f"{{chain_sum: {{}}, {COUNTER}: {{}}}}", "prompts_per_step": 2}
    keys |= {"max_completion_length": 6, "num_generations": 2}
    train_with_trl(loaded(tmp_path, model_name_or_path=untaught, **keys))
    written = lines(tmp_path / "run" / "completions" / "step_1.jsonl")
    assert sorted(row["task"] for row in written) == sorted([COUNTER] * 2 + ["chain_sum"] * 2)
    assert all(("turns" in row) == (row["task"] == COUNTER) for row in written)


class Moody:
    """Depends on more than its seed, fails at times, and never says its reward."""

    resets = 0

    def reset(self, seed: int, fails: bool = False) -> str:
        Moody.resets += 1
        if fails:
            raise RuntimeError("no idea")
        return f"Game {seed}, try {Moody.resets}."

    def get_reward(self) -> str:
        return "good"


def test_an_environment_that_fails_costs_its_episode_the_reward() -> None:
    def problem(index: int) -> Problem:
        row = {"fails": index == 1}
        answer = {"seed": 4, "settings": {"unknown": 1} if index == 2 else {}, "row": row}
        text = f"Game 4, try {Moody.resets if index == 3 else 99}."
        return Problem(id="p", task="t", messages=({"role": "user", "content": text},), answer=answer)

    environment = episode_class(Moody, problem)()
    expected = ("something else", "no idea", "Moody", "returned a str as the reward")
    for index, reason in enumerate(expected):
        environment.reset(index=index, prompt="")
        outcome, error = judge(environment, "said")
        assert outcome == {"reward": 0.0, "correct": False, "last": "said"}
        assert error is not None and reason in error


def test_an_episode_begins_anew_with_the_problems_row() -> None:
    def problem(index: int) -> Problem:
        answer = {"seed": 1, "settings": {}, "row": {"start": 8 - index, "other": 1}}
        text = f"Use it. The counter is at {8 - index}. Bring it to 10."
        return Problem(id="p", task="t", messages=({"role": "user", "content": text},), answer=answer)

    environment = episode_class(counter.Counter, problem)()
    for index, number in ((0, 2), (1, 2)):
        environment.reset(index=index, prompt="ignored")
        environment.add(number=number)
        outcome, error = judge(environment, "Done.")
        assert error is None and outcome["reward"] == float(index == 0) and outcome["correct"] is (index == 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"datasets": "{guess_number: {}}"}, "guess_number.*Gymnasium's shape"),
        ({"environment": "gem:game:GuessTheNumber-v0"}, "gem:game.*Gymnasium's shape"),
        ({"datasets": "{chain_sum: {}}", "tools": "[python]"}, "python, a class"),
        ({"environment_factory": COUNTER, "turn_credit": "turn"}, "turn_credit"),
        ({"environment_factory": COUNTER, "max_observation_length": 5}, "max_observation_length"),
        ({"datasets": "{chain_sum: {}}", "rollout_func": f"{ADD}"}, "rollout_func"),
    ],
)
def test_what_trls_loop_can_not_run(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train_with_trl(loaded(model_name_or_path="pebble", **changes))


def test_a_template_without_tools_is_refused_by_trl(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"TRL rejects this.*tool calling"):
        train_with_trl(loaded(tmp_path, model_name_or_path="pebble", environment_factory=COUNTER))
