"""The sections of the configuration: one frozen model each, with typed, bounded and documented keys.

Larger sections have a file of their own. A YAML file is flat; `load.py` sorts its keys into the sections. The
text under a field is its help in `whet config`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from whetstone.config.base import (
    MAX_COUNT,
    MAX_SECONDS,
    MIN_TEMPERATURE,
    Name,
    Resume,
    Section,
    Steps,
    Temperature,
    Text,
    accept,
)
from whetstone.config.engine_traits import EngineName, engine_traits
from whetstone.config.engines import EnginesConfig
from whetstone.config.environments import EnvironmentsConfig
from whetstone.config.loss import CriticConfig, LossConfig
from whetstone.config.losses import LOSSES
from whetstone.config.plugins import PluginSpec
from whetstone.config.run import RunConfig
from whetstone.config.tasks import TasksConfig
from whetstone.config.update import UpdateConfig


class ModelConfig(Section):
    """Which model, in which precision, with which adapter."""

    model_name_or_path: Annotated[Name, Resume.FIXED] = "pebble"
    """`pebble` (embedded), `smollm2-135m`, or any folder or hub name that transformers can load."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` takes the GPU if there is one."""
    bf16: Annotated[bool, accept({None: False})] = False
    """bfloat16 weights and activations, trained as float32 (docs/update.md). A CPU runs in float32."""
    attn_implementation: Name | None = None
    """Attention of the `hf` engine's generate. Update and native engine have their own packed attention."""
    gradient_checkpointing: Annotated[bool | Literal["auto"], Resume.SAFE] = "auto"
    """Recompute activations in the backward pass: less memory, more time. `auto`: as few layers as needed."""
    torch_compile: bool | Literal["auto"] = "auto"
    """Compile the layers for the update: about 25 % faster. `auto`: on a GPU, from 50 M parameters on."""
    use_peft: Annotated[bool, Resume.FIXED] = False
    """Train a LoRA adapter instead of all weights."""
    lora_r: Annotated[int, Resume.FIXED] = Field(default=16, ge=1, le=4096)
    """Rank of the adapter."""
    lora_alpha: Annotated[int, Resume.FIXED] = Field(default=32, ge=1, le=1_048_576)
    """Scale of the adapter: its product is multiplied by lora_alpha / lora_r."""
    use_rslora: Annotated[bool, Resume.FIXED] = False
    """Multiply it by lora_alpha / sqrt(lora_r) instead (rank-stabilized LoRA)."""
    use_dora: Annotated[bool, Resume.FIXED] = False
    """Train the magnitudes of the matrices too (DoRA). Slower: engine and update run module by module."""
    load_in_4bit: Annotated[bool, Resume.FIXED] = False
    """Keep the weights beneath the adapter in 4 bits (QLoRA, NF4): a quarter of the memory, more time."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in front of the adapter, in the update only."""
    lora_target_modules: Annotated[Name | list[Name] | None, Resume.FIXED] = "all-linear"
    """Which linear layers get an adapter: `all-linear`, or a list of module names."""
    apply_chat_template: bool = True
    """Format messages by the tokenizer's chat template; false for base models (see `prompt_template`)."""
    chat_template: Text | None = None
    """A chat template (Jinja) in place of the tokenizer's own."""
    chat_template_kwargs: Annotated[dict[str, Any], accept({None: {}})] = Field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false}; it must know them."""
    prompt_template: Text = "{system}\nUser: {question}\nAssistant: "
    """The prompt without chat template; `{system}` and `{question}` are filled in."""
    assistant_prefix: Text = ""
    """Text that the assistant's turn begins with, part of the prompt: `Let me think.\\n<think>`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ours = {"tokenize", "add_generation_prompt", "messages", "conversation"}
        if both := sorted(ours & set(self.chat_template_kwargs)):
            raise ValueError(f"chat_template_kwargs sets {', '.join(both)}: leave it out")
        if self.load_in_4bit and not self.use_peft:
            raise ValueError("weights of 4 bits can't be trained: set use_peft: true with load_in_4bit")
        if self.load_in_4bit and self.use_dora:
            raise ValueError("use_dora needs whole matrices: leave it out, or load_in_4bit")
        return self


