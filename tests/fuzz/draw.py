"""Random valid configurations: every key has values to draw, or a reason why it is left out."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whetstone.config import load, make_plan
from whetstone.errors import UserError
from whetstone.tasks import gym
from whetstone.tasks.registry import environments_of

# Small enough that a run takes a second on one core.
BASE: dict[str, Any] = {
    "model_name_or_path": "pebble",
    "device": "cpu",
    "max_steps": 2,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "eval_num_samples": 0,
    "eval_num_examples_to_print": 0,
    "reward_workers": 1,
    "preflight": "off",
    "watch": False,
    "save_steps": 1,
    "log_completions_steps": 1,
    "full_determinism": True,
    "max_reward_failure_fraction": 1.0,
    "run_name": "run",
}
OUTSIDE = "needs a server, a second rank, a GPU or a service"
LEFT_OUT = {
    **dict.fromkeys(
        [
            "vllm_mode",
            "rollout_servers",
            "server_base_url",
            "server_host",
            "server_port",
            "server_timeout_s",
            "server_request_timeout_s",
            "server_gpu_memory_utilization",
            "server_tensor_parallel_size",
            "server_max_model_length",
            "server_enable_sleep_mode",
            "server_group_port",
            "server_devices",
            "server_python",
            "server_args",
            "weight_transfer",
            "weight_transfer_dir",
            "tp_size",
            "ddp_size",
            "sandbox_pool",
            "ray_address",
            "report_to",
            "push_to_hub",
            "hub_model_id",
            "hub_private_repo",
            "wandb_project",
            "wandb_name",
            "wandb_entity",
            "wandb_tags",
            "watch",
            "device",
            "rollout_quantization",
        ],
        OUTSIDE,
    ),
    **dict.fromkeys(
        ["output_dir", "run_name", "auto_resume", "resume_from_checkpoint", "overwrite_output_dir"],
        "how a run is found again: set by the trial",
    ),
    **dict.fromkeys(["eval_only", "checkpoint_path"], "no training"),
    "torch_compile": "minutes on a CPU: tests/model/test_compiled.py",
    "model_name_or_path": "one embedded model",
    "max_skipped_steps": "a run that ends on purpose",
    **dict.fromkeys(["sandbox_time_limit_s", "reward_timeout_s", "environment_timeout_s"], "a busy machine"),
    "datasets": "drawn as a whole by `_tasks`",
    **dict.fromkeys(["environment_memory_mb", "sandbox_memory_mb"], "limits of the machine"),
}
# key -> its values
VALUES: dict[str, list[Any]] = {
    "bf16": [True],
    "attn_implementation": ["sdpa", "eager"],
    "gradient_checkpointing": [True, False],
    "use_peft": [True, True],
    "lora_r": [1, 2, 8],
    "lora_alpha": [1, 16, 64],
    "use_rslora": [True],
    "use_dora": [True],
    "load_in_4bit": [True],
    "lora_dropout": [0.1, 0.5],
    "lora_target_modules": [["q_proj"], ["q_proj", "v_proj"], "all-linear"],
    "apply_chat_template": [False],
    "chat_template": ["{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "prompt_template": ["{system}Q: {question} A:", "{question}"],
    "assistant_prefix": ["Let me think.", "<think>\n"],
    "eval_datasets": [{"chain_sum": {}}, {"gcd": {"config": {"max_numbers": 2}}}],
    "dataset_size": [1, 3, 50],
    "dataset_seed": [0, 7],
    "eval_dataset_seed": [0, 9],
    "developer_prompt": ["DeepSeekZero", "Answer with a number.", "simple"],
    "developer_role": ["user", "developer", "system"],
    "reward_funcs": [
        ["accuracy"], ["accuracy", "format"], ["format"], ["length", "accuracy"], ["FILES/rewards.py:count"],
        ["accuracy", "FILES/rewards.py:count", "FILES/rewards.py:mostly_fails"],
    ],
    "reward_weights": [[1.0], [0.5, 2.0], [0.0], [-1.0, 1.0], [1.0, 0.3, 0.1]],
    "reward_correct": [2.0, 0.0],
    "reward_wrong": [-2.0, 0.5],
    "reward_no_answer": [-3.0, 0.25],
    "overlong_buffer_length": [1, 6],
    "reward_workers": [1, 2],
    "max_reward_failure_fraction": [1.0, 0.5],
    "use_reasoning_format": [True],
    "base_reward_weight": [0.0, 3.0],
    "perfect_reward_weight": [0.0, 3.0],
    "test_reward": ["all"],
    "max_tests_per_problem": [0, 1],
    "sandbox_isolation": ["auto", "filters"],
    "sandbox_output_kb": [1, 64],
    "num_generations": [1, 3, 4],
    "generation_batch_size": [4, 8],
    "prompts_per_step": [1, 3, 5],
    "per_device_train_batch_size": [2, 4, 6],
    "gradient_accumulation_steps": [2],
    "steps_per_generation": [2, 4],
    "max_prompt_length": [8, 40],
    "filter_overlong_prompts": [True],
    "max_completion_length": [1, 2, 24],
    "temperature": [0.3, 0.7, 1.3],
    "top_p": [0.5, 0.9],
    "top_k": [0, 1, 5],
    "min_p": [0.0, 0.05, 0.3],
    "rollout_engine": ["hf", "hf", "native"],
    "dynamic_sampling": [True],
    "dynamic_sampling_max_rounds": [1, 2],
    "async_rollouts": [1],
    "rejection_sampling": [True],
    "max_num_seqs": [1, 3],
    "max_turns": [1, 2, 3],
    "tools": [["calculator"], ["python"], ["FILES/tools.py:shout"], ["FILES/tools.py:fails", "calculator"]],
    "tool_call_format": ["code_block"],
    "max_tool_calling_iterations": [0, 1, 2],
    "rollout_func": ["FILES/rollout.py:two_turns"],
    "max_observation_length": [1, 8],
    "agent": ["FILES/agent.py:solve", "FILES/agent.py:sometimes_fails"],
    "agent_max_length": [64, 400],
    "turn_credit": ["turn"],
    "turn_discount": [0.0, 0.5],
    "full_determinism": [True],
    "max_logprob_difference": [1.0],
    "max_steps": [1, 3, 4],
    "num_train_epochs": [0.5, 2.0],
    "sft_steps": [1, 2],
    "sft_learning_rate": [1e-3, 0.0],
    "num_iterations": [2],
    "learning_rate": [0.0, 1e-6, 1e-2],
    "lr_scheduler_type": [
        "constant", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_restarts",
    ],
    "lr_scheduler_kwargs": [{"min_lr_rate": 0.1}, {"num_decay_steps": 1}, {"num_cycles": 2}],
    "warmup_ratio": [0.5, 1.0],
    "warmup_steps": [1, 2, 9],
    "optim": ["adamw_8bit"],
    "bf16_rounding": ["stochastic"],
    "weight_decay": [0.1, 1.0],
    "adam_beta1": [0.0, 0.5],
    "adam_beta2": [0.0, 0.9],
    "adam_epsilon": [1e-6],
    "max_grad_norm": [0.0, 0.01],
    "micro_batch_tokens": [1, 64, 300],
    "skip_zero_advantages": [False],
    "loss_type": [
        "grpo", "bnpo", "dr_grpo", "cispo", "gspo", "sapo", "reinforce", "sft", "FILES/loss.py:squared",
    ],
    "importance_sampling_level": ["sequence"],
    "advantage": ["rloo", "reinforce_pp", "gae", "gae"],
    "scale_rewards": ["batch", "none"],
    "epsilon": [0.0, 0.01, 1.0],
    "epsilon_high": [0.01, 1.0, 3.0],
    "delta": [1.5, 4.0],
    "sapo_temperature_pos": [0.1, 5.0],
    "sapo_temperature_neg": [0.1, 5.0],
    "beta": [0.01, 0.5],
    "kl_reference": ["moving", "rollout"],
    "kl_estimator": ["k1", "k2", "full"],
    "kl_in": ["reward"],
    "target_kl": [0.001, 0.5],
    "ref_model_sync_steps": [1, 2],
    "ref_model_mixup_alpha": [0.01, 1.0],
    "use_bias_correction_kl": [False],
    "entropy_coef": [0.01, -0.01],
    "entropy_target": [0.5, 5.0],
    "entropy_coef_max": [0.2, 2.0],
    "top_entropy_quantile": [0.2, 0.8],
    "mask_truncated_completions": [True],
    "off_policy_mask_threshold": [0.001, 1.0],
    "importance_correction": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "importance_correction_min": [0.5],
    "importance_correction_max": [1.01, 2.0],
    "critic": ["model"],
    "critic_learning_rate": [0.0, 1e-3],
    "critic_warmup_steps": [1, 9],
    "gamma": [0.0, 0.9],
    "gae_lambda": [0.0, 1.0],
    "value_clip": [None, 0.01],
    "value_coef": [0.0, 1.0],
    "fixed_eval_steps": [1, 0.5],
    "eval_num_samples": [2, 3],
    "eval_samples_per_problem": [2],
    "eval_temperature": [0.0, 0.5],
    "eval_greedy": [False],
    "eval_num_examples_to_print": [1],
    "per_device_eval_batch_size": [1, 2],
    "seed": [0, 1, 2**32 - 1],
    "logging_steps": [2, 100],
    "preflight": ["warn"],
    "log_completions_steps": [2],
    "log_tokens_groups": [0, 1],
    "log_tokens_mb": [0.001],
    "save_strategy": ["epoch", "no"],
    "save_steps": [2, 0.5],
    "save_total_limit": [1],
    "load_best_model_at_end": [True],
    "sequence_parallel": [True],
    "cpu_offload": ["optimizer", "all"],
    "heartbeat_timeout_s": [5.0],
    "collective_timeout_s": [60.0],
    "peak_tflops": [100.0],
}  # fmt: skip
WITHOUT_LEVELS = ("acre", "gsm_symbolic", "knight_swap", "list_functions", "modulo_grid")
SCHEDULE_OF = {
    "min_lr_rate": "cosine_with_min_lr",
    "num_decay_steps": "warmup_stable_decay",
    "num_cycles": "cosine_with_restarts",
}
OWN_LOOPS = ("agent", "rollout_func")  # which take no environment and no tools
SUMS = {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
# name -> datasets; FILES stands for the folder of `write_files`
TASKS: dict[str, dict[str, Any]] = {
    "sums": {"chain_sum": SUMS},
    "sums with curriculum": {"chain_sum": {"curriculum": {"up": 0.1, "down": 0.0, "window": 4}}},
    "mixture": {"chain_sum": {**SUMS, "weight": 2.0}, "spell_backward": {}, "gcd": {}},
    "rows": {"rows": {"config": {"path": "FILES/rows.jsonl"}}},
    "few rows": {"rows": {"config": {"path": "FILES/rows.jsonl", "max_samples": 4}}, "chain_sum": SUMS},
    "math": {"math": {"config": {"path": "FILES/math.jsonl"}}},
    "countdown": {"countdown": {}},
    "code": {"code": {"config": {"path": "FILES/code.jsonl", "language": "python"}}},
    "repair": {"repair": {"config": {"path": "FILES/code.jsonl", "language": "python", "max_attempts": 2}}},
    "guess": {"guess_number": {"config": {"high": 5, "max_guesses": 3}}},
    "wordle": {"wordle": {}},
    "maze": {"maze_walk": {}},
    "gymnasium": {"FILES/envs.py:Dice": {"config": {"target": 5}}},
    "trl environment": {"FILES/envs.py:Counter": {}},
    "environment and sums": {"FILES/envs.py:Dice": {}, "chain_sum": SUMS},
    "own task": {"FILES/task.py:Doubles": {}},
}


def undrawn(keys: set[str]) -> set[str]:
    """Keys of the configuration that are neither drawn nor left out: a new key needs values here."""
    return keys - set(VALUES) - set(LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A configuration that `load` and `make_plan` accept."""

    settings: dict[str, Any]
    refusals: list[str] = field(default_factory=list)  # of values that did not fit the others


