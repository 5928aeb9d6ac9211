"""The runs of the recipe pages: name, figures, command as a user would type it, and seconds on one H200.

`recipes.py` runs them. A command names gsm8k/ for the data and outputs/ for models of earlier runs. Seconds
are estimates from the steps of other runs, for planning only.
"""

import re
from dataclasses import dataclass

GSM8K = "data_path=gsm8k/train.jsonl eval_path=gsm8k/test.jsonl"
COUNTDOWN = "learning_rate=4e-6 eval_num_samples=256 eval_temperature=1.0 gradient_checkpointing=auto"
SHARED = {  # a run that several figures have: what it is there
    "countdown_32": {
        "countdown": "chat template",
        "countdown_entropy": "entropy bonus 0.001",
        "countdown_length": "512 tokens",
    }
}
KLONG = "datasets.code.config.language=klong"


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    page: str  # docs/recipes/PAGE.md
    figures: dict[str, str]  # tables and pictures of that page, and the run's label there
    label: str
    command: str
    seconds: int
    start: str | None = None  # the run whose model this one starts from


def _run(name: str, page: str, figures: str, label: str, seconds: int, command: str) -> Run:
    start = re.search(r"=outputs/(?:q/)?(\w+)/final_model", command)
    own_name = "" if command.split()[1] == name else f" run_name={name}"
    return Run(
        name=name,
        page=page,
        figures={figure: SHARED.get(name, {}).get(figure, label) for figure in figures.split()},
        label=label,
        seconds=seconds,
        command=f"whet {command}{own_name}",
        start=None if start is None else start[1],
    )


def _countdown(name: str, figures: str, label: str, seconds: int, settings: str, length: int = 512) -> Run:
    command = f"train countdown {settings} max_completion_length={length} {COUNTDOWN}"
    return _run(name, "countdown", figures, label, seconds, command)


