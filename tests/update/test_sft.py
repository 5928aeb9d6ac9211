"""Supervised fine-tuning: what is imitated, TRL's SFTTrainer on the same rows, resume, rejection sampling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import whetstone
from whetstone.commands.sft import supervised
from whetstone.config import build, load, make_plan, without_effect
from whetstone.engines.hf import HFEngine
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.policy import load_policy
from whetstone.rollout.collector import Collector, NullScorer
from whetstone.rollout.supervised import SupervisedSource
from whetstone.run.sft_start import sft_config
from whetstone.tasks.mixture import build_tasks
from whetstone.update.updater import Updater

ROWS = [
    {
        "question": f"What is {a} + {b}?",
        "answer": f"{a} and {b} are <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}",
    }
    for a in range(3, 9)
    for b in range(2, 6)
]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(folder: Path, rows: list[dict[str, Any]] = ROWS, **changes: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": "pebble",
        "datasets": {"rows": {"config": {"path": str(write_rows(folder, rows))}}},
        "loss_type": "sft",
        "prompts_per_step": 4,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "developer_prompt": None,
        **changes,
    }


def source_of(flat: dict[str, Any]) -> SupervisedSource:
    config = build({**flat, "datasets": flat["datasets"]})
    policy = load_policy(config.model)
    tasks = build_tasks(config, "train")
    plan = make_plan(config, num_problems=len(tasks))
    collector = Collector(
        HFEngine(policy, 1, None),
        NullScorer(),
        Chat(policy.tokenizer, config.model),
        max_prompt_length=config.rollout.max_prompt_length,
        max_length=policy.max_length,
    )
    return SupervisedSource(collector, tasks, config, plan)


@pytest.mark.parametrize(
    "row, solution",
    [
        ({"prompt": "2 + 2?", "completion": "It is 4."}, "It is 4."),
        ({"prompt": "2 + 2?", "completion": [{"role": "assistant", "content": "4!"}]}, "4!"),
        ({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}, "4"),
        ({"question": "2 + 2?", "solution": "Two twos: \\boxed{4}", "answer": "4"}, "Two twos: \\boxed{4}"),
        ({"question": "2 + 2?", "answer": "Two <<2+2=4>>4.\n#### 4"}, "Two <<2+2=4>>4.\n#### 4"),
        ({"question": "2 + 2?", "answer": "4"}, "<answer>4</answer>"),
    ],
)
def test_the_solution_of_a_row(tmp_path: Path, row: dict[str, Any], solution: str) -> None:
    rows = [row, {**row, **{key: "other?" for key in ("prompt", "question") if key in row}}]
    if "messages" in row:
        rows[1] = {"messages": [{"role": "user", "content": "other?"}, row["messages"][1]]}
    has_answer = "answer" in row
    changes = {} if has_answer else {"reward_funcs": ["tests/data/own_rewards.py:fixed"]}
    flat = settings(tmp_path, rows, eval_num_samples=0, **changes)
    flat["datasets"]["rows"]["config"] |= {"eval_fraction": 0.01} | ({} if has_answer else {"match": "none"})
    tasks = build_tasks(build(flat), "train")
    assert {tasks.tasks["rows"].solution(tasks.problem(index)) for index in range(len(tasks))} == {solution}


@pytest.mark.parametrize(
    ("prompt", "start"),
    [("Answer with <answer>.", "<answer>"), ("DeepSeekZero", "<think>"), ("", "<answer>")],
)
def test_empty_thoughts_are_imitated_where_the_prompt_asks(prompt, start) -> None:
    config = build({"datasets": {"chain_sum": {}}, "developer_prompt": prompt or None})
    tasks = build_tasks(config, "train")
    solution = tasks.tasks["chain_sum"].solution(tasks.problem(0))
    assert solution is not None and solution.startswith(start) and solution.endswith("</answer>")


def test_a_solution_ends_like_a_sampled_completion(tmp_path: Path) -> None:
    flat = settings(tmp_path)
    source = source_of(flat)
    [rollout] = source.next_batch(0).groups[0].rollouts
    tokenizer = load_policy(build(flat).model).tokenizer
    assert rollout.completion.token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(rollout.completion.token_ids[:-1]) == rollout.text
    short = source_of({**flat, "max_completion_length": 3})
    assert {len(group.rollouts[0].completion.token_ids) for group in short.next_batch(0).groups} == {3}
    cut = source_of({**flat, "max_prompt_length": 2}).next_batch(0)
    assert {len(group.rollouts[0].prompt_ids) for group in cut.groups} == {2}
    assert cut.metrics["prompts_truncated"] == 4
    with pytest.raises(UserError, match="max_completion_length"):
        source_of({**flat, "max_completion_length": 8192}).next_batch(0)
    assert source.next_batch(0).groups == source.next_batch(0).groups != source.next_batch(1).groups


def test_loss_and_gradient_are_those_of_trl(tmp_path: Path) -> None:
    """TRL's SFTTrainer on the same prompts and completions, completion-only loss, without packing."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    flat = settings(tmp_path)
    config = build(flat)
    source = source_of(flat)
    groups = source.next_batch(0).groups
    policy = load_policy(config.model)
    policy.model.eval()
    updater = Updater(policy, config, make_plan(config, num_problems=100), None)
    batches = updater.pack(groups, 0)
    [experience] = updater.prepare(batches)
    loss, _ = updater.gradient(experience)
    ours = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}

    other = load_policy(config.model)
    other.set_attention("eager")
    chat = Chat(other.tokenizer, config.model)
    rows = [{"prompt": chat.prompt(group.problem), "completion": group.rollouts[0].text} for group in groups]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=4, completion_only_loss=True,
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        other.lm, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=other.tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    num_completion_tokens = sum(len(group.rollouts[0].completion.token_ids) for group in groups)
    assert int((batch["labels"] != -100).sum()) == num_completion_tokens
    other.lm.eval()
    theirs = trainer.compute_loss(other.lm, batch, num_items_in_batch=torch.tensor(num_completion_tokens))
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    for name, parameter in other.lm.named_parameters():
        if name in ours:
            error = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, name