class ProgramsConfig(Section):
    """Code tasks: what is paid for a program that runs, and how it is kept from doing harm."""

    use_reasoning_format: bool = False
    """Ask for `<reasoning>...</reasoning><answer>...</answer>`; false: the program directly."""
    base_reward_weight: float = Field(default=1.0, ge=0, le=MAX_COUNT)
    """Reward for the fraction of passed tests (all or nothing with test_reward: all)."""
    perfect_reward_weight: float = Field(default=1.0, ge=0, le=MAX_COUNT)
    """What is paid on top for passing every test."""
    test_reward: Literal["partial", "all"] = "partial"
    """`partial`: base_reward_weight x fraction of tests passed; `all`: only if all of them pass."""
    max_tests_per_problem: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Tests for a training answer, chosen once per problem by dataset_seed; 0: all, as in evaluation."""
    sandbox_pool: Literal["local", "ray"] = "local"
    """Where programs run: on this machine, one at a time for each of reward_workers, or on a Ray cluster."""
    ray_address: Name = "auto"
    """Ray cluster of sandbox_pool: ray; `auto` finds a running one, `local` starts one here."""
    sandbox_isolation: Literal["auto", "namespaces", "filters", "limits"] = "auto"
    """`auto`: the strongest that works, at least `filters`; `limits`: files and network are not protected."""
    sandbox_time_limit_s: float = Field(default=2.0, gt=0, le=3_600)
    """For one test of a problem that names no time limit of its own."""
    sandbox_memory_mb: int = Field(default=512, ge=32, le=1_048_576)
    """For all processes of a program together."""
    sandbox_output_kb: int = Field(default=256, ge=1, le=1_048_576)
    """What a program may print in one test; more ends it."""


class RolloutConfig(Section):
    """How many completions, how long, and how they are sampled."""

    num_generations: int = Field(default=8, ge=1, le=65_536)
    """Completions per prompt: the group whose mean is the baseline."""
    generation_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Completions of one round of sampling, of all devices; TRL's other way to say steps_per_generation."""
    prompts_per_step: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts per optimizer step. Default: from per_device_train_batch_size, as TRL counts."""
    per_device_train_batch_size: int = Field(default=8, ge=1, le=MAX_COUNT)
    """Completions per device and accumulation step (TRL's arithmetic; memory: micro_batch_tokens)."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Accumulation steps per optimizer step (TRL's arithmetic)."""
    steps_per_generation: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Accumulation steps per round of sampling: a multiple of gradient_accumulation_steps, its default."""
    max_prompt_length: int | None = Field(default=None, ge=1, le=16_777_216)
    """Longer prompts lose their beginning (counted in the metrics). Default: no limit but the model's."""
    filter_overlong_prompts: bool = False
    """Leave out rows whose prompt is longer than max_prompt_length, and say how many."""
    max_completion_length: int = Field(default=512, ge=1, le=16_777_216)
    """Most tokens sampled for an answer; one that reaches it is truncated."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=1_000)
    """Sampling temperature in training; the loss uses logprobs at the same temperature."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int | None = Field(default=None, ge=0, le=16_777_216)
    """Sample from the k likeliest tokens; none or 0: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample only tokens at least this likely relative to the likeliest."""
    rollout_engine: EngineName | PluginSpec = "native"
    """`native` (in process), `hf` (generate), `vllm`, `sglang` (docs/servers.md), or my_engine.py:Engine."""
    vllm_mode: Literal["server", "colocate"] = "server"
    """Where vLLM runs: a server of its own, or in this process."""
    dynamic_sampling: bool = False
    """Replace prompts whose completions all earn the same, which teach nothing, by fresh ones (DAPO)."""
    dynamic_sampling_max_rounds: int = Field(default=3, ge=1, le=1_000)
    """Dynamic sampling gives up after so many rounds and trains on what it has."""
    async_rollouts: int = Field(default=0, ge=0, le=1)
    """1: the next batch is sampled during the update, from weights one batch old (a copy, in process)."""
    rejection_sampling: bool = False
    """With loss_type: sft, train on correct completions of the policy instead of given solutions (STaR)."""
    rollout_quantization: Literal["none", "fp8"] = "none"
    """fp8: the native engine decodes with 8-bit MLPs; importance_correction is then token_truncate."""
    max_num_seqs: Annotated[int | None, Resume.SAFE] = Field(default=None, ge=1, le=65_536)
    """Sequences decoded at once; more wait for a free slot. Default: 1,024 on a GPU, 256 elsewhere."""

    @property
    def is_truncated(self) -> bool:
        """Whether unlikely tokens are cut off: the sampler's logprobs are then not the trainer's."""
        return self.top_p < 1 or bool(self.top_k) or bool(self.min_p)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError("generation_batch_size and steps_per_generation say the same: leave one out")
        traits = engine_traits(self.rollout_engine)
        if traits.has_servers and not traits.can_colocate and self.vllm_mode == "colocate":
            raise ValueError("vllm_mode: colocate is for vLLM; SGLang runs as a server: leave vllm_mode out")
        if self.rollout_quantization != "none" and not traits.can_quantize:
            raise ValueError(
                "rollout_quantization is for rollout_engine: native, and this one is "
                f"{self.rollout_engine}: leave it out, or give the server its own option (server_args)"
            )
        return self


