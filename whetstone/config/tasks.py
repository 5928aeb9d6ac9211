"""The section of the tasks: which problems, when they get harder, and their rewards."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from whetstone.config.base import MAX_COUNT, Name, Resume, Section, Seed, Text, accept


class CurriculumSpec(Section):
    """reasoning-gym's levels of difficulty, climbed by accuracy. `curriculum: true` takes these defaults."""

    start: int = Field(default=0, ge=0, le=1_000)
    """The level that training begins at."""
    top: int | None = Field(default=None, ge=0, le=1_000)
    """The highest level that is used; none: all there are."""
    up: float = Field(default=0.8, gt=0, le=1)
    """One level up when at least this share of the newest answers is right."""
    down: float | None = Field(default=None, ge=0, lt=1)
    """One level down when at most this share is right; none: never."""
    window: int = Field(default=128, ge=1, le=1_000_000)
    """How many answers, all of the present level, that share is taken over."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top is not None and self.top < self.start:
            raise ValueError(f"top is {self.top}, below start, which is {self.start}: raise it")
        if self.down is not None and self.down >= self.up:
            raise ValueError(f"down is {self.down}, which must be below up, {self.up}: lower it")
        return self


class TaskSpec(Section):
    """One entry of `datasets`: its share of the mixture, the task's own settings, and how they get harder."""

    weight: float = Field(default=1.0, ge=0, le=MAX_COUNT)
    config: dict[str, Any] = Field(default_factory=dict)
    curriculum: Annotated[CurriculumSpec | None, accept({True: {}, False: None})] = None


OneOrMany = Annotated[list[Name], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
# Tasks whose own prompts ask for no <answer> tags.
_WITHOUT_TAGS = frozenset(
    {"math", "code", "rows", "repair", "environment", "guess_number", "wordle", "maze_walk"}
)
_PROMPTS_WITH_TAGS = frozenset({"DeepSeekZero", "default", "simple", "direct", "chain_of_draft"})


class TasksConfig(Section):
    """Which problems, and what is paid for their answers."""

    datasets: dict[str, TaskSpec] = Field(default_factory=dict)
    """Tasks `{name: {weight, config, curriculum}}`; curriculum: true or {start, top, up, down, window}."""
    eval_datasets: dict[str, TaskSpec] = Field(default_factory=dict)
    """Tasks to evaluate on; empty: the training tasks (on other problems)."""
    dataset_size: int = Field(default=10_000, ge=1, le=10_000_000)
    """How many training problems there are before they come round again (generated tasks)."""
    dataset_seed: Seed = 1
    """Seed of the training problems."""
    eval_dataset_seed: Seed = 2
    """Seed of the evaluation problems."""
    developer_prompt: Text | None = None
    """System message: a text, or DeepSeekZero, default, simple, direct, chain_of_draft (reasoning-gym's)."""
    developer_role: Name = "system"
    """Role under which the developer prompt is given; `user` puts it in front of the question."""
    reward_funcs: OneOrMany = Field(default_factory=lambda: ["accuracy", "format"])
    """`accuracy`, `format` (default where prompts ask for tags), `length`, or my_rewards.py:function."""
    reward_weights: list[Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT)]] | None = None
    """One weight per entry of reward_funcs; all 1 by default."""
    reward_correct: float = Field(default=1.0, ge=-MAX_COUNT, le=MAX_COUNT)
    """Math and rows: accuracy reward of a right answer."""
    reward_wrong: float = Field(default=-1.0, ge=-MAX_COUNT, le=MAX_COUNT)
    """Math and rows: accuracy reward of a wrong answer; 0 by default where all tasks are rows."""
    reward_no_answer: float = Field(default=-0.5, ge=-MAX_COUNT, le=MAX_COUNT)
    """Math and rows: accuracy reward where no answer is found; 0 by default where all tasks are rows."""
    overlong_buffer_length: int = Field(default=0, ge=0, le=16_777_216)
    """The `length` reward falls from 0 to -1 over the last so many tokens before max_completion_length."""
    reward_timeout_s: float = Field(default=10.0, gt=0, le=86_400)
    """Hard time limit for scoring one answer; one that takes longer earns nothing and is counted."""
    reward_workers: Annotated[int, Resume.SAFE] = Field(default=0, ge=0, le=256)
    """Processes that score answers (of each rank); 0: one per two cores, at least one and at most 16."""
    max_reward_failure_fraction: float = Field(default=0.2, ge=0, le=1)
    """The run stops when scoring fails (hangs, crashes, raises) on a larger fraction of a step's answers."""

    @model_validator(mode="before")
    @classmethod
    def _rows_pay_0_or_1(cls, values: Any) -> Any:
        """Rows of the user's own pay 1 for a right answer and 0 for all others, unless somebody chose."""
        datasets = values.get("datasets") if isinstance(values, dict) else None
        if isinstance(datasets, dict) and datasets and all(str(n).split("/")[0] == "rows" for n in datasets):
            return {"reward_wrong": 0.0, "reward_no_answer": 0.0, **values}
        return values

    @field_validator("datasets", "eval_datasets", mode="before")
    @classmethod
    def _specs(cls, value: Any) -> Any:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError("give a mapping of tasks, such as {chain_sum: {config: {max_terms: 3}}}")
        wrong = next(
            (name for name, spec in value.items() if isinstance(spec, list | str | int | float)), None
        )
        if wrong is not None:
            raise ValueError(
                f"the entry of {wrong} is no mapping: write {wrong}: {{weight: 1, config: {{}}}}"
            )
        return {name: {} if spec is None else spec for name, spec in value.items()}

    @model_validator(mode="before")
    @classmethod
    def _default_rewards(cls, values: Any) -> Any:
        """The format reward is for tasks whose prompt asks for tags: math alone pays for the answer alone."""
        if not isinstance(values, dict) or "reward_funcs" in values or not values.get("datasets"):
            return values
        try:
            names = cls._specs(values["datasets"])
        except ValueError:  # the field's own check says what is wrong with it
            return values
        prompt = str(values.get("developer_prompt") or "")
        asks = "<answer>" in prompt or prompt.strip() in _PROMPTS_WITH_TAGS
        with_tags = [n for n in map(str, names) if n.split("/")[0] not in _WITHOUT_TAGS and ":" not in n]
        return values if asks or with_tags else {**values, "reward_funcs": ["accuracy"]}

    @model_validator(mode="before")
    @classmethod
    def _pay_environments(cls, values: Any) -> Any:
        """As in TRL, an environment's own reward is paid beside reward_funcs, with weight 1."""
        datasets = values.get("datasets") if isinstance(values, dict) else None
        funcs = values.get("reward_funcs") if isinstance(datasets, dict) else None
        if funcs is None or not any(str(name).split("/")[0] == "environment" for name in datasets or ()):
            return values
        funcs = [funcs] if isinstance(funcs, str) else funcs
        if not isinstance(funcs, list) or "accuracy" in funcs:
            return values
        weights = values.get("reward_weights")
        more = {"reward_weights": [*weights, 1.0]} if isinstance(weights, list) else {}
        return {**values, "reward_funcs": [*funcs, "accuracy"], **more}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.reward_funcs:
            raise ValueError("reward_funcs is empty: name at least `accuracy`")
        fixed = next((name for name, spec in self.eval_datasets.items() if spec.curriculum), None)
        if fixed is not None:
            raise ValueError(
                f"eval_datasets gives {fixed} a curriculum, but the evaluation's problems never change: move "
                "it to datasets"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {len(self.reward_funcs)} "
                f"reward_funcs ({', '.join(self.reward_funcs)}): give one weight for each"
            )
        return self
