"""A script for TRL's GRPOTrainer: its import line changed, it trains here on the same prompts and columns."""

import dataclasses
import inspect
import json
import runpy
from pathlib import Path
from typing import Any

import pandas
import pytest

trl = pytest.importorskip("trl")
import peft  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import whetstone  # noqa: E402
from whetstone.api import TRL_DEFAULTS, UNSUPPORTED  # noqa: E402
from whetstone.errors import UserError  # noqa: E402
from whetstone.model.hub import resolve  # noqa: E402

ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {i} + 1?"}], "solution": f"{i + 1}"} for i in range(8)
]
TEXTS = [{"prompt": f"{i} + 1 =", "tests": [{"n": i}]} for i in range(8)]
LENGTH = f"{Path(__file__).parents[1] / 'data' / 'own_rewards.py'}:length_of_text"
# The shape of TRL's quickstart.
SCRIPT = """
import json

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

dataset = Dataset.from_list(ROWS)
SEEN = "seen.jsonl"


def reward_len(completions, **kwargs):
    columns = {name: kwargs[name] for name in ("prompts", "solution", "tests") if name in kwargs}
    columns["completions"] = [type(completion).__name__ for completion in completions]
    with open(SEEN, "a") as file:
        file.write(json.dumps(columns) + "\\n")
    return [float(len(completion)) for completion in completions]


training_args = GRPOConfig(
    output_dir="out", max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=4,
    use_cpu=True, report_to="none", bf16=False, save_strategy="no", disable_tqdm=True, seed=3,
)
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=FUNCS, args=training_args, train_dataset=dataset,
)
trainer.train()
trainer.save_model(training_args.output_dir)
"""