SHORT = {
    "eval_num_samples": 4, "eval_greedy": False, "eval_num_examples_to_print": 0, "reward_workers": 1,
    "max_completion_length": 48, "save_steps": 2, "preflight": "off",
}  # fmt: skip


def test_a_run_learns_the_solutions_and_resumes_exactly(tmp_path: Path) -> None:
    flat = settings(tmp_path, output_dir=tmp_path, **SHORT)
    whole = whetstone.train(None, run_name="whole", **flat)
    rows = [row for row in whole.metrics if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert "reward" not in rows[0] and rows[0]["completions/clipped_ratio"] == 0
    for step in whetstone.steps(None, run_name="cut", **flat):
        if step.step == 2:
            break
    cut = whetstone.train(None, run_name="cut", auto_resume=True, **flat)
    final = [load_file(Path(run.folder) / "final_model" / "model.safetensors") for run in (whole, cut)]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])


def test_a_resumed_run_keeps_the_date_of_its_prompts(tmp_path: Path) -> None:
    template = "{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    flat = settings(
        tmp_path, output_dir=str(tmp_path), chat_template=template, **{**SHORT, "eval_num_samples": 0}
    )
    tokenizer = load_policy(build(flat).model).tokenizer
    written = []
    for auto_resume in (False, True):
        for step in whetstone.steps(None, run_name="dated", auto_resume=auto_resume, **flat):
            [first, *_] = step.groups
            written.append(tokenizer.decode(first.rollouts[0].prompt_ids)[:15])
            if step.step == 2:
                break
    assert len(written) == 4 and len(set(written)) == 1


def test_rejection_sampling_trains_on_correct_samples(tmp_path: Path) -> None:
    changes = {"rejection_sampling": True, "num_generations": 4, "max_steps": 1, "output_dir": tmp_path}
    changes |= {"eval_num_samples": 0, "preflight": "off"}
    sums = {"chain_sum": {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}}
    flat = {**settings(tmp_path), **SHORT, **changes, "datasets": sums, "developer_prompt": "DeepSeekZero"}
    for step in whetstone.steps(None, run_name="star", **flat):
        rollouts = [rollout for group in step.groups for rollout in group.rollouts]
        assert all(rollout.score.parts["correct"] == 1 for rollout in rollouts)
        assert len({(r.prompt_ids, r.completion.token_ids) for r in rollouts}) == len(rollouts)
        assert 0 < step.metrics["rejection_sampling/accept_ratio"] <= len(rollouts) / 16


