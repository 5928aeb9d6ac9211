"""All names of TRL's configuration have a decision, and the decisions do what they say."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from whetstone.config import flatten, load, make_plan, trl_names, without_effect
from whetstone.config.aliases import CONVERTED, REFUSED, RENAMED, WITHOUT_EFFECT
from whetstone.config.load import SECTION_OF
from whetstone.config.tables import table
from whetstone.config.trl_names import NO_EFFECT
from whetstone.config.unknown import SYNONYMS, suggest
from whetstone.errors import UserError

trl = pytest.importorskip("trl")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of ours under TRL's own names, with the same meaning.
SAME = _names("""
    output_dir run_name seed full_determinism report_to model_name_or_path attn_implementation
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs
    max_steps num_iterations num_generations generation_batch_size steps_per_generation
    learning_rate lr_scheduler_type lr_scheduler_kwargs optim weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm bf16 gradient_checkpointing torch_compile
    max_completion_length temperature top_p top_k min_p chat_template_kwargs
    vllm_mode max_tool_calling_iterations
    beta epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos importance_sampling_level
    reward_weights scale_rewards loss_type mask_truncated_completions ref_model_mixup_alpha
    ref_model_sync_steps top_entropy_quantile entropy_coef entropy_coef_max
    entropy_target off_policy_mask_threshold use_bias_correction_kl
    logging_steps save_strategy save_steps save_total_limit resume_from_checkpoint
    load_best_model_at_end push_to_hub hub_model_id hub_private_repo
    use_peft lora_r lora_alpha lora_dropout lora_target_modules use_rslora use_dora load_in_4bit
