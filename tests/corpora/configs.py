"""Bad configurations and command lines: each ends in one sentence and exit code 2, before a model is loaded.

Plain data without pytest: `tests/config/test_bad_configs.py` runs all of it in this process, the torture
campaign as real processes. `arguments(case, folder)` writes the file of a case and gives what follows `whet`.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BadConfig:
    name: str
    text: str | bytes | None = None  # of the YAML file; None: no file, the defaults of quickstart
    argv: tuple[str, ...] = ()  # after the file
    exit_code: int = 2


def arguments(case: BadConfig, folder: Path, verb: str = "train") -> list[str]:
    """What follows `whet` for a case; its file goes into `folder`, and so would its run."""
    words = [f"output_dir={folder / 'runs'}", *case.argv]
    if case.text is None:
        return [verb, "quickstart", *words]
    file = folder / "bad.yaml"
    file.write_bytes(case.text.encode() if isinstance(case.text, str) else case.text)
    return [verb, str(file), *words]


def _bomb(levels: int, width: int, key: str) -> str:
    """Aliases of aliases: a few lines that expand to width ** levels values."""
    lines = ["a0: &a0 [x, x]"]
    for level in range(1, levels + 1):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join([*lines, f"{key}: *a{levels}"]) + "\n"


# --- files that are not what they should be ---
FILES: dict[str, str | bytes] = {
    "alias bomb": _bomb(9, 9, "reward_funcs"),
    "alias bomb in datasets": _bomb(12, 8, "datasets"),
    "alias bomb under an unknown key": _bomb(30, 2, "zzz"),
    "alias bomb of mappings": "x0: &x0 {a: 1}\n"
    + "".join(f"x{i}: &x{i} {{a: *x{i - 1}, b: *x{i - 1}, c: *x{i - 1}}}\n" for i in range(1, 20))
    + "datasets: *x19\n",
    "alias that contains itself": "datasets: &d {chain_sum: *d}\n",
    "list that contains itself": "reward_funcs: &r [*r]\n",
    "alias that is not defined": "max_steps: *nowhere\n",
    "nested too deeply": "datasets: " + "{a: " * 200 + "1" + "}" * 200 + "\n",
    "nested beyond recursion": "reward_funcs: " + "[" * 20_000 + "]" * 20_000 + "\n",
    "block nested beyond recursion": "\n".join(" " * i + f"k{i}:" for i in range(550)) + " 1\n",
    "deep JSON text": "datasets: '" + '{"a":' * 5_000 + "1" + "}" * 5_000 + "'\n",
    "tab as indentation": "max_steps: 1\n\tseed: 2\n",
    "open bracket": "reward_funcs: [accuracy\n",
    "open quote": "run_name: 'abc\n",
    "two documents": "max_steps: 1\n---\nmax_steps: 2\n",
    "a list": "- max_steps\n- seed\n",
    "a text": "max_steps\n",
    "a number": "42\n",
    "a Python object": "run_name: !!python/object/apply:os.system ['true']\n",
    "an unknown tag": "run_name: !secret x\n",
    "not UTF-8": b"run_name: \xff\xfe\n",
    "UTF-16": "max_steps: 3\n".encode("utf-16"),
    "binary": bytes(range(256)),
    "null byte": b"run_name: a\x00b\n",
    "escaped null byte": 'run_name: "a\\0b"\n',
    "null byte in a path": 'output_dir: "a\\0b"\n',
    "null byte in a key": '"max\\0steps": 3\n',
    "null byte in a task's path": 'datasets: {math: {config: {path: "a\\0b"}}}\n',
    "a lone surrogate": 'run_name: "\\ud800"\n',
    "control characters": b"run_name: \x07\x1b[31m\n",
    "a key twice": "max_steps: 3\nmax_steps: 4\n",
    "a task twice": "datasets:\n  chain_sum: {weight: 1}\n  chain_sum: {weight: 2}\n",
    "a key that is a list": "? [a, b]\n: 1\n",
    "a key that is a mapping": "? {a: b}\n: 1\n",
    "a key that is null": "~: 1\n",
    "a key that is a number": "7: 1\n",
    "a key that is empty": '"": 1\n',
    "a file of a megabyte": "run_name: a\n" + "# comment\n" * 120_000,
    "an int of 5,000 digits": "max_steps: " + "9" * 5_000 + "\n",
    "a broken merge": "<<: 3\nmax_steps: 1\n",
    "a configuration of accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n",
    "a data file": '[{"question": "1 + 1", "answer": "2"}]\n',
    "CSV": "question,answer\n1 + 1,2\n",
}

# --- values that no run can have: key -> values ---
VALUES: dict[str, list[str]] = {
    "max_steps": ["0", "-5", "-2", "1.5", "many", "true", "1e12", ".inf", "[]", "{}"],
    "num_train_epochs": ["0", "-1", ".inf", ".nan", "1e300", "x"],
    "learning_rate": [".inf", "-.inf", ".nan", "-1e-6", "1e6", "fast", "[1e-6]"],
    "weight_decay": [".inf", ".nan", "-0.1", "1e9"],
    "adam_beta1": ["1", "1.5", "-0.1", ".nan"],
    "adam_epsilon": ["0", "-1", ".inf"],
    "max_grad_norm": ["-1", ".inf", ".nan"],
    "warmup_ratio": ["2", "-0.1", ".nan"],
    "warmup_steps": ["-1", "1e20", "soon"],
    "num_generations": ["0", "-1", "1000000000", "2.5", "1e12", "true"],
    "prompts_per_step": ["0", "-3", "1e12"],
    "per_device_train_batch_size": ["0", "1e15"],
    "gradient_accumulation_steps": ["0", "99999999999999999999"],
    "steps_per_generation": ["0", "1e9"],
    "generation_batch_size": ["0", "1e12"],
    "max_completion_length": ["0", "-1", "1e18", ".inf"],
    "max_prompt_length": ["0", "1e18"],
    "temperature": ["0", "-1", ".inf", ".nan", "hot", "1e9"],
    "top_p": ["0", "1.5", "-1", ".nan"],
    "top_k": ["-1", "1e18"],
    "min_p": ["-0.1", "2", ".inf"],
    "micro_batch_tokens": ["0", "-1", "1e18", "some"],
    "max_num_seqs": ["0", "1e9"],
    "dynamic_sampling_max_rounds": ["0", "1e9"],
    "async_rollouts": ["2", "-1"],
    "dataset_size": ["0", "-1", "1e12", ".inf"],
    "dataset_seed": ["-1", "99999999999999999999"],
    "seed": ["-1", "99999999999999999999", "1.5", "lucky", "4294967296"],
    "reward_weights": ["[.inf, 1]", "[.nan, 1]", "[1]", "[a, b]", "[1e300, 1]", "3"],
    "reward_funcs": ["[]", "3", "{a: 1}", "null"],
    "reward_correct": [".inf", ".nan", "1e300"],
    "reward_timeout_s": [".inf", "0", "-1", ".nan", "1e18"],
    "reward_workers": ["-1", "100000", "1.5"],
    "max_reward_failure_fraction": ["2", "-1", ".nan"],
    "eval_num_samples": ["-1", "1e12", ".inf"],
    "eval_samples_per_problem": ["0", "1e12"],
    "eval_temperature": ["-1", ".inf"],
    "fixed_eval_steps": ["-1", "2.5", ".nan", "1e12"],
    "save_steps": ["0", "-1", "1.5", ".inf", "often"],
    "logging_steps": ["0", "-1", "1e12"],
    "save_total_limit": ["0", "-1"],
    "save_strategy": ["best", "3", "never"],
    "report_to": ["3", "excel", "[3]", "{wandb: 1}", "true"],
    "loss_type": ["vespo", "ppo", "3", "[grpo]"],
    "advantage": ["mean", "3"],
    "scale_rewards": ["sometimes"],
    "epsilon": ["-1", ".inf", ".nan"],
    "beta": ["-1", ".inf"],
    "delta": ["1.1", "0"],
    "entropy_coef": [".inf", ".nan", "1e300"],
    "kl_reference": ["0.07", "moon"],
    "target_kl": ["0.1"],
    "gamma": ["2", ".nan"],
    "lora_r": ["0", "-1", "1e9"],
    "lora_alpha": ["0", ".inf"],
    "lora_dropout": ["1", "-0.5", ".nan"],
    "optim": ["sgd", "lion_8bit", "3"],
    "device": ["tpu", "cuda:9", "3"],
    "rollout_engine": ["magic", "3"],
    "rollout_servers": ["5", "{a: 1}"],
    "server_port": ["0", "70000"],
    "server_gpu_memory_utilization": ["0", "1.5"],
    "server_timeout_s": [".inf", "0"],
    "tp_size": ["0", "1e9"],
    "heartbeat_timeout_s": ["0", ".inf"],
    "collective_timeout_s": [".inf", "1"],
    "cpu_offload": ["disk", "3"],
    "sandbox_time_limit_s": [".inf", "0"],
    "sandbox_memory_mb": ["1", "1e12"],
    "sandbox_isolation": ["none"],
    "peak_tflops": [".inf", "0"],
    "trainer": ["verl"],
    "bf16": ["maybe", "3"],
    "gradient_checkpointing": ["sometimes", "7"],
    "chat_template_kwargs": ["3", "{tokenize: true}"],
    "run_name": ["..", ".", "/abs", "a/../../b", "a//b", "../x", '"a\\nb"', "a\\b", "' '", "[x]"],
    "datasets": [
        "[chain_sum]", "3", "chain_sum", "{chain_sum: 3}", "{chain_sum: {wieght: 1}}",
        "{chain_sum: {weight: .inf}}", "{chain_sum: {weight: -1}}", "{chain_sum: {weight: 1e300}}",
        "{chain_sum: {config: [1]}}", "{chain_sum: {config: {max_terms: .inf}}}",
        "{chain_sum: {config: {max_terms: 99999999999999999999}}}",
        "{chain_sum: {curriculum: 3}}", "{chain_sum: {curriculum: {up: 2}}}",
        "{chain_sum: {curriculum: {start: 3, top: 1}}}", "'{\"a\": '",
    ],
    "eval_datasets": ["3", "{chain_sum: {curriculum: true}}"],
    "lr_scheduler_kwargs": ["3", "[1]", "{min_lr_rate: .inf}"],
    "max_samples": ["0", "-2", "1.5", "few", ".inf"],
    "max_model_len": ["100", "x", "-1", ".inf"],
    "per_rollout_size": ["0.5", "x", "-1"],
    "updates_per_rollout": ["0", "x"],
    "eval_strategy": ["weekly"],
    "torch_dtype": ["int4", "3"],
    "dataset_name": ["3", "[a, b]"],
    "dataset_configs": ["[a, b]"],
    "answer_column": ["answer"],
    "load_in_4bit": ["true"],
    "load_in_8bit": ["true"],
    "bnb_4bit_quant_type": ["fp4"],
    "use_bnb_nested_quant": ["true"],
    "trust_remote_code": ["true"],
    "use_dora": ["3"],
    "repetition_penalty": ["1.1"],
    "neftune_noise_alpha": ["5"],
    "generation_kwargs": ["{bad_words_ids: [1]}", "3", "{do_sample: false}"],
    "model_init_kwargs": ["{quantization_config: {}}"],
}  # fmt: skip

# --- command lines ---
WORDS: dict[str, tuple[str, ...]] = {
    "a word": ("nonsense",),
    "a single dash": ("-x",),
    "two dashes alone": ("--",),
    "no key": ("=3",),
    "an unknown key": ("learning_rat=1",),
    "three unknown keys": ("train_file=x", "clip_range=0.2", "max_step=3"),
    "a key of 5,000 characters": ("k" * 5_000 + "=1",),
    "a run name of 5,000 characters": ("run_name=" + "r" * 5_000,),
    "a model name of 5,000 characters": ("model_name_or_path=" + "m" * 5_000,),
    "a value that is not UTF-8": (os.fsdecode(b"run_name=\xff\xfe"),),
    "a key that is not UTF-8": (os.fsdecode(b"\xff=1"),),
    "a path that is not UTF-8": (os.fsdecode(b"data_path=\xff.json"),),
    "brackets": ("reward_funcs=" + "[" * 60 + "]" * 60,),
    "deep brackets": ("datasets=" + "{a: " * 2_000 + "1" + "}" * 2_000,),
    "dotted without a key": ("nothing.here=1",),
    "dotted with an empty part": ("datasets..config=1",),
    "dotted into a number": ("datasets={chain_sum: {weight: 1}}", "datasets.chain_sum.weight.x=1"),
    "dotted into an unknown entry": ("datasets.chain_sum.wieght=1",),
    "dotted at the end": ("datasets.=1",),
    "two tasks and one path": ("datasets={math: {}, code: {}}", "data_path=rows.json"),
    "two names for a data set": ("dataset_name=a", "dataset_id_or_path=b"),
    "a switch for a number": ("--num_generations",),
    "servers twice": ("rollout_servers=a:1,a:1",),
    "vLLM and another engine": ("use_vllm=true", "rollout_engine=native"),
    "a server and colocate": ("rollout_engine=vllm", "vllm_mode=colocate", "rollout_servers=a:1"),
    "two ways to say a batch": ("generation_batch_size=16", "steps_per_generation=2"),
    "a batch that does not divide": (
        "prompts_per_step=null", "per_device_train_batch_size=3", "num_generations=2",
    ),
    "one completion": ("num_generations=1",),
    "a generation batch that does not divide": ("generation_batch_size=7",),
    "a batch of a billion": ("prompts_per_step=1000000", "num_generations=65536"),
    "steps that do not divide": ("max_steps=3", "num_iterations=2"),
    "reward weights for another number": ("reward_funcs=[accuracy]", "reward_weights=[1, 2]"),
    "a package that is not known": ("report_to=[wandb, excel]",),
    "cispo with a small bound": ("loss_type=cispo", "epsilon_high=0.2"),
    "fp8 on another engine": ("rollout_quantization=fp8", "rollout_engine=hf"),
}  # fmt: skip

CASES: list[BadConfig] = [
    *(BadConfig(name=f"file: {name}", text=text) for name, text in FILES.items()),
    *(
        BadConfig(name=f"value: {key}: {value}", text=f"{key}: {value}\n")
        for key, values in VALUES.items()
        for value in values
    ),
    *(BadConfig(name=f"words: {name}", argv=argv) for name, argv in WORDS.items()),
]
