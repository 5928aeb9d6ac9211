"""Rollout functions as users write them for TRL 1.16: `rollout_func(prompts, trainer)`."""

HINT = "Say it again: "


def two_turns(prompts, trainer):
    """Sample, put a fixed remark behind it, sample again."""
    tokenizer = trainer.processing_class
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    first, first_logprobs = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
    hint = tokenizer(HINT, add_special_tokens=False)["input_ids"]
    histories = [prompt + said + hint for prompt, said in zip(prompt_ids, first, strict=True)]
    second, second_logprobs = trainer._generate_single_turn(histories, None, {}, 1)
    logprobs = None
    if first_logprobs is not None:
        logprobs = [a + [0.0] * len(hint) + b for a, b in zip(first_logprobs, second_logprobs, strict=True)]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [a + hint + b for a, b in zip(first, second, strict=True)],
        "logprobs": logprobs,
        "env_mask": [
            [1] * len(a) + [0] * len(hint) + [1] * len(b) for a, b in zip(first, second, strict=True)
        ],
        "place": list(range(len(prompts))),
        "step": trainer.state.global_step,
    }


def by_vllm(prompts, trainer):
    """One turn, by the object that TRL samples with."""
    ids, _, _ = trainer._tokenize_prompts(prompts)
    prompt_ids, completion_ids, logprobs, _ = trainer.vllm_generation.generate(
        prompts=ids, images=None, num_generations=trainer.num_generations
    )
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[entry[0] for entry in row] for row in logprobs],
    }


def no_logprobs(prompts, trainer):
    return {**by_vllm(prompts, trainer), "logprobs": [None] * len(prompts)}


def too_few(prompts, trainer):
    return {key: values[1:] for key, values in by_vllm(prompts, trainer).items()}


def no_ids(prompts, trainer):
    return {**by_vllm(prompts, trainer), "completion_ids": ["text"] * len(prompts)}


def strange_ids(prompts, trainer):
    return {**by_vllm(prompts, trainer), "prompt_ids": [[10**9]] * len(prompts)}


def missing(prompts, trainer):
    return {"prompt_ids": [], "completion_ids": []}


def raises(prompts, trainer):
    raise KeyError("my server")


def other_trainer(prompts, trainer):
    return trainer.llm.generate(prompts)


def all_masked(prompts, trainer):
    done = by_vllm(prompts, trainer)
    return {**done, "env_mask": [[0] * len(ids) for ids in done["completion_ids"]]}


def place_reward(completions, place, step, **columns):
    assert all(isinstance(value, int) for value in place) and len(set(step)) == 1
    return [float(value) for value in place]