def draw(seed: int, files: Path) -> Drawn:
    """The configuration of a seed: a task, then random keys, each kept where it fits those before it."""
    rng = random.Random(seed)
    settings = {**BASE, "datasets": _tasks(rng), "seed": rng.randrange(1000)}
    refusals: list[str] = []
    for key in rng.sample(sorted(VALUES), rng.choice((4, 10, 20, 40))):
        changed = {**settings, key: rng.choice(VALUES[key])}
        if key == "num_train_epochs":
            changed |= {"max_steps": -1, "dataset_size": 4}
        if key == "lr_scheduler_kwargs":
            changed["lr_scheduler_type"] = SCHEDULE_OF[next(iter(changed[key]))]
        try:
            check(changed, files)
        except UserError as error:
            refusals.append(str(error))
        else:
            settings = changed
    return Drawn(settings=_with_files(settings, files), refusals=refusals)


def check(settings: dict[str, Any], files: Path) -> None:
    config = load(None, arguments(_with_files(settings, files))).config
    plan = make_plan(config, num_problems=config.tasks.dataset_size)
    if plan.num_steps > 8:
        raise UserError("a long run")
    own = [key for key in OWN_LOOPS if settings.get(key)]
    if len(own) > 1 or (own and (environments_of(config) or config.environments.tools)):
        raise UserError("a loop of its own takes no environment")
    if (config.environments.tools or config.environments.agent) and not config.model.apply_chat_template:
        raise UserError("tools and agents need a chat template")
    if (config.loss.is_supervised or config.update.sft_steps) and environments_of(config):
        raise UserError("games have no solutions")
    if "length" in config.tasks.reward_funcs and not config.tasks.overlong_buffer_length:
        raise UserError("the length reward needs its buffer")