def run_script(folder: Path, rows: list[dict[str, Any]], model: str, funcs: str, package: str) -> list[dict]:
    """What the reward function of the script was given."""
    text = SCRIPT.replace("from trl import", f"from {package} import")
    text = text.replace("Dataset.from_list(ROWS)", f"Dataset.from_list({rows!r})")
    text = text.replace("MODEL", repr(model)).replace("FUNCS", funcs)
    folder.mkdir()
    (folder / "script.py").write_text(text.replace('"seen.jsonl"', repr(str(folder / "seen.jsonl"))))
    runpy.run_path(str(folder / "script.py"), run_name="__main__")
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("rows", "funcs"), [(ROWS, "[reward_len, accuracy_reward]"), (TEXTS, "reward_len")])
def test_one_import_line_is_all_that_changes(
    rows: list[dict], funcs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = run_script(tmp_path / "trl", rows, resolve("pebble"), funcs, "trl")
    (tmp_path / "out").rename(tmp_path / "their_out")
    ours = run_script(tmp_path / "own", rows, "pebble", funcs, "whetstone")
    known = {json.dumps(row["prompt"]): row for row in rows}
    for calls in (theirs, ours):
        for call in calls:
            # The same columns, and each completion in the same form beside the row of its prompt.
            assert call.keys() == theirs[0].keys() == {"completions", "prompts", *rows[0]} - {"prompt"}
            assert set(call["completions"]) == set(theirs[0]["completions"])
            for column in call.keys() - {"completions", "prompts"}:
                found = [known[json.dumps(prompt)][column] for prompt in call["prompts"]]
                assert call[column] == found
    assert (tmp_path / "out" / "config.json").is_file() and (tmp_path / "their_out" / "config.json").is_file()
    (row,) = whetstone.Run("out").metrics
    assert row["kind"] == "train" and row["step"] == 1
    assert ("rewards/accuracy_reward/mean" in row) == ("accuracy" in funcs)


def test_a_text_prompt_has_the_tokens_of_trl(tmp_path: Path) -> None:
    """TRL gives a text to the tokenizer as it is; messages to the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("pebble"))
    for rows in (ROWS, TEXTS):
        args = whetstone.GRPOConfig(
            str(tmp_path / type(rows[0]["prompt"]).__name__), max_steps=1, num_generations=2, preflight="off",
            per_device_train_batch_size=4, max_completion_length=4, reward_workers=1,
        )  # fmt: skip
        trainer = whetstone.GRPOTrainer("pebble", [LENGTH], args, rows, processing_class=tokenizer)
        (step,) = whetstone.steps(None, **trainer.settings)
        for group in step.groups:
            prompt = next(row["prompt"] for row in rows if group.problem.question in str(row["prompt"]))
            if isinstance(prompt, str):
                expected = tokenizer(prompt)["input_ids"]
            else:
                options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
                expected = tokenizer.apply_chat_template(prompt, **options)["input_ids"]
            assert list(group.rollouts[0].prompt_ids) == expected


def test_every_parameter_of_the_constructor_is_decided() -> None:
    """It arrives in the settings, or one sentence names it."""
    probes: dict[str, Any] = {
        "model": "pebble", "reward_funcs": ["accuracy"], "args": whetstone.GRPOConfig("elsewhere"),
        "train_dataset": ROWS, "eval_dataset": TEXTS, "tools": ["tools.py:add"], "rollout_func": "r.py:play",
        "environment_factory": "e.py:Env", "peft_config": peft.LoraConfig(r=4),
        "processing_class": AutoTokenizer.from_pretrained(resolve("pebble")),
    }  # fmt: skip
    usual = whetstone.GRPOTrainer("pebble").settings
    parameters = list(inspect.signature(trl.GRPOTrainer.__init__).parameters)[1:]
    assert set(parameters) == {*probes, *UNSUPPORTED}
    assert parameters[:4] == list(inspect.signature(whetstone.GRPOTrainer.__init__).parameters)[1:5]
    for name in UNSUPPORTED:
        with pytest.raises(UserError, match=f"takes no {name}: "):
            whetstone.GRPOTrainer("pebble", **{name: [object()]})
    for name in probes.keys() - {"model"}:
        settings = whetstone.GRPOTrainer("pebble", **{name: probes[name]}).settings
        assert settings != usual, name
    assert whetstone.GRPOTrainer("pebble", optimizers=(None, None), callbacks=None).settings == usual
    with pytest.raises(UserError, match=r"'odd' \(argument\)"):
        whetstone.load_config(**whetstone.GRPOTrainer("pebble", odd=1).settings)


def test_every_argument_of_trl_loads(tmp_path: Path) -> None:
    """With the values that TRL itself works out; and its defaults are ours where we have none."""
    theirs = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True).to_dict()
    names = {field.name for field in dataclasses.fields(trl.GRPOConfig)} & theirs.keys()
    assert len(names) > 150
    for name in names:
        whetstone.GRPOConfig(**{name: theirs[name]})
    assert {name: theirs[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS
    config = whetstone.GRPOConfig("out", bf16=None, learning_rate=1e-5)
    assert (config.output_dir, config.num_train_epochs, config.bf16) == ("out", 3.0, True)
    config.learning_rate = 2e-5  # set later: it counts
    assert whetstone.GRPOTrainer("pebble", args=config).settings["learning_rate"] == 2e-5


def test_unknown_arguments_and_objects_are_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(UserError, match=r"'group_size' \(argument, did you mean 'num_generations'\?\)"):
        whetstone.GRPOConfig("out", group_size=4)
    with pytest.raises(UserError, match=r"^peft_config is a dict: give a peft\.LoraConfig"):
        whetstone.GRPOTrainer("pebble", "accuracy", train_dataset=ROWS, peft_config={"r": 8})
    with pytest.raises(UserError, match="args: import GRPOConfig from whetstone"):
        whetstone.GRPOTrainer("pebble", args=trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(UserError, match=r"^train_dataset is of type DataFrame"):
        whetstone.GRPOTrainer("pebble", train_dataset=pandas.DataFrame(TEXTS)).train()
    with pytest.raises(UserError, match=r"^No task is given: .*train_dataset"):
        whetstone.GRPOTrainer("pebble", "accuracy", whetstone.GRPOConfig(str(tmp_path))).train()
    model = AutoModelForCausalLM.from_pretrained(resolve("pebble"))
    with pytest.raises(UserError, match=r"^model: LlamaForCausalLM can't go into a file: .* a name"):
        whetstone.GRPOTrainer(model, "accuracy", train_dataset=ROWS).train()
    with pytest.raises(UserError, match=r"^reward_funcs: LlamaForCausalLM can't go"):
        whetstone.GRPOTrainer("pebble", [model], train_dataset=ROWS).train()
    trainer = whetstone.GRPOTrainer("pebble", "accuracy", whetstone.GRPOConfig(str(tmp_path)), ROWS)
    with pytest.raises(AttributeError, match=r"no push_to_hub: docs/python\.md"):
        trainer.push_to_hub()
    with pytest.raises(UserError, match="no final_model"):
        trainer.save_model()


def test_a_config_of_peft_is_translated() -> None:
    lora = peft.LoraConfig(
        r=8, lora_alpha=12, lora_dropout=0.1, use_rslora=True, target_modules=["v_proj", "q_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = whetstone.load_config(**whetstone.GRPOTrainer("pebble", peft_config=lora).settings).model
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 8, 12, 0.1)
    assert (model.use_rslora, model.lora_target_modules) == (True, ["q_proj", "v_proj"])
    usual = peft.LoraConfig()
    model = whetstone.load_config(**whetstone.GRPOTrainer("pebble", peft_config=usual).settings).model
    assert (
        (model.use_peft, model.lora_r, model.lora_alpha) == (True, usual.r, usual.lora_alpha) == (True, 8, 8)
    )
    more = peft.LoraConfig(layers_to_transform=[0], target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"'layers_to_transform' \(argument"):
        whetstone.load_config(**whetstone.GRPOTrainer("pebble", peft_config=more).settings)


def test_the_model_after_training_is_evaluated(tmp_path: Path) -> None:
    args = whetstone.GRPOConfig(
        str(tmp_path / "run"), max_steps=1, num_generations=2, per_device_train_batch_size=2, seed=1,
        max_completion_length=4, reward_workers=1, eval_num_samples=4, eval_greedy=False, preflight="off",
    )  # fmt: skip
    rows = [{"prompt": f"{i} + 1 =", "answer": f"{i + 1}"} for i in range(8)]
    trainer = whetstone.GRPOTrainer(
        "pebble", "accuracy", args, Dataset.from_list(rows), eval_dataset=rows[:4]
    )
    assert trainer.evaluate()["step"] == 0
    trainer.train()
    assert trainer.evaluate()["step"] == 1
    trainer.save_model(tmp_path / "copy")
    weights = (tmp_path / "run" / "final_model" / "model.safetensors").read_bytes()
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == weights
    again = whetstone.GRPOTrainer("pebble", "accuracy", args, rows, eval_dataset=rows[:4])
    again.settings["max_steps"] = 2
    resumed = again.train(resume_from_checkpoint=True)
    assert [row["step"] for row in resumed.metrics if row["kind"] == "train"] == [1, 2]
