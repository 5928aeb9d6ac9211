"""The configuration: every key that must load does, other trainers' names mean what the table says, shipped
recipes come to the plans worked out by hand, and what a user can get wrong ends in a sentence that names it.
"""

import json
from pathlib import Path

import pytest
import yaml

from whetstone.config import Config, dump, flatten, load, make_plan
from whetstone.config.aliases import WITHOUT_EFFECT
from whetstone.config.base import key_descriptions
from whetstone.config.load import SECTION_FIELDS, SECTION_OF, is_known_key, recipe_names
from whetstone.config.overrides import parse_overrides
from whetstone.config.plan import Plan
from whetstone.config.yaml_text import read_yaml
from whetstone.errors import UserError
from whetstone.sandbox.languages import missing

KEYS_THAT_MUST_LOAD = [
    "run_name", "output_dir", "seed", "report_to", "dataset_size", "developer_prompt", "developer_role",
    "datasets", "eval_datasets", "model_name_or_path", "attn_implementation", "auto_resume",
    "resume_from_checkpoint", "max_steps", "num_train_epochs", "batch_counts_as_step",
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "learning_rate", "warmup_ratio", "warmup_steps", "lr_scheduler_type", "lr_scheduler_kwargs",
    "weight_decay", "max_grad_norm", "num_generations", "num_iterations", "steps_per_generation",
    "max_prompt_length", "max_completion_length", "temperature", "top_p", "top_k", "min_p",
    "eval_temperature", "beta", "epsilon", "epsilon_high", "delta", "loss_type", "scale_rewards",
    "reward_weights", "mask_truncated_completions", "off_policy_mask_threshold", "use_peft", "lora_r",
    "lora_alpha", "lora_dropout", "lora_target_modules", "eval_only", "checkpoint_path",
    "eval_num_samples", "eval_num_examples_to_print", "fixed_eval_steps", "log_reward_variance",
    "verbose_variance_logging", "save_strategy", "save_steps", "save_total_limit", "logging_steps",
    "logging_first_step", "bf16", "gradient_checkpointing", "use_vllm", "vllm_mode",
]  # fmt: skip


def plan_of(*overrides: str, source: str | None = None, num_problems: int = 1000) -> Plan:
    return make_plan(load(source, overrides).config, num_problems=num_problems)


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(None, overrides)
    return str(caught.value)


def test_every_key_of_the_known_projects_is_understood() -> None:
    assert [key for key in KEYS_THAT_MUST_LOAD if not is_known_key(key)] == []


def test_no_key_stands_in_two_sections() -> None:
    keys = [key for field in Config.model_fields.values() for key in field.annotation.model_fields]  # type: ignore[union-attr]
    assert len(keys) == len(set(keys)) == len(SECTION_OF)


def test_every_key_says_what_it_means() -> None:
    rooms = SECTION_FIELDS.values()
    silent = [key for room in rooms for key in room.model_fields if not key_descriptions(room).get(key)]
    assert silent == []