class EvaluationConfig(Section):
    """The fixed problems that progress is measured on."""

    fixed_eval_steps: Annotated[Steps, Resume.SAFE] = 0
    """Steps between evaluations, beside step 0 and the end; 0: only those; below 1: a fraction of all."""
    eval_num_samples: int = Field(default=100, ge=0, le=100_000)
    """How many fixed problems (spread over eval_datasets by weight); 0: no evaluation."""
    eval_samples_per_problem: int = Field(default=1, ge=1, le=16_384)
    """Completions per problem; more than one gives pass@k."""
    eval_temperature: Temperature = None
    """Sampling temperature of the evaluation, 0 is greedy; default: temperature."""
    eval_greedy: bool = True
    """Also report greedy accuracy at step 0 and at the end."""
    eval_num_examples_to_print: Annotated[int, Resume.SAFE] = Field(default=3, ge=0, le=100_000)
    """Examples shown in the terminal at every evaluation."""
    per_device_eval_batch_size: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Completions sampled at once in evaluation; default: max_num_seqs."""
    eval_only: Annotated[bool, Resume.SAFE] = False
    """Evaluate and stop."""
    checkpoint_path: Annotated[Name | None, Resume.SAFE] = None
    """Model folder or checkpoint to evaluate; default: model_name_or_path."""


class ParallelConfig(Section):
    """How the ranks that a launcher started share the work: ddp_size x shards x tp_size of them."""

    resume: ClassVar = Resume.SAFE
    tp_size: int = Field(default=1, ge=1, le=1_024)
    """Tensor-parallel ranks: each layer's matrices are split over so many ranks with the same tokens."""
    ddp_size: int = Field(default=1, ge=1, le=65_536)
    """Replicas of the sharded weights (FSDP2 within each of so many groups); 1: sharded over all ranks."""
    sequence_parallel: bool = False
    """With tp_size: also split norms and activations between layers along the tokens: less memory."""
    cpu_offload: Annotated[Literal["none", "optimizer", "all"], accept({True: "all", False: "none"})] = "none"
    """Keep optimizer state and reference (all: sharded weights too) in CPU memory while unused. GPU only."""
    heartbeat_timeout_s: float = Field(default=30.0, ge=2, le=600)
    """A rank without a heartbeat for so long is declared dead, and all others end with that reason."""
    collective_timeout_s: float = Field(default=1800.0, ge=10, le=MAX_SECONDS)
    """Longest wait of one rank for the others (the slowest rollouts, the loading of a large model)."""


class MeasurementConfig(Section):
    """What the device could do, for those that this package does not know. Does not affect training."""

    resume: ClassVar = Resume.SAFE
    peak_tflops: float | None = Field(default=None, gt=0, le=1_000_000)
    """Dense bf16 TFLOP/s of one device, of which `mfu` is a fraction. Default: by its name, where known."""


