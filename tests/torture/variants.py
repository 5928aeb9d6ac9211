"""The variants of the algorithm that runs are killed in: the settings of each, a few seconds a run on
pebble.
"""

from dataclasses import dataclass, field
from pathlib import Path

SUMS = "{chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}}"
MIXED = (
    "{chain_sum: {weight: 2.0, config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}, "
    "spell_backward: {config: {min_word_len: 3, max_word_len: 4}}}"
)
BASE = {
    "model_name_or_path": "pebble",
    "datasets": SUMS,
    "reward_funcs": "[accuracy]",
    "preflight": "off",
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 16,
    "learning_rate": 1e-3,
    "max_steps": 4,
    "fixed_eval_steps": 2,
    "eval_num_samples": 4,
    "eval_greedy": False,
    "eval_num_examples_to_print": 0,
    "log_completions_steps": 1,
    "save_steps": 1,
    "reward_workers": 1,
    "auto_resume": True,
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    settings: dict[str, object] = field(default_factory=dict)
    ranks: int = 1

    def argv(self, output: Path, **changes: object) -> list[str]:
        """The words after `whet` that run it in `output`/run."""
        settings = {**BASE, **self.settings, "output_dir": output, "run_name": "run", **changes}
        return ["train", *(f"{key}={value}" for key, value in settings.items())]

    @property
    def max_steps(self) -> int:
        return int(str(self.settings.get("max_steps", BASE["max_steps"])))


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(name="grpo", settings={"loss_type": "grpo"}),
        Variant(
            name="lora", settings={"use_peft": True, "lora_r": 4, "lora_dropout": 0.2, "learning_rate": 3e-3}
        ),
        Variant(name="critic", settings={"advantage": "gae", "critic_learning_rate": 1e-3}),
        Variant(
            name="critic-model",
            settings={
                "advantage": "gae",
                "critic": "model",
                "critic_learning_rate": 1e-3,
                "critic_warmup_steps": 1,
            },
        ),
        Variant(name="reference", settings={"beta": 0.05}),
        Variant(
            name="moving-reference",
            settings={
                "beta": 0.05,
                "kl_reference": "moving",
                "ref_model_sync_steps": 1,
                "target_kl": 0.01,
                "entropy_target": 0.1,
            },
        ),
        Variant(
            name="dynamic-sampling", settings={"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2}
        ),
        Variant(name="two-iterations", settings={"num_iterations": 2, "max_steps": 6, "save_steps": 2}),
        Variant(
            name="two-parts",
            settings={"steps_per_generation": 2, "max_steps": 6, "save_steps": 2, "loss_type": "cispo"},
        ),
        Variant(name="async", settings={"async_rollouts": 1}),
        Variant(
            name="async-dynamic",
            settings={"async_rollouts": 1, "dynamic_sampling": True, "dynamic_sampling_max_rounds": 1},
        ),
        Variant(
            name="curriculum",
            settings={"datasets": "{chain_sum: {curriculum: {up: 0.1, down: 0.0, window: 8}}}"},
        ),
        Variant(name="one-checkpoint", settings={"save_total_limit": 1}),
        Variant(name="8-bit", settings={"optim": "adamw_8bit", "beta": 0.05}),
        Variant(name="sequence-ratio", settings={"loss_type": "gspo", "epsilon": 3e-4, "datasets": MIXED}),
        Variant(name="hf-engine", settings={"rollout_engine": "hf"}),
        Variant(name="two-ranks", settings={"heartbeat_timeout_s": 5}, ranks=2),
        Variant(
            name="two-ranks-lora",
            settings={"use_peft": True, "lora_r": 4, "heartbeat_timeout_s": 5, "save_total_limit": 2},
            ranks=2,
        ),
        Variant(
            name="two-ranks-tp",
            settings={"tp_size": 2, "heartbeat_timeout_s": 5},
            ranks=2,
        ),
    )
}