def test_values_reach_their_section_with_their_source(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("learning_rate: 1e-6\nmax_steps: 50\nlora_r: 8\n")
    loaded = load(file, ["max_steps=100"])
    assert loaded.config.update.learning_rate == 1e-6  # a number, though YAML 1.1 would read a text
    assert loaded.config.update.max_steps == 100
    assert loaded.config.model.lora_r == 8
    assert loaded.origins == {
        "learning_rate": "mine.yaml",
        "max_steps": "command line",
        "lora_r": "mine.yaml",
    }


def test_what_is_dumped_loads_to_the_same_configuration(tmp_path: Path) -> None:
    for recipe in recipe_names():
        config = load(recipe).config
        copy = tmp_path / f"{Path(recipe).name}.yaml"
        copy.write_text(dump(config), encoding="utf-8")
        assert load(copy).config == config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["max_steps=100", "report_to=none"], {"max_steps": 100, "report_to": "none"}),
        (["--learning_rate", "2e-6", "--use_wandb"], {"learning_rate": 2e-6, "use_wandb": True}),
        (["--use_wandb", "--wandb_name", "a"], {"use_wandb": True, "wandb_name": "a"}),
        (["--generation_temp", ".8"], {"generation_temp": 0.8}),
        (["--max-steps=-1", "top_k="], {"max_steps": -1, "top_k": None}),
        (["run_name=a=b"], {"run_name": "a=b"}),
        (["datasets={chain_sum: {weight: 2}}"], {"datasets": {"chain_sum": {"weight": 2}}}),
        (["prompt_template={question}"], {"prompt_template": "{question}"}),
        (["developer_prompt=Answer briefly: one word"], {"developer_prompt": "Answer briefly: one word"}),
        (["developer_prompt=null"], {"developer_prompt": None}),
    ],
)
def test_words_of_the_command_line(words: list[str], expected: dict) -> None:
    assert parse_overrides(words) == expected


@pytest.mark.parametrize("form", ["mapping", "json", "empty"])
def test_datasets_as_mapping_json_text_or_empty(form: str, tmp_path: Path) -> None:
    tasks = {"chain_sum": {"weight": 2.0, "config": {"max_terms": 3}}}
    value = {"mapping": tasks, "json": json.dumps(tasks), "empty": "{}"}[form]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"datasets": value}), encoding="utf-8")
    datasets = load(tmp_path / "run.yaml").config.tasks.datasets
    assert {name: spec.model_dump(exclude_none=True) for name, spec in datasets.items()} == (
        {} if form == "empty" else tasks
    )


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("model=m", "model_name_or_path", "m"),
        ("model_name=m", "model_name_or_path", "m"),
        ("num_return_sequences=2", "num_generations", 2),
        ("responses_per_prompt=3", "num_generations", 3),
        ("kl_coef=0.05", "beta", 0.05),
        ("max_new_tokens=2048", "max_completion_length", 2048),
        ("generation_temp=.8", "temperature", 0.8),
        ("num_epochs=3", "num_train_epochs", 3.0),
        ("lr=5e-6", "learning_rate", 5e-6),
        ("eval_steps=25", "fixed_eval_steps", 25),
        ("simple_eval_problems=15", "eval_num_samples", 15),
        ("repeat_eval_problems=4", "eval_samples_per_problem", 4),
        ("use_wandb=true", "report_to", ["wandb"]),
        ("use_wandb=false", "report_to", []),
        ("wandb_name=x", "wandb_name", "x"),
        ("experiment_name=x", "run_name", "x"),
        ("wandb_project=p", "wandb_project", "p"),
        ("project_name=p", "wandb_project", "p"),
        ("max_model_len=2000", "max_prompt_length", 1488),  # less the 512 of the completion
        ("entropy_coeff=0.001", "entropy_coef", 0.001),
        ("updates_per_rollout=4", "steps_per_generation", 4),
        ("per_rollout_size=8", "prompts_per_step", 8),
        ("off_policy_threshold=0.5", "off_policy_mask_threshold", 0.5),
        ("use_lora=true", "use_peft", True),
        ("lora=true", "use_peft", True),
        ("fp16=true", "bf16", True),
        ("max_eps=0.28", "epsilon_high", 0.28),
        ("min_eps=0.1", "epsilon", 0.1),
        ("checkpoint_interval=7", "save_steps", 7),
        ("resume_steps=70", "resume_from_checkpoint", "checkpoint-70"),
        ("tp_size=2", "tp_size", 2),
        ("ddp_size=2", "ddp_size", 2),
        ("offload_model=true", "cpu_offload", "all"),
        ("scale_rewards=false", "scale_rewards", "none"),
        ("scale_rewards=true", "scale_rewards", "group"),
        ("report_to=wandb,tensorboard", "report_to", ["wandb", "tensorboard"]),
    ],
)
def test_other_names_mean_ours(word: str, key: str, value: object) -> None:
    loaded = load(None, [word])
    assert flatten(loaded.config)[key] == value
    said = word.split("=")[0]
    if said not in SECTION_OF:
        assert len(loaded.notes) == 1 and said in loaded.notes[0], (
            "the run must say what it took the name for"
        )


