"""One contender's optimizer step on prepared completions: called by update.py, prints a JSON row per work and
setting.

`ours` is whetstone's Updater on packed batches. `padded` is the plain way: right-padded micro-batches, full
logits, log_softmax in float32, fused AdamW on bf16 weights. `trl` is TRL's GRPOTrainer in its own training
loop; only its sampling is replaced, by the completions that are there. Everyone does one step to warm up.
"""

import functools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from contest import REPEATS, attempt
from update_work import Work, work_of

Step = Callable[[], None]


def main() -> None:
    task = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)
    device = torch.device(task["device"])
    for setting in task["settings"]:
        for work in map(work_of, task["works"]):
            row = {"who": task["who"], "size": task["size"], "shape": work.shape, "setting": words(setting)}
            attempt(row, functools.partial(measure, task, work, setting, device))
            release()


def measure(task: dict, work: Work, setting: dict, device: torch.device) -> dict:
    from whetstone.run.timing import peak_memory_gb

    begun = time.perf_counter()
    about, seconds = CONTENDERS[task["who"]](task["model"], work, setting, device)
    return {
        "seconds": round(min(seconds[1:]), 4),
        "all_seconds": [round(one, 4) for one in seconds[1:]],
        "warmup_s": round(seconds[0], 2),
        "setup_s": round(time.perf_counter() - begun - sum(seconds), 1),
        "tokens": work.tokens,
        "peak_gb": round(peak_memory_gb(device), 2),
        **about,
    }


def words(setting: dict) -> str:
    return ", ".join(f"{key}={value}" for key, value in setting.items()) or "defaults"


def release() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Step, device: torch.device) -> list[float]:
    """Seconds of the warm-up and of every repeat; the peak of memory is that of the last repeat."""
    from whetstone.run.timing import reset_peak_memory

    seconds = []
    for _ in range(1 + REPEATS):
        reset_peak_memory(device)
        wait()
        begun = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - begun)
    return seconds


def count(model: Any) -> dict[str, int]:
    """Weights that a token is multiplied by, and those of them that are trained."""
    from whetstone.model.size import num_active

    trained, frozen = num_active(model, model.config.get_text_config())
    return {"parameters": trained + frozen, "trained": trained}


def ours(model: str, work: Work, setting: dict, device: torch.device) -> tuple[dict, list[float]]:
    from whetstone.config import build, make_plan
    from whetstone.model.sharded import load_sharded
    from whetstone.parallel.mesh import SINGLE
    from whetstone.update.packing import pack_minibatches
    from whetstone.update.updater import Updater

    config = build(
        {
            "model_name_or_path": model,
            "device": device.type,
            "bf16": device.type == "cuda",
            "prompts_per_step": work.num_prompts,
            "num_generations": work.group,
            "max_completion_length": work.new_tokens[1],
            "max_steps": 100,
            **setting,
        }
    )
    plan = make_plan(config, num_problems=10_000)
    policy = load_sharded(config.model, config.parallel, SINGLE)
    updater = Updater(policy, config, plan, None)
    groups = groups_of(work)
    run = []

    def step() -> None:
        size = updater.micro_batch_tokens(groups)
        batches = pack_minibatches(groups, config, plan.minibatches, 0, max_tokens=size)
        run[:] = [len(batch.token_ids) for part in batches for batch in part]
        updater.update(updater.prepare(batches), 0)

    seconds = timed(step, device)
    about = {
        **count(policy.model),
        "tokens_run": sum(run),
        "padding": 0,
        "micro_batches": len(run),
    }
    return about, seconds


def groups_of(work: Work) -> list:
    from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn

    completions, rewards = iter(work.completions()), iter(work.rewards())
    groups = []
    for number, prompt in enumerate(work.prompts()):
        rollouts = []
        for _ in range(work.group):
            tokens = tuple(next(completions))
            done = Completion(
                token_ids=tokens, logprobs=(-12.0,) * len(tokens), finish=Finish.LENGTH, policy_version=0
            )
            score = Score(reward=next(rewards), parts={"correct": 0.0}, answer=None)
            rollouts.append(
                Rollout(prompt_ids=tuple(prompt), turns=(Turn(completion=done),), text="", score=score)
            )
        messages = ({"role": "user", "content": ""},)
        problem = Problem(id=f"work/train/{number:06d}", task="work", messages=messages, answer=None)
        groups.append(Group(problem=problem, rollouts=tuple(rollouts)))
    return groups


