"""One contender's whole GRPO steps: called by step.py, prints one JSON row.

`ours` is whetstone's own loop (`train.loop`): native engine, scoring processes, packed update. `trl_generate`
and `trl_vllm` are TRL's GRPOTrainer in its own loop. All of them get the same prompts in the same order, the
same reward function, one step to warm up, and go on to the last token whatever the model says.
"""

import contextlib
import dataclasses
import json
import logging
import sys
import tempfile
from typing import Any

import torch
from contest import REPEATS, Row, attempt
from quiet import Others, wait_for_quiet
from step_reward import digit_share

STEPS = 1 + REPEATS


def main() -> None:
    task = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)
    row = {"who": task["who"], "size": task["size"], "settings": task["setting"]}
    attempt(row, lambda: CONTENDERS[task["who"]](task))


def configuration(task: Row) -> dict[str, Any]:
    """The run as whetstone is told it; TRL gets its problems out of the same."""
    return {
        "model_name_or_path": task["model"],
        "device": task["device"],
        "bf16": task["device"] == "cuda",
        "apply_chat_template": False,
        "prompt_template": "{question}",
        "datasets": {"math": {"config": {"path": task["prompts"]}}},
        "reward_funcs": ["step_reward.py:digit_share"],
        "prompts_per_step": task["num_prompts"],
        "num_generations": task["group"],
        "max_completion_length": task["new_tokens"],
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "eval_num_samples": 0,
        "log_completions_steps": 0,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": tempfile.mkdtemp(),
    }


def ours(task: Row) -> Row:
    from whetstone.config import LoadedConfig
    from whetstone.config import build as build_config
    from whetstone.rollout import source
    from whetstone.run.setup import build, init_distributed
    from whetstone.train import loop

    params = source.sampling_params  # the only thing that training has no key for: going on after the end
    source.sampling_params = lambda *args: dataclasses.replace(params(*args), ignore_eos=True)
    config = build_config({**configuration(task), **task["setting"]})
    rows: list[Row] = []
    others = Others()

    class Recorder:
        def log(self, step: int, row: Row) -> None:
            peak = max(run.throughput.timer.peaks_gb.values())
            rows.append({**row, "peak_gb": peak, "others": others.share()})
            if task["device"] == "cpu" and step < STEPS:
                wait_for_quiet()
            others.begin()

    with contextlib.ExitStack() as stack:
        run, _, _ = build(
            LoadedConfig(config=config, origins={}, notes=()), init_distributed(config, stack), stack
        )
        run.throughput.exact = True
        for _ in loop(dataclasses.replace(run, metrics=Recorder()), 0, 0.0):  # type: ignore[arg-type]
            pass
    assert all(row["completions/mean_length"] == task["new_tokens"] for row in rows), (
        "a completion ended early"
    )
    best = min(rows[1:], key=lambda row: row["step_time"])
    return {
        "generation_s": round(best["time/rollout"], 3),
        "scoring_s": round(best["time/reward_wait"], 3),
        "update_s": round(best["time/update"], 3),
        "sync_s": round(best["time/weight_sync"], 3),
        **totals([row["step_time"] for row in rows], [row["others"] for row in rows], task),
        "peak_gb": round(rows[-1]["peak_gb"], 2),
    }


def totals(seconds: list[float], others: list[float | None], task: Row) -> Row:
    """The best of the measured steps, and all of them; how busy others kept a core meanwhile, on a CPU."""
    best = min(seconds[1:])
    tokens = task["num_prompts"] * task["group"] * task["new_tokens"]
    row = {"total_s": round(best, 3), "all_total_s": [round(one, 3) for one in seconds[1:]]}
    row |= {"warmup_s": round(seconds[0], 2), "new_tokens": tokens, "tokens_per_s": round(tokens / best)}
    if task["device"] == "cpu":
        row["others_share"] = [None if one is None else round(one, 2) for one in others[1:]]
    else:
        free, whole = torch.cuda.mem_get_info()
        row["device_gb"] = round((whole - free) / 1e9, 1)
    return row


def with_trl(task: Row) -> Row:
    """GRPOTrainer, with transformers' generate or with vLLM in the same process."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl_clock import StepClock

    from whetstone.run.timing import peak_memory_gb, reset_peak_memory

    device = torch.device(task["device"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def before() -> None:
        if device.type == "cpu":
            wait_for_quiet()
        reset_peak_memory(device)

    clock = StepClock(wait, before)
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=digit_share,
        args=trl_arguments(task),
        train_dataset=Dataset.from_dict({"prompt": prompts_of(task, tokenizer)}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.eos_token_ids = [-1]  # nothing ends a completion
    clock.watch(trainer, "_generate", "generation")
    clock.watch(trainer, "_calculate_rewards", "scoring")
    if trainer.use_vllm:
        clock.watch(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "loss" in log]
    assert all(length == task["new_tokens"] for length in lengths), f"a completion ended early: {lengths}"
    best = min(range(1, STEPS), key=lambda step: clock.seconds[step])
    spent = {"sync": 0.0, **clock.spent[best]}
    total = clock.seconds[best]
    return {
        "generation_s": round(spent["generation"] - spent["sync"], 3),
        "scoring_s": round(spent["scoring"], 3),
        "update_s": round(total - spent["generation"] - spent["scoring"], 3),
        "sync_s": round(spent["sync"], 3),
        **totals(clock.seconds, clock.others, task),
        "peak_gb": round(peak_memory_gb(device), 2),
    }


def trl_arguments(task: Row) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    is_gpu, sequences = task["device"] == "cuda", task["num_prompts"] * task["group"]
    setting = dict(task["setting"])
    dtype = setting.pop("dtype")
    accumulation = sequences // setting["per_device_train_batch_size"]
    # generate is told by an id that no token has, vLLM by a flag; it needn't make text, TRL does
    endless: dict[str, Any] = {"eos_token_id": [-1]}
    if setting.get("use_vllm"):
        endless = {"ignore_eos": True, "detokenize": False}
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        model_init_kwargs={"dtype": dtype},
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=task["group"],
        max_completion_length=task["new_tokens"],
        max_steps=STEPS,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        bf16=is_gpu,
        use_cpu=not is_gpu,
        dataloader_pin_memory=is_gpu,
        shuffle_dataset=False,
        generation_kwargs=endless,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **setting,
    )


def prompts_of(task: Row, tokenizer: Any) -> list[str]:
    """The prompts of our run, in its order."""
    from whetstone.config import build as build_config
    from whetstone.model.chat import Chat
    from whetstone.run.setup import build_tasks_and_plan

    config = build_config(configuration(task))
    _, tasks, _ = build_tasks_and_plan(config)
    chat = Chat(tokenizer, config.model)
    return [chat.prompt(tasks.problem(index)) for index in range(STEPS * task["num_prompts"])]


TRL = ("trl_generate", "trl_vllm", "trl_vllm_uncorrected", "trl_vllm_float32")
CONTENDERS = {"ours": ours, **dict.fromkeys(TRL, with_trl)}

if __name__ == "__main__":
    main()