def test_data_path_goes_to_the_one_task() -> None:
    datasets = load(None, ["data_path=rows.json"]).config.tasks.datasets
    assert {name: spec.config for name, spec in datasets.items()} == {"math": {"path": "rows.json"}}


def test_a_name_without_effect_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WITHOUT_EFFECT, "make_tea", "there is no kettle")
    loaded = load(None, ["make_tea=true"])
    assert loaded.config == Config()
    assert loaded.notes[0] == "make_tea (command line) has no effect: there is no kettle."


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("max_step=3", ["max_step", "'max_steps'", "whet config"]),
        ("temperature=0", ["temperature", "greater than or equal to 0.000001"]),
        ("temperature=1e-40", ["temperature", "greater than or equal to 0.000001"]),
        ("eval_temperature=1e-40", ["eval_temperature", "write 0 for greedy sampling"]),
        ("top_p=1e-7", ["top_p", "greater than or equal to 0.000001"]),
        ("sapo_temperature_pos=1e-40", ["sapo_temperature_pos", "0.000001"]),
        ("adam_epsilon=1e-40", ["adam_epsilon", "greater than or equal to 0"]),
        ("output_dir=a\x1b[31m", ["output_dir", "printable"]),
        ("output_dir=a\u202eb", ["output_dir", "printable"]),
        ("top_p=1.5", ["top_p", "less than or equal to 1"]),
        ("loss_type=ppo2", ["loss_type", "'grpo'", "'dapo'"]),
        ("num_generations=many", ["num_generations", "many"]),
        ("report_to=excel", ["excel", "wandb"]),
        ("per_rollout_size=many", ["per_rollout_size", "'many' is not a whole number"]),
        ("max_samples=0", ["max_samples", "-1"]),
        ("delta=1.1", ["delta", "1.2"]),
        ("reward_weights=[1]", ["reward_weights has 1 entries for 2"]),
        ("datasets={chain_sum: {wieght: 1}}", ["wieght", "weight"]),
        ("datasets=[chain_sum]", ["datasets", "mapping"]),
        ("max_model_len=100", ["max_model_len", "no room for a prompt"]),
        ("rollout_servers=a:1,a:1", ["rollout_servers", "twice"]),
        ("max_logprob_difference=0", ["max_logprob_difference", "greater than 0"]),
        ("tp_size=0", ["tp_size", "greater than or equal to 1"]),
        ("cpu_offload=disk", ["cpu_offload", "optimizer"]),
        ("nonsense", ["'nonsense'", "key=value"]),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_that_names_it(word: str, named: list[str]) -> None:
    message = refused(word)
    assert "\n" not in message
    for part in named:
        assert part in message, message


def test_a_file_that_is_not_there_or_not_yaml(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'nowhere\.yaml'.*quickstart"):
        load("nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: 1\n\tb: 2\n")  # a tab may not indent
    with pytest.raises(UserError, match=r"broken\.yaml.*line 2"):
        load(broken)
    listed = tmp_path / "list.yaml"
    listed.write_text("- max_steps\n")
    with pytest.raises(UserError, match=r"list\.yaml.* list"):
        load(listed)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert read_yaml(empty) == {}
    binary = tmp_path / "weights.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x9d")
    with pytest.raises(UserError, match=r"weights\.yaml"):
        load(binary)


# --- batch arithmetic: TRL's, done once ---


def test_prompts_follow_from_the_batch_size() -> None:
    plan = plan_of(
        "per_device_train_batch_size=8", "gradient_accumulation_steps=2", "num_generations=4", "max_steps=200"
    )
    assert (plan.prompts_per_batch, plan.completions_per_batch, plan.num_batches) == (4, 16, 200)