def test_the_command_has_defaults_that_a_file_overrides(tmp_path: Path) -> None:
    words = supervised("quickstart", ["max_steps=2"])
    config = load("quickstart", words).config
    assert config.loss.is_supervised and config.run.run_name == "sft" and config.update.max_steps == 2
    (tmp_path / "own.yaml").write_text("learning_rate: 3.0e-5\nnum_generations: 8\ndatasets: {gcd: {}}\n")
    config = load(tmp_path / "own.yaml", supervised(str(tmp_path / "own.yaml"), [])).config
    assert config.update.learning_rate == 3e-5
    assert make_plan(config, num_problems=100).num_generations == 1


@pytest.mark.parametrize("changes", [{"advantage": "gae"}, {"async_rollouts": 1}, {"dynamic_sampling": True}])
def test_settings_of_rl_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(changes))):
        build({"loss_type": "sft", **changes})
    with pytest.raises(UserError, match="rejection_sampling"):
        build({"rejection_sampling": True})


def test_sft_steps_run_before_rl_and_are_not_repeated_on_resume(tmp_path):
    flat = settings(
        tmp_path, output_dir=str(tmp_path), run_name="both", eval_num_samples=4, num_generations=4
    )
    flat |= {"loss_type": "dapo", "beta": 0.01, "max_steps": 2, "max_completion_length": 16, "save_steps": 1}
    flat |= {"reward_workers": 1, "preflight": "off"}  # 16 tokens are too few to be right
    flat |= {"sft_steps": 3, "sft_learning_rate": 2e-3, "eval_greedy": False}
    run = whetstone.train(None, **flat)
    supervised = whetstone.Run(tmp_path / "both_sft")
    rows = [row for row in supervised.metrics if row["kind"] == "train"]
    assert len(rows) == 3 and rows[-1]["loss"] < rows[0]["loss"]
    assert max(row["learning_rate"] for row in rows) == pytest.approx(2e-3)
    assert run.results["accuracy_before"] == supervised.results["accuracy_after"]  # the same weights
    assert [row["step"] for row in run.metrics if row["kind"] == "train"] == [1, 2]
    written = (tmp_path / "both_sft" / "train_results.json").stat().st_mtime_ns
    whetstone.train(None, **{**flat, "max_steps": 3, "auto_resume": True})
    assert (tmp_path / "both_sft" / "train_results.json").stat().st_mtime_ns == written
    assert [row["step"] for row in run_rows(tmp_path / "both")] == [1, 2, 3]


def run_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in whetstone.Run(folder).metrics if row["kind"] == "train"]


def test_supervised_training_has_no_supervised_steps_before_it():
    with pytest.raises(UserError, match=r"^sft_steps "):
        build({"loss_type": "sft", "sft_steps": 5})
    config = load("smollm2_cpu", supervised("smollm2_cpu", [])).config
    assert config.loss.is_supervised and config.update.sft_steps == 0


def test_settings_of_rl_are_left_out_of_the_supervised_steps():
    flat = {"advantage": "gae", "async_rollouts": 1, "dynamic_sampling": True, "sft_steps": 5}
    flat |= {"datasets": {"chain_sum": {"curriculum": True}}, "output_dir": "somewhere"}
    config = sft_config(build(flat))
    assert config.loss.is_supervised and config.update.max_steps == 5 and config.update.sft_steps == 0
    faster = sft_config(build({"sft_steps": 5, "sft_learning_rate": 0.1, "datasets": {"chain_sum": {}}}))
    assert faster.update.learning_rate == 0.1
    assert "sft_learning_rate" not in without_effect(faster, make_plan(faster, num_problems=10))
    assert config.run.output_dir == "somewhere_sft"
    same = {"sft_steps": 3, "max_steps": 60, "datasets": {"chain_sum": {}}}
    acting = {"top_entropy_quantile": 0.2, "mask_truncated_completions": True, "warmup_steps": 50}
    for keys in (acting, {"steps_per_generation": 2}, {"generation_batch_size": 64}):
        assert sft_config(build({**same, **keys})) == sft_config(build(same))