PLAN: tuple[Run, ...] = (
    # reasoning_gym.md
    _run("syllogism_toy", "reasoning_gym", "syllogism", "syllogism_toy", 200,
         "train syllogism_toy eval_num_samples=300 fixed_eval_steps=100"),
    _run("multi_tasks", "reasoning_gym", "multi_tasks", "multi_tasks", 175,
         "train multi_tasks max_steps=120 eval_num_samples=300 eval_temperature=1.0 fixed_eval_steps=60"),
    _run("multi_tasks_1h", "reasoning_gym", "multi_tasks", "multi_tasks_1h", 190,
         "train multi_tasks_1h max_steps=50 fixed_eval_steps=25"),
    _run("grpo", "reasoning_gym", "grpo", "grpo", 175,
         "train grpo max_steps=80 eval_num_samples=300 eval_temperature=1.0 fixed_eval_steps=40"),
    # countdown.md: every experiment has countdown_32, whose batch has 32 prompts
    _countdown("countdown_32", "countdown countdown_batch countdown_entropy countdown_length", "32 prompts",
               175, "prompts_per_step=8 max_steps=96 fixed_eval_steps=48"),
    _countdown("countdown_base", "countdown", "base template", 175,
               "prompts_per_step=8 max_steps=96 fixed_eval_steps=48 apply_chat_template=false "
               "'assistant_prefix=\"Let me solve this step by step.\\n<think>\"'"),
    _countdown("countdown_8", "countdown_batch", "8 prompts", 170, "max_steps=240 fixed_eval_steps=120"),
    _countdown("countdown_128", "countdown_batch", "128 prompts", 185,
               "prompts_per_step=32 max_steps=36 fixed_eval_steps=20"),
    _countdown("countdown_no_entropy", "countdown_entropy", "no entropy bonus", 175,
               "prompts_per_step=8 max_steps=96 fixed_eval_steps=48 entropy_coef=0"),
    _countdown("countdown_entropy", "countdown_entropy", "entropy bonus 0.01", 175,
               "prompts_per_step=8 max_steps=96 fixed_eval_steps=48 entropy_coef=0.01"),
    _countdown("countdown_256", "countdown_length", "256 tokens", 120,
               "prompts_per_step=8 max_steps=96 fixed_eval_steps=48", length=256),
    _countdown("countdown_1024", "countdown_length", "1,024 tokens", 200,
               "prompts_per_step=8 max_steps=72 fixed_eval_steps=36", length=1024),
    *(_run(f"countdown_{name}_{seed}", "countdown", "countdown_python", f"{label}, seed {seed}", seconds,
           f"train countdown_python {settings}seed={seed}")
      for seed in (42, 43, 44)
      for name, label, seconds, settings in (
          ("python", "Python tool", 250, ""), ("plain", "no tool", 230, "tools=[] prompt=null "))),
    # gsm8k.md: supervised steps before RL against RL alone
    _run("gsm8k_rl", "gsm8k", "gsm8k_sft", "RL alone", 170,
         f"train gsm8k {GSM8K} num_generations=8 max_steps=30 fixed_eval_steps=15"),
    _run("gsm8k_sft", "gsm8k", "gsm8k_sft", "SFT", 65,
         f"sft gsm8k {GSM8K} max_samples=1000 prompts_per_step=50 max_steps=40 learning_rate=1e-5"),
    _run("gsm8k_sft_rl", "gsm8k", "gsm8k_sft", "RL after SFT", 125,
         f"train gsm8k {GSM8K} num_generations=8 max_steps=30 fixed_eval_steps=15 "
         "model_name_or_path=outputs/gsm8k_sft/final_model"),
    _run("gsm8k_star", "gsm8k", "gsm8k_sft", "STaR", 150,
         f"sft gsm8k {GSM8K} max_samples=1000 rejection_sampling=true prompts_per_step=100 num_generations=8 "
         "max_steps=20 learning_rate=1e-5"),
    _run("gsm8k_star_rl", "gsm8k", "gsm8k_sft", "RL after STaR", 170,
         f"train gsm8k {GSM8K} num_generations=8 max_steps=30 fixed_eval_steps=15 "
         "model_name_or_path=outputs/gsm8k_star/final_model"),
    # math.md: from the model of gsm8k_sft
    _run("math", "math", "math", "math", 140,
         f"train math {GSM8K} max_steps=100 eval_num_samples=600 fixed_eval_steps=50 "
         "model_name_or_path=outputs/gsm8k_sft/final_model"),
    _run("math_8", "math", "math", "8 completions", 120,
         f"train math {GSM8K} prompts_per_step=32 num_generations=8 learning_rate=5e-5 max_steps=40 "
         "eval_num_samples=600 fixed_eval_steps=20 model_name_or_path=outputs/gsm8k_sft/final_model"),
    _run("math_test", "math", "math_test", "math_test", 40,
         f"train math_test {GSM8K}"),
    # programs.md
    _run("klong", "programs", "klong", "RL alone", 130, "train klong"),
    _run("klong_sft", "programs", "klong", "SFT", 40,
         "sft klong prompts_per_step=32 max_steps=16 learning_rate=1e-5"),
    _run("klong_sft_rl", "programs", "klong", "RL after SFT", 130,
         "train klong model_name_or_path=outputs/klong_sft/final_model"),
    _run("klong_problems", "programs", "problems", "Klong", 100,
         "train klong data_path=problems eval_fraction=0.5 eval_num_samples=28 eval_samples_per_problem=8 "
         "prompts_per_step=16 max_steps=40"),
    _run("programs", "programs", "problems", "Python", 70, "train programs"),
    _run("q_sft", "programs", "q", "SFT", 40,
         f"sft q/1.5b {KLONG} prompts_per_step=16 max_steps=10 learning_rate=1e-5"),
    _run("q_rehearsal", "programs", "q", "RL after SFT", 130,
         f"train q/1.5b {KLONG} max_steps=75 max_completion_length=256 "
         "model_name_or_path=outputs/q/q_sft/final_model"),
    # algorithms.md
    _run("dapo", "algorithms", "dapo", "dapo", 190, "train dapo"),
    _run("local_kl", "algorithms", "dapo", "local_kl", 190, "train local_kl max_steps=80"),
)  # fmt: skip