def test_more_devices_make_more_prompts() -> None:
    config = load(None, ["per_device_train_batch_size=8", "num_generations=4"]).config
    assert make_plan(config, num_problems=100, world_size=4).prompts_per_batch == 8


def test_prompts_per_step_wins_over_the_batch_size() -> None:
    assert (
        plan_of("prompts_per_step=3", "per_device_train_batch_size=5", "num_generations=8").prompts_per_batch
        == 3
    )


def test_steps_follow_from_epochs() -> None:
    # 1,000 problems, 8 prompts a step: 125 steps an epoch
    plan = plan_of("num_train_epochs=3", "prompts_per_step=8")
    assert (plan.num_steps, plan.num_batches) == (375, 375)
    # what is left over of an epoch is a batch too: 1,000 / 16 = 62.5
    assert plan_of("num_train_epochs=1", "prompts_per_step=16").num_steps == 63


def test_a_batch_serves_its_parts_and_iterations() -> None:
    plan = plan_of("prompts_per_step=2", "steps_per_generation=4", "num_iterations=2", "max_steps=80")
    assert plan.prompts_per_batch == 8
    assert plan.updates_per_batch == 8
    assert plan.num_batches == 10


def test_accumulation_steps_are_translated_into_steps() -> None:
    words = ("max_steps=200", "fixed_eval_steps=100", "gradient_accumulation_steps=2")
    plan = plan_of(*words, "batch_counts_as_step=true")
    assert (plan.num_steps, plan.eval_every) == (100, 50)
    plan = plan_of(*words, "batch_counts_as_step=false")
    assert (plan.num_steps, plan.eval_every) == (200, 100)
    assert "max_steps 200 is taken for 100" in " ".join(
        load(None, [*words, "batch_counts_as_step=true"]).notes
    )
    assert "batch_counts_as_step" in refused("batch_counts_as_step=3")


def test_due_steps_with_several_updates_per_batch() -> None:
    plan = plan_of("prompts_per_step=2", "steps_per_generation=4", "max_steps=40")
    # batches end at 4, 8, 12, ...; multiples of 10 fall inside those that end at 12, 20, 32, 40
    assert [step for step in range(4, 41, 4) if plan.is_due(10, step)] == [12, 20, 32, 40]
    assert not plan.is_due(0, 4)