def padded(model: str, work: Work, setting: dict, device: torch.device) -> tuple[dict, list[float]]:
    lm = load(model, device)
    if setting["gradient_checkpointing"]:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.train()
    adam = torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)
    advantages = work.advantages().to(device)
    num_tokens = sum(map(len, work.completions()))
    forwarded = []

    def step() -> None:
        forwarded.clear()
        for chosen, tokens, mask, completion in micro_batches(work, setting["micro_batch"], device):
            forwarded.append(tokens.numel())
            logits = lm(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio * advantages[chosen, None] * completion[:, 1:]).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    seconds = timed(step, device)
    tokens = work.tokens
    return {**count(lm), "tokens_run": tokens, "padding": sum(forwarded) - tokens}, seconds


def micro_batches(work: Work, size: int, device: torch.device) -> Iterator[tuple]:
    """Sequences in order, each micro-batch as wide as its longest: which they are, tokens, what is no
    padding, what is completion.
    """
    prompts = [prompt for prompt in work.prompts() for _ in range(work.group)]
    completions = work.completions()
    for first in range(0, len(prompts), size):
        chosen = list(range(first, min(first + size, len(prompts))))
        width = max(len(prompts[i]) + len(completions[i]) for i in chosen)
        rows = [(prompts[i], completions[i], width - len(prompts[i]) - len(completions[i])) for i in chosen]
        tokens = torch.tensor([p + c + [0] * rest for p, c, rest in rows], device=device)
        mask = torch.tensor([[1] * (width - rest) + [0] * rest for _, _, rest in rows], device=device)
        completion = torch.tensor([[0] * len(p) + [1] * len(c) + [0] * rest for p, c, rest in rows])
        yield chosen, tokens, mask, completion.to(device)


def trl(model: str, work: Work, setting: dict, device: torch.device) -> tuple[dict, list[float]]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl_clock import StepClock

    from whetstone.run.timing import reset_peak_memory

    size, sequences = setting["per_device_train_batch_size"], work.num_prompts * work.group
    is_gpu = device.type == "cuda"
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=sequences // size,
        steps_per_generation=sequences // size,
        gradient_checkpointing=setting["gradient_checkpointing"],
        num_generations=work.group,
        max_completion_length=work.new_tokens[1],
        max_steps=1 + REPEATS,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        bf16=is_gpu,
        use_cpu=not is_gpu,
        dataloader_pin_memory=is_gpu,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    clock = StepClock(wait, on_begin=lambda: reset_peak_memory(device))
    trainer = GRPOTrainer(
        model=load(model, device),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["t5"] * work.num_prompts * (1 + REPEATS)}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )
    inputs = trl_inputs(work, device)
    trainer._generate_and_score_completions = lambda _: inputs  # type: ignore[method-assign]
    trainer.train()
    width = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
    about = {
        **count(trainer.model),
        "tokens_run": work.tokens,
        "padding": sequences * width - work.tokens,
    }
    return about, clock.seconds


def trl_inputs(work: Work, device: torch.device) -> dict[str, torch.Tensor]:
    """What TRL makes of a round of sampling: prompts padded on the left, completions on the right."""
    prompts = [prompt for prompt in work.prompts() for _ in range(work.group)]
    completions = work.completions()
    before, after = max(map(len, prompts)), max(map(len, completions))
    rows = {
        "prompt_ids": [[0] * (before - len(p)) + p for p in prompts],
        "prompt_mask": [[0] * (before - len(p)) + [1] * len(p) for p in prompts],
        "completion_ids": [c + [0] * (after - len(c)) for c in completions],
        "completion_mask": [[1] * len(c) + [0] * (after - len(c)) for c in completions],
    }
    inputs = {name: torch.tensor(values, device=device) for name, values in rows.items()}
    inputs["advantages"] = work.advantages().to(device)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def load(model: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    return lm.to(device)


CONTENDERS = {"ours": ours, "padded": padded, "trl": trl}

if __name__ == "__main__":
    main()