class Config(Section):
    """All sections of a run."""

    @model_validator(mode="before")
    @classmethod
    def _default_importance_correction(cls, sections: Any) -> Any:
        """Stale samples, and samples of quantized weights, get importance weights unless the user chose."""
        flat = sections if isinstance(sections, dict) else {}
        rollout, loss = flat.get("rollout"), flat.get("loss", {})
        if not isinstance(rollout, dict) or not isinstance(loss, dict):
            return sections
        if rollout.get("async_rollouts") or rollout.get("rollout_quantization", "none") != "none":
            return {**flat, "loss": {"importance_correction": "token_truncate", **loss}}
        return sections

    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    programs: ProgramsConfig = Field(default_factory=ProgramsConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    environments: EnvironmentsConfig = Field(default_factory=EnvironmentsConfig)
    engines: EnginesConfig = Field(default_factory=EnginesConfig)
    update: UpdateConfig = Field(default_factory=UpdateConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    measure: MeasurementConfig = Field(default_factory=MeasurementConfig)

    @property
    def training_temperature(self) -> float:
        """The temperature of the logprobs in the loss: that of sampling, 1 for given solutions."""
        return 1.0 if self.loss.is_supervised else self.rollout.temperature

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether completions whose gradient is 0 stay out of the update."""
        return self.update.skip_zero_advantages and self.can_skip_zero_advantages

    @property
    def can_skip_zero_advantages(self) -> bool:
        """Whether equal rewards within a group mean that its completions have no gradient."""
        loss = self.loss
        has_bonus = loss.entropy_coef != 0 or loss.entropy_target is not None
        only_advantages = loss.beta == 0 and not has_bonus and loss.top_entropy_quantile == 1
        is_proportional = loss.loss_type in LOSSES and not loss.is_supervised  # 0 where the advantage is 0
        is_relative = loss.advantage in ("group", "rloo") and is_proportional
        return only_advantages and is_relative

    @model_validator(mode="after")
    def _check_supervised(self) -> Self:
        if self.rollout.rejection_sampling and not self.loss.is_supervised:
            raise ValueError(
                "rejection_sampling is for supervised training: use `whet sft`, or loss_type: sft"
            )
        if not self.loss.is_supervised:
            return self
        has_curriculum = any(spec.curriculum for spec in self.tasks.datasets.values())
        for key, is_set in (
            ("advantage: gae", self.loss.advantage == "gae"),
            ("async_rollouts", self.rollout.async_rollouts > 0),
            ("importance_correction", self.loss.importance_correction != "none"),
            ("off_policy_mask_threshold", self.loss.off_policy_mask_threshold is not None),
            ("dynamic_sampling", self.rollout.dynamic_sampling),
            ("sft_steps", self.update.sft_steps > 0),
            ("curriculum", has_curriculum),
        ):
            if is_set:
                raise ValueError(f"{key} is for RL, and loss_type is sft: leave it out")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        engine = self.rollout.rollout_engine
        for key in ("use_rslora", "use_dora", "load_in_4bit"):
            if self.model.use_peft and getattr(self.model, key) and key not in engine_traits(engine).adapters:
                raise ValueError(
                    f"{engine} has no adapters with {key}: leave it out, or set rollout_engine: native"
                )
        if self.model.load_in_4bit and self.rollout.rollout_quantization != "none":
            raise ValueError("rollout_quantization is for weights of 16 bits: leave it out, or load_in_4bit")
        if self.model.load_in_4bit and self.loss.advantage == "gae" and self.critic.critic == "model":
            raise ValueError("critic: model trains whole matrices: set critic: head, or no load_in_4bit")
        if self.run.load_best_model_at_end and not self.evaluation.eval_num_samples:
            raise ValueError("load_best_model_at_end needs the fixed evaluation: set eval_num_samples: 100")
        if self.rollout.vllm_mode == "colocate" and self.engines.addresses:
            raise ValueError(
                f"vllm_mode is colocate, but the server {self.engines.addresses[0]} is named: leave the "
                "server out, or set vllm_mode: server"
            )
        return self
