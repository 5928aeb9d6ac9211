"""`python -m benchmarks.trl`: TRL's own GRPOTrainer gets our prompts, problems and rewards, the run folder is
ours, and every key that TRL has no counterpart for is refused by name. Real TRL and the embedded model.
"""

import contextlib
import dataclasses
import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from whetstone.config import Config, flatten, load, make_plan
from whetstone.config.load import SECTION_OF
from whetstone.errors import UserError
from whetstone.run.signals import StopRequest

trl = pytest.importorskip("trl")


from benchmarks.trl.keys import CONVERTED, HANDLED, PASSED, REFUSED, check_keys, kind_of, trl_arguments  # noqa: E402
from benchmarks.trl.run import build, make_trainer, train_with_trl  # noqa: E402
from whetstone.train import train  # noqa: E402

SMALL = {
    "model_name_or_path": "pebble",
    "device": "cpu",
    "datasets": "{chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}}",
    "reward_funcs": "[accuracy]",
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 24,
    "learning_rate": 1e-3,
    "max_steps": 2,
    "eval_num_samples": 6,
    "eval_num_examples_to_print": 0,
    "save_steps": 1,
    "reward_workers": 1,
    "preflight": "off",
}


def loaded(folder="unused", **changes):
    settings = {**SMALL, "output_dir": folder, "run_name": "run", **changes}
    return load(None, [f"{key}={value}" for key, value in settings.items()])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def by_trl(tmp_path_factory):
    """Two steps by TRL."""
    folder = tmp_path_factory.mktemp("trl")
    return folder / "run", train_with_trl(loaded(folder))


@pytest.fixture(scope="module")
def by_us(tmp_path_factory):
    """The same configuration by our own trainer, its first step."""
    folder = tmp_path_factory.mktemp("ours")
    return folder / "run", train(loaded(folder, max_steps=1))


@pytest.mark.slow
def test_the_evaluation_before_training_is_the_same(by_trl, by_us):
    assert by_trl[1]["accuracy_before"] == by_us[1]["accuracy_before"]
    assert by_trl[1]["greedy_before"] == by_us[1]["greedy_before"]
    first = [json.loads((run / "eval_results/eval_step_0.json").read_text()) for run, _ in (by_trl, by_us)]
    assert first[0]["completions"] == first[1]["completions"]


@pytest.mark.slow
def test_both_trainers_see_the_same_problems_in_the_same_order(by_trl, by_us):
    ours, theirs = (lines(run / "completions/step_1.jsonl") for run, _ in (by_us, by_trl))
    assert len(ours) == 8
    for key in ("problem", "messages", "sample"):
        assert [line[key] for line in theirs] == [line[key] for line in ours]


@pytest.mark.slow
def test_a_run_by_trl_leaves_the_folder_that_our_runs_leave(by_trl, by_us):
    folder, results = by_trl
    names = {path.name for path in by_us[0].iterdir()}
    assert names <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "train_results.json").read_text()) == results
    rows = lines(folder / "metrics.jsonl")
    assert [(row["step"], row["kind"]) for row in rows] == [
        (0, "eval"),
        (1, "train"),
        (2, "train"),
        (2, "eval"),
    ]
    ours = next(row for row in lines(by_us[0] / "metrics.jsonl") if row["kind"] == "train")
    # Only our sampler leaves logprobs, only our update cuts prompts, masks and skips.
    missing = {key for key in ours if key not in rows[1]}
    assert {
        "reward",
        "accuracy",
        "loss",
        "entropy",
        "grad_norm",
        "clip_ratio/region_mean",
        "completions/mean_length",
    } <= set(rows[1])
    assert not {key for key in missing if key.startswith(("reward", "accuracy", "length", "time/"))}
    answered = lines(folder / "completions/step_1.jsonl")
    assert rows[1]["reward"] == pytest.approx(sum(line["reward"] for line in answered) / 8)
    assert rows[1]["learning_rate"] == pytest.approx(1e-3)
    assert rows[2]["learning_rate"] == pytest.approx(5e-4)
    before, after = (
        load_file(folder / name / "model.safetensors") for name in ("checkpoint-1", "final_model")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)


class AskedToStop(StopRequest):
    """Somebody has pressed Ctrl-C in the first step."""

    def __init__(self):
        super().__init__()
        self.requested = True