""")
# Keys of rows: `data_keys.py` puts them into the settings of a task.
DATA = _names("dataset_name dataset_config dataset_train_split dataset_test_split")


def names_of_trl() -> dict[str, dataclasses.Field]:
    classes = (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
    return {field.name: field for kind in classes for field in dataclasses.fields(kind)}


def written(folder: Path, text: str) -> Path:
    file = folder / "theirs.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_name_of_trl_has_a_decision() -> None:
    names = names_of_trl()
    assert len(names) > 200
    tables = (SAME, DATA, trl_names.RENAMED, trl_names.CONVERTED, NO_EFFECT, trl_names.REFUSED)
    assert {name: num for name in names if (num := sum(name in table for table in tables)) != 1} == {}


def test_the_same_names_are_keys_here_and_no_name_is_left_over() -> None:
    assert sorted(SAME - set(SECTION_OF)) == []
    assert sorted((SAME | set(NO_EFFECT) | DATA) - set(names_of_trl())) == []


def test_every_other_name_means_a_key_of_ours() -> None:
    assert [name for name, key in RENAMED.items() if key not in SECTION_OF] == []
    assert [name for name in RENAMED if name in SECTION_OF] == []
    assert not set(WITHOUT_EFFECT) & (set(RENAMED) | set(CONVERTED) | set(REFUSED) | set(SECTION_OF))


@pytest.mark.parametrize("name", sorted(names_of_trl()))
def test_the_default_of_trl_loads(name: str, tmp_path: Path) -> None:
    """A file that writes a default out is refused for nothing."""
    import yaml

    field = names_of_trl()[name]
    value = None if field.default is dataclasses.MISSING else field.default
    if value is None or name == "output_dir":
        return
    value = getattr(value, "value", value)  # an enumeration
    load(written(tmp_path, yaml.safe_dump({name: value, "beta": 0.01})))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch_dtype: bfloat16", {"bf16": True}),
        ("dtype: float32", {"bf16": False}),
        ("dtype: auto", {"bf16": False}),
        ("dtype: float32\nbf16: true", {"bf16": True}),
        ("model_init_kwargs: {torch_dtype: bfloat16, attn_implementation: sdpa}", {"bf16": True}),
        ("eval_strategy: steps\neval_steps: 50", {"fixed_eval_steps": 50}),
        ('eval_strategy: "no"\neval_steps: 50', {"fixed_eval_steps": 0}),
        ("eval_strategy: no\nfixed_eval_steps: 50", {"fixed_eval_steps": 50}),
        ("eval_strategy: epoch\nnum_train_epochs: 4", {"fixed_eval_steps": 0.25}),
        ("eval_strategy: steps\nlogging_steps: 7", {"fixed_eval_steps": 7}),
        ("warmup_steps: 0.1", {"warmup_ratio": 0.1, "warmup_steps": 0}),
        ("warmup_steps: 10", {"warmup_ratio": 0.0, "warmup_steps": 10}),
        ("use_cpu: true", {"device": "cpu"}),
        ("use_vllm: true", {"rollout_engine": "vllm"}),
        ("use_vllm: false", {"rollout_engine": "native"}),
        ("sync_ref_model: true\nbeta: 0.1", {"kl_reference": "moving"}),
        ("use_adaptive_entropy: true", {"entropy_target": 0.2}),
        ("use_adaptive_entropy: false\nentropy_target: 0.5", {"entropy_target": None}),
        ("vllm_importance_sampling_correction: false", {"importance_correction": "none"}),
        (
            "use_vllm: true\nvllm_importance_sampling_correction: true",
            {"importance_correction": "sequence_mask"},
        ),
        ("generation_kwargs: {top_p: 0.9, max_new_tokens: 99}", {"top_p": 0.9, "max_completion_length": 99}),
        ("num_generations_eval: 4", {"eval_samples_per_problem": 4}),
        ("ddp_timeout: 3600", {"collective_timeout_s": 3600}),
        ("system_prompt: Think.", {"developer_prompt": "Think."}),
        ("logging_steps: 0.1\nmax_steps: 200", {"logging_steps": 20}),
        ("logging_steps: 0.1", {"logging_steps": 1}),
        ("save_steps: 0.05", {"save_steps": 0.05}),
        ("reward_funcs: [accuracy_reward, think_format_reward]", {"reward_funcs": ["accuracy", "format"]}),
        ("lr_scheduler_kwargs: {num_warmup_steps: 5}", {"warmup_steps": 5, "lr_scheduler_kwargs": {}}),
        ("wandb_entity: me\nwandb_tags: a,b", {"wandb_entity": "me", "wandb_tags": ["a", "b"]}),
        ("use_rslora: false\nbnb_4bit_quant_type: nf4\nrepetition_penalty: 1.0\nmodel_revision: main", {}),
    ],
)
def test_values_are_converted(text: str, expected: dict, tmp_path: Path) -> None:
    flat = flatten(load(written(tmp_path, text)).config)
    assert {key: flat[key] for key in expected} == expected


def test_a_share_of_all_steps(tmp_path: Path) -> None:
    file = written(tmp_path, "save_steps: 0.05\neval_steps: 0.25\nmax_steps: 200\nprompts_per_step: 1")
    plan = make_plan(load(file).config, num_problems=100)
    assert (plan.save_every, plan.eval_every) == (10, 50)
    by_epochs = make_plan(load(file, ["max_steps=-1", "num_train_epochs=3"]).config, num_problems=100)
    assert (by_epochs.num_steps, by_epochs.save_every, by_epochs.eval_every) == (300, 15, 75)


def test_a_generation_batch_of_trl(tmp_path: Path) -> None:
    """4 x 16 completions a step; 512 of one sampling make 8 steps of 4 prompts."""
    text = (
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 16\nnum_generations: 16\n"
        "generation_batch_size: 512\nmax_steps: 16"
    )
    config = load(written(tmp_path, text)).config
    plan = make_plan(config, num_problems=100)
    assert (plan.prompts_per_batch, plan.minibatches, plan.num_batches) == (32, 8, 2)
    assert make_plan(config, num_problems=100, world_size=8).minibatches == 1


def test_names_without_effect_are_noted_in_one_line(tmp_path: Path) -> None:
    text = "log_level: info\nhub_strategy: end\nhub_token: x\ndataloader_num_workers: 4\ndo_eval: true"
    note, defaults = load(written(tmp_path, text)).notes
    assert "num_train_epochs 3.0 (here 1.0), bf16 True (here False)" in defaults
    for name in ("log_level", "hub_strategy", "hub_token", "dataloader_num_workers", "do_eval"):
        assert name in note


def test_all_that_is_unknown_or_refused_is_named_at_once(tmp_path: Path) -> None:
    file = written(
        tmp_path, "train_data: a\ncliprange: 0.1\nkl_horizon: 5\nload_in_8bit: true\nneftune_noise_alpha: 5"
    )
    with pytest.raises(UserError) as caught:
        load(file, ["max_step=3"])
    message = str(caught.value)
    for name in ("train_data", "cliprange", "kl_horizon", "load_in_8bit", "neftune_noise_alpha", "max_step"):
        assert name in message
    for meant in ("'data_path'", "'epsilon'", "'max_steps'"):
        assert meant in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train_data", "data_path"),
        ("cliprange", "epsilon"),
        ("system_message", "developer_prompt"),
        ("group_size", "num_generations"),
        ("learning_rat", "learning_rate"),
        ("Max-Steps", "max_steps"),
        ("trainer.max_steps", "max_steps"),
        ("kl_horizon", None),
        ("foo", None),
        ("dataset_sise", "dataset_size"),
        ("torch_dtyp", "torch_dtype"),
    ],
)
def test_a_suggestion_means_the_same_or_there_is_none(name: str, meant: str | None) -> None:
    known = set(SECTION_OF) | set(RENAMED) | set(CONVERTED)
    assert suggest(name, known) == meant


def test_every_suggestion_is_a_name_that_loads() -> None:
    from whetstone.config.data_keys import SETTINGS

    accepted = set(SECTION_OF) | set(RENAMED) | set(CONVERTED) | set(SETTINGS)
    assert sorted(set(SYNONYMS.values()) - accepted) == []
    # What loads needs no suggestion.
    loads = accepted | set(WITHOUT_EFFECT) | set(REFUSED)
    assert sorted(set(SYNONYMS) & loads) == []


# --- data sets ---


def datasets(file: Path | None, *words: str) -> dict[str, dict]:
    tasks = load(file, words).config.tasks.datasets
    return {name: spec.config for name, spec in tasks.items()}


def test_a_data_set_by_its_name_is_the_task_rows(tmp_path: Path) -> None:
    text = """\