def test_warmup_as_share_or_number() -> None:
    assert plan_of("max_steps=200", "warmup_ratio=0.03").warmup_steps == 6
    assert plan_of("max_steps=200", "warmup_ratio=0.03", "warmup_steps=10").warmup_steps == 10


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["per_device_train_batch_size=6", "num_generations=4"], "set per_device_train_batch_size to 8"),
        (["per_device_train_batch_size=5", "num_generations=8"], "set per_device_train_batch_size to 8"),
        (
            ["per_device_train_batch_size=3", "gradient_accumulation_steps=2", "num_generations=4"],
            "set per_device_train_batch_size to 4",  # 3 x 2 = 6 completions; 4 x 2 = 8 divide by 4
        ),
        (
            ["steps_per_generation=3", "gradient_accumulation_steps=2", "prompts_per_step=1"],
            "set it to 4",
        ),
        (["max_steps=10", "num_iterations=4", "prompts_per_step=1"], "set max_steps to 12"),
    ],
)
def test_indivisible_plan_is_refused_with_a_valid_one(words: list[str], remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(*words)
    assert remedy in str(caught.value)


# --- the recipes that ship ---

# prompts and completions per batch, optimizer steps, steps between evaluations: worked out by hand
PLANS = {
    "syllogism_toy": (2, 8, 200, 50),  # 8 x 1 / 4
    "multi_tasks": (4, 16, 200, 100),  # 8 x 2 / 4
    "grpo": (8, 64, 300, 50),  # 8 x 8 / 8
    "math": (8, 16, 3 * 125, 250),  # 4 x 4 / 2; 1,000 rows / 8, three times
    "countdown": (8, 64, 800, 100),  # 2 prompts a step, 4 steps a batch
}


def recipes() -> list[str]:
    return recipe_names()


@pytest.mark.parametrize("name", sorted({"quickstart", *PLANS, *recipes()}))
def test_every_recipe_loads_under_our_own_names_and_has_a_plan(name: str) -> None:
    loaded = load(name)
    assert loaded.notes == (), "a shipped recipe speaks our own names"
    plan = make_plan(loaded.config, num_problems=1000)
    assert plan.num_batches * plan.updates_per_batch == plan.num_steps
    if name in PLANS:
        assert (plan.prompts_per_batch, plan.completions_per_batch, plan.num_steps, plan.eval_every) == PLANS[
            name
        ]


@pytest.mark.parametrize("name", recipes())
def test_generated_tasks_of_recipes_take_their_settings(name: str) -> None:
    from whetstone.tasks.registry import make_tasks

    config = load(name).config
    wanted = {spec.config.get("language") for spec in config.tasks.datasets.values()} - {None}
    if any(missing(language) for language in wanted):
        pytest.skip(f"{wanted} is not installed")
    for split in ("train", "eval"):
        for task in make_tasks(config, split).values():
            if task.generated:
                problem = task.problem(0)
                if problem.environment is not None:
                    continue
                assert task.score(problem, task.gold(problem) or "").parts["correct"] == 1.0


def test_the_course_recipes_have_the_settings_of_the_course() -> None:
    toy = load("syllogism_toy").config
    assert toy.model.model_name_or_path == "unsloth/Llama-3.2-1B-Instruct"
    assert (toy.update.learning_rate, toy.update.warmup_steps) == (1e-6, 10)
    assert (toy.rollout.temperature, toy.evaluation.eval_temperature, toy.evaluation.eval_num_samples) == (
        0.6,
        0.6,
        30,
    )
    assert (toy.model.use_peft, toy.model.lora_r, toy.model.lora_alpha) == (False, 64, 128)
    multi = load("multi_tasks").config
    assert set(multi.tasks.eval_datasets) - set(multi.tasks.datasets) == {"base_conversion"}
    assert (multi.update.learning_rate, multi.rollout.max_completion_length) == (3e-6, 384)
    assert (
        multi.rollout.temperature,
        multi.evaluation.eval_temperature,
        multi.evaluation.eval_num_samples,
    ) == (0.6, 0.2, 120)
    for config in (toy, multi):
        assert (config.run.seed, config.tasks.dataset_seed, config.tasks.eval_dataset_seed) == (42, 1, 2)
        assert config.tasks.developer_prompt == "DeepSeekZero"


def test_save_strategy_no_is_a_word_and_not_false() -> None:
    assert load(None, ["save_strategy=no"]).config.run.save_strategy == "no"


def test_a_task_without_a_mapping_is_named():
    for key in ("datasets", "eval_datasets"):
        with pytest.raises(UserError, match=r"the entry of chain_sum is no mapping: write chain_sum: \{"):
            load(None, [f"{key}={{chain_sum: [1, 2]}}"])


def test_auto_resume_says_where_the_run_of_before_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("auto_resume: true\n")
    assert load("my.yaml").config.run.run_name == "my"
    (tmp_path / "outputs" / "checkpoint-3").mkdir(parents=True)  # files had no folder of their own
    with pytest.raises(UserError, match=r"output_dir=outputs to resume .* or run_name=my for a new one"):
        load("my.yaml")
    assert load("my.yaml", ["output_dir=outputs"]).config.run.run_name is None
    for setting in ("run_name=my", "auto_resume=false"):
        assert load("my.yaml", [setting]).config.run.run_name == "my"
    (tmp_path / "outputs" / "my").mkdir()
    assert load("my.yaml").config.run.run_name == "my"