@pytest.mark.slow
def test_a_stopped_run_resumes_exactly(by_trl, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("benchmarks.trl.run.StopRequest", AskedToStop)
        train_with_trl(loaded(tmp_path, save_steps=10))
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    results = train_with_trl(loaded(tmp_path, auto_resume=True))
    assert results["accuracy_after"] == by_trl[1]["accuracy_after"]
    once, twice = (load_file(run / "final_model/model.safetensors") for run in (by_trl[0], tmp_path / "run"))
    assert all(torch.equal(once[name], twice[name]) for name in once)
    steps = [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == [1, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"assistant_prefix": json.dumps('Let\'s "think" … {{x}}\n<think>')},
        {"apply_chat_template": False, "assistant_prefix": "So,"},
        {"developer_prompt": "Answer briefly."},
        {
            "chat_template": "{{ messages[-1].content }}{{ 'Q:' if quiet else 'A:' }}",
            "chat_template_kwargs": '{"quiet": true}',
        },
    ],
    ids=["chat", "chat with a prefix", "bare text", "system message", "variables of the template"],
)
@pytest.mark.parametrize("bos", [False, True])
def test_trl_makes_our_tokens_of_the_prompts(tmp_path, settings, bos):
    from tokenizers.processors import TemplateProcessing

    with contextlib.ExitStack() as stack:
        parts = build(loaded(tmp_path, **settings).config, tmp_path, None, stack)
        chat = parts.rewards.problems.chat
        if bos:  # a tokenizer that puts a token in front of every text, as Llama's does
            token = chat.tokenizer.eos_token
            chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{token} $A", special_tokens=[(token, chat.tokenizer.eos_token_id)]
            )
        trainer = make_trainer(parts)
        batch = next(iter(trainer.get_train_dataloader()))
        assert [row["index"] for row in batch] == [0, 0, 0, 0, 1, 1, 1, 1]
        ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in batch])
        ours = [chat.encode(parts.rewards.problems.problem(row["index"])) for row in batch]
        assert [tuple(row) for row in ids] == ours
        if bos:
            starts = ours[0][0] == chat.tokenizer.eos_token_id
            assert starts is not parts.config.model.apply_chat_template


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_key_is_handed_over_or_done_here_or_refused():
    flat = flatten(Config())
    tables = (PASSED, CONVERTED, HANDLED, frozenset(REFUSED))
    assert sum(map(len, tables)) == len(frozenset.union(*tables)), "a key stands in two tables"
    assert frozenset.union(*tables) <= set(flat), "a key that is not in the configuration"
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert fields >= PASSED
    refused = [key for key in flat if kind_of(key) == "refused"]
    assert set(REFUSED) <= set(refused)
    for key in refused:  # also those that stand in no table
        config, room = Config(), SECTION_OF[key]
        changed = getattr(config, room).model_copy(update={key: "something else"})
        with pytest.raises(UserError, match=rf"^{key}: something else .*not possible with TRL"):
            check_keys(config.model_copy(update={room: changed}))
    check_keys(Config())


@pytest.mark.parametrize(
    "setting",
    [
        "loss_type=reinforce",
        "advantage=rloo",
        "advantage=reinforce_pp",
        "kl_estimator=k1",
        "importance_correction=token_truncate",
        "rollout_engine=hf",
        "max_skipped_steps=5",
    ],
)
def test_what_trl_cannot_do_is_refused_first(tmp_path, setting):
    key, value = setting.split("=")
    with pytest.raises(UserError, match=rf"^{key}: {value} .*with TRL, since "):
        train_with_trl(loaded(tmp_path, **{key: value}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 1}),
        (
            {"prompts_per_step": 6, "micro_batch_tokens": 240},  # ten answers of 24 tokens at most: 8 of 24
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "steps_per_generation": 3},
        ),
        (
            {
                "prompts_per_step": "null",
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 8,
                "num_iterations": 2,
                "max_steps": 4,
            },
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
        ),
        ({"loss_type": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ({"loss_type": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ({"epsilon": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.1}),
        (
            {"use_vllm": "true", "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4},
            {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4},
        ),
        ({"max_steps": 20, "warmup_ratio": 0.1, "top_k": "null"}, {"warmup_steps": 2, "top_k": 0}),
    ],
)
def test_the_arguments_give_trl_the_work_of_our_plan(tmp_path, settings, expected):
    config = loaded(tmp_path, **settings).config
    plan = make_plan(config, num_problems=100)
    arguments = trl_arguments(config, plan, tmp_path, torch.device("cpu"))
    assert {key: arguments[key] for key in expected} == expected
    made = trl.GRPOConfig(**arguments)
    assert made.generation_batch_size == plan.completions_per_batch
    assert made.max_steps == plan.num_steps


def test_the_command_refuses_with_one_sentence(capsys):
    from benchmarks.trl.__main__ import run

    assert run(["quickstart", "advantage=rloo"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.trl: advantage: rloo is not possible with TRL")
    assert run(["trainer=trl"]) == 2
    assert "without this key" in capsys.readouterr().err


def test_a_vllm_server_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^vllm_mode: server .*set vllm_mode=colocate"):
        train_with_trl(loaded(tmp_path, use_vllm="true"))


def test_without_trl_the_user_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(UserError, match=r"pip install 'trl==1.16"):
        train_with_trl(loaded(tmp_path))


def test_a_prompt_that_trl_could_not_cut_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"max_prompt_length \(3\).*TRL"):
        train_with_trl(loaded(tmp_path, max_prompt_length=3, eval_num_samples=0))


@pytest.mark.slow
def test_lora_with_a_reference_and_several_updates_a_batch(tmp_path):
    settings = {
        "use_peft": True,
        "lora_r": 4,
        "beta": 0.05,
        "num_iterations": 2,
        "max_steps": 4,
        "save_steps": 3,
    }
    train_with_trl(loaded(tmp_path, **settings))
    rows = [row for row in lines(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [2, 4], "a row for each batch"
    assert rows[1]["kl"] > 0
    assert (tmp_path / "run" / "checkpoint-4").is_dir(), "saved between batches only"
    assert not (tmp_path / "run" / "checkpoint-3").exists()
    assert (tmp_path / "run" / "final_model" / "adapter_config.json").is_file()
    assert not (tmp_path / "run" / "final_model" / "ref").exists()