dataset_name: openai/gsm8k
dataset_config: main
dataset_train_split: train[:90%]
dataset_test_split: test
dataset_prompt_column: question
dataset_answer_column: answer
"""
    file = written(tmp_path, text)
    rows = {
        "dataset": "openai/gsm8k",
        "name": "main",
        "split": "train[:90%]",
        "eval_split": "test",
        "prompt_column": "question",
        "answer_column": "answer",
    }
    assert datasets(file) == {"rows": rows}
    assert datasets(file, "dataset_test_split=validation", "prompt_column=q") == {
        "rows": {**rows, "eval_split": "validation", "prompt_column": "q"}
    }
    # Another data set: the old one's configuration and splits do not hold for it, the columns do.
    assert datasets(file, "dataset_name=other/one") == {
        "rows": {"dataset": "other/one", "prompt_column": "question", "answer_column": "answer"}
    }
    assert datasets(file, "datasets={chain_sum: {}}") == {"chain_sum": {}}


def test_columns_go_to_the_task_that_reads_rows() -> None:
    assert datasets(
        None, "datasets={math: {}}", "data_path=r.json", "answer_column=a", "prompt_column=q"
    ) == {"math": {"path": "r.json", "answer_column": "a", "prompt_column": "q"}}
    # Generated problems of a recipe give way to a data set.
    words = ("dataset_name=openai/gsm8k", "question_column=q")
    tasks = load("quickstart", words).config.tasks.datasets
    assert {name: spec.config for name, spec in tasks.items()} == {
        "rows": {"dataset": "openai/gsm8k", "prompt_column": "q"}
    }


def test_what_a_file_says_of_rows_waits_for_the_data_set(tmp_path: Path) -> None:
    file = written(tmp_path, "answer_column: a\nmax_samples: 10")
    assert datasets(file, "data_path=r.json") == {
        "math": {"path": "r.json", "answer_column": "a", "max_samples": 10}
    }
    with pytest.raises(UserError, match="answer_column"):
        load(file)


def test_max_samples_of_minus_one_means_all(tmp_path: Path) -> None:
    for name in ("max_samples", "max_train_problems"):
        loaded = load(None, [f"{name}=-1", "data_path=r.json"])
        assert loaded.config.tasks.datasets["math"].config == {"path": "r.json"}
        assert loaded.config.tasks.dataset_size == 10_000
    file = written(tmp_path, "max_samples: 10\ndata_path: r.json")
    assert datasets(file, "max_samples=-1") == {"math": {"path": "r.json"}}
    assert load(file, ["max_samples=-1"]).config.tasks.dataset_size == 10_000


def test_a_dotted_key_reaches_into_a_mapping(tmp_path: Path) -> None:
    file = written(tmp_path, "datasets: {math: {weight: 2, config: {path: a.json}}, chain_sum: {}}")
    loaded = load(file, ["datasets.math.config.answer_column=answer", "datasets.chain_sum.weight=3"])
    tasks = loaded.config.tasks.datasets
    assert tasks["math"].config == {"path": "a.json", "answer_column": "answer"}
    assert (tasks["math"].weight, tasks["chain_sum"].weight) == (2, 3)
    assert datasets(None, "--datasets.chain_sum.config.max_terms", "3") == {"chain_sum": {"max_terms": 3}}
    config = load(None, ["lr_scheduler_kwargs.min_lr_rate=0.1", "model.path=m"]).config
    assert config.update.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert config.model.model_name_or_path == "m"


# --- other findings ---


def test_flags_of_the_q_project() -> None:
    words = shlex.split(
        "--lora_rank 8 --eval_k 4 --max_train_problems 100 --max_test_problems 20 --perfect_bonus 0.5 "
        "--wandb_entity me --wandb_tags a,b --use_qlora false"
    )
    config = load("q/1.5b", words).config
    assert (config.model.lora_r, config.evaluation.eval_samples_per_problem) == (8, 4)
    assert config.tasks.datasets["code"].config["max_samples"] == 100
    assert (config.evaluation.eval_num_samples, config.programs.perfect_reward_weight) == (20, 0.5)
    assert (config.run.wandb_entity, config.run.wandb_tags) == ("me", ["a", "b"])
    words = ["--eval_problems", "7", "--eval_pass_at_k", "8", "--perfect_bonus"]
    config = load("q/1.5b", words).config
    assert (config.evaluation.eval_num_samples, config.evaluation.eval_samples_per_problem) == (7, 8)
    assert config.programs.perfect_reward_weight == 1.0
    config = load("q/1.5b", ["--use_qlora"]).config
    assert (config.model.use_peft, config.model.load_in_4bit) == (True, True)


def test_the_defaults_that_are_noted_are_those_of_trl() -> None:
    config = trl.GRPOConfig(output_dir="x", use_cpu=True, bf16=False)
    theirs = table("trl")["fixed"]
    assert (theirs["num_train_epochs"], theirs["vllm_mode"]) == (config.num_train_epochs, config.vllm_mode)
    assert config.vllm_importance_sampling_correction and theirs["bf16"]
    assert theirs["importance_correction"] == config.vllm_importance_sampling_mode


def test_a_batch_size_without_effect_is_said(tmp_path: Path) -> None:
    file = written(tmp_path, "prompts_per_step: 4\nper_device_train_batch_size: 16")
    for words, idle in (([], True), (["prompts_per_step=null"], False)):
        config = load(file, words).config
        plan = make_plan(config, num_problems=100)
        assert ("per_device_train_batch_size" in without_effect(config, plan)) == idle


def test_a_section_that_names_the_model_twice(tmp_path: Path) -> None:
    both = load(written(tmp_path, "model: {path: a, name: b}"))
    assert both.config.model.model_name_or_path == "a"


def test_a_smaller_batch_is_no_less_memory(tmp_path: Path) -> None:
    file = written(tmp_path, "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2")
    (note,) = load(file, ["per_device_train_batch_size=2", "gradient_accumulation_steps=4"]).notes
    assert "2, was 4" in note and "micro_batch_tokens" in note
    assert load(file, ["per_device_train_batch_size=8"]).notes == () == load(file).notes


def test_the_trainer_is_ours(tmp_path: Path) -> None:
    """`trainer` was a key; TRL's own is a benchmark."""
    for text, words in (("trainer: trl", []), ("beta: 0", ["trainer=trl"])):
        with pytest.raises(UserError, match=r"^trainer \(.*\) is not supported: .*python -m benchmarks\.trl"):
            load(written(tmp_path, text), words)
    assert load(written(tmp_path, "trainer: whetstone"), ["trainer=whetstone"]).notes == ()


def test_a_timeout_of_years_is_a_week(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, "ddp_timeout: 180000000"))
    assert loaded.config.parallel.collective_timeout_s == 7 * 86_400
    assert "ddp_timeout (theirs.yaml) is taken for collective_timeout_s: 604800" in loaded.notes[0]
    with pytest.raises(UserError, match="collective_timeout_s"):
        load(written(tmp_path, "ddp_timeout: soon"))


def test_a_date_is_a_name(tmp_path: Path) -> None:
    assert load(written(tmp_path, "run_name: 2026-11-16")).config.run.run_name == "2026-11-16"
    assert load(None, ["run_name=7"]).config.run.run_name == "7"