def arguments(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def _tasks(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.4:
        name = rng.choice(sorted(gym.known_names()))
        return {name: {"curriculum": True} if rng.random() < 0.2 and name not in WITHOUT_LEVELS else {}}
    return TASKS[rng.choice(sorted(TASKS))]


def _with_files(settings: dict[str, Any], files: Path) -> dict[str, Any]:
    return json.loads(json.dumps(settings).replace("FILES", str(files)))


FILES = {
    "rewards.py": """
def count(completions, **columns):
    return [len(c[-1]["content"]) / 10 if isinstance(c, list) else len(c) / 10 for c in completions]

def mostly_fails(completions, **columns):
    if len(str(completions)) % 3:
        raise ValueError("no score")
    return [1.0] * len(completions)
""",
    "tools.py": '''
def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: what to say
    """
    return text.upper()

def fails(number: int) -> int:
    """Fail.

    Args:
        number: any
    """
    raise RuntimeError("no")
''',
    "loss.py": """
from whetstone.algorithm.losses import LossOutputs

def squared(inputs, config):
    loss = -inputs.ratio * inputs.advantages
    return LossOutputs(loss=loss, clipped=inputs.ratio > 2.0)

squared.average = "sequence"
""",
    "agent.py": """
import json, urllib.request

def ask(base_url, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def solve(base_url, problem):
    messages = list(problem["messages"])
    first = ask(base_url, messages)
    return ask(base_url, [*messages, {"role": "assistant", "content": first},
                          {"role": "user", "content": "again"}])

def sometimes_fails(base_url, problem):
    text = ask(base_url, list(problem["messages"]))
    if len(text) % 3 == 0:
        raise ValueError("no answer")
    return text
""",
    "envs.py": '''
import random

class Dice:
    def __init__(self, target=6):
        self.target = target

    def reset(self, seed):
        self.dice, self.sum = random.Random(seed), 0
        return f"Reach {self.target} or more. Say roll."

    def step(self, text):
        self.sum += self.dice.randint(1, 6) + len(text) % 2
        over = self.sum >= self.target
        return f"The sum is {self.sum}.", 0.1 * self.sum, over, False, {"correct": over}

class Counter:
    def reset(self, seed=0):
        self.count = 0
        self.target = 1 + seed % 3
        return f"Count to {self.target}."

    def increment(self, step: int) -> str:
        """Increment the counter.

        Args:
            step: by how much
        """
        self.count += step
        return str(self.count)

    def get_reward(self):
        return 1.0 if self.count == self.target else -0.1 * self.count
''',
    "task.py": """
import random
from whetstone.rewards.answers import extract_tag
from whetstone.tasks.base import Task
from whetstone.types import TaskScore

class Doubles(Task):
    description = "twice a number"
    generated = True

    def problem(self, index):
        number = random.Random(f"{self.seed}/{index}").randint(1, 99)
        return self.make_problem(index, f"What is {number} + {number}?", answer=2 * number)

    def gold(self, problem):
        return f"<answer>{problem.answer}</answer>"

    def score(self, problem, text):
        answer = extract_tag(text)
        correct = answer == str(problem.answer)
        return TaskScore(correct=correct, reward=float(correct), answer=answer)
""",
}


def write_files(folder: Path) -> Path:
    """Rows, rewards, tools, environments, an agent and a loss of a user's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    rollout = Path(__file__).parent.parent / "rollout" / "trl_rollout.py"
    (folder / "rollout.py").write_text(rollout.read_text())
    rows = [{"question": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(40)]
    _write(folder / "rows.jsonl", rows)
    _write(folder / "math.jsonl", [{**row, "ground_truth": row["answer"]} for row in rows])
    code = [
        {
            "prompt": f"Write f(x) that returns x + {n}.",
            "tests": [f"assert f(2) == {n + 2}", f"assert f(0) == {n}"],
        }
        for n in range(12)
    ]
    _write(folder / "code.jsonl", code)
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
