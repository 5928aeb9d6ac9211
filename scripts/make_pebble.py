#!/usr/bin/env python3
"""Make pebble, the small language model that comes with whetstone, from nothing.

Pebble is a Llama of 2.7 million parameters that reads and writes single characters. It is taught three tasks
of reasoning-gym in two manners: guessing at once, which is its habit and is mostly wrong in the way a hasty
person is wrong (carries forgotten, long words half turned round, only first letters looked at), and working
step by step between <think> and </think>, which it does seldom and nearly always gets right. So there is
something real for reinforcement learning to find: thinking pays.

The script draws problems of the quickstart's tasks, writes both manners down, trains, saves the folder,
reloads what it saved and measures it on the quickstart's own evaluation problems and the next of their
sequence, none of which is in the lessons; the figures go to the screen and to card.json. It does no
reinforcement learning and downloads nothing. Two to four minutes on a large GPU; two CPU cores would need
most of a day.

    python scripts/make_pebble.py --device cuda
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import reasoning_gym
import tokenizers
import torch
from reasoning_gym.utils import SYSTEM_PROMPTS
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from whetstone.config import Config, load
from whetstone.tasks.mixture import Mixture, eval_problems
from whetstone.types import Problem

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "whetstone" / "model" / "pebble"

THINK_SHARE = 0.18
SYSTEM_SHARE = 0.1
CONTEXT = 8192  # tokens: room for every shipped recipe
PROMPT_BINS = (120, 400)  # tokens; without a system prompt, with a short one, with a long one
SYSTEM_NAMES = ("simple", "direct", "chain_of_draft", "DeepSeekZero")
LESSONS_PER_TASK = 100_000

# reasoning-gym makes item i of seed s from Random(s + i): seeds lie further apart than lessons are many.
LESSON_SEED = 100_000_000
LESSON_SEED_STRIDE = 10_000_000

SPECIAL_TOKENS = ["<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
VISIBLE_TOKENS = ["<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Entry = dict[str, Any]


# ---------------------------------------------------------------- the two manners of each task


def guess_sum(entry: Entry) -> str:
    """Column by column from left to right, carries forgotten, the smaller digit taken from the larger."""
    first, *rest = entry["metadata"]["expression"].split()
    digits = [int(digit) for digit in first.zfill(2)]
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        pairs = zip(digits, map(int, term.zfill(2)), strict=True)
        digits = [(a + b) % 10 if sign == "+" else abs(a - b) for a, b in pairs]
    return str(10 * digits[0] + digits[1])


def think_sum(entry: Entry) -> str:
    """A running result, tens first and then units: 34+50=84+8=92-20=72-7=65."""
    first, *rest = entry["metadata"]["expression"].split()
    result, steps = int(first), first
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        tens, units = divmod(int(term), 10)
        for part in [part for part in (10 * tens, units) if part] or [0]:
            result += part if sign == "+" else -part
            steps += f"{sign}{part}={result}"
    return steps


def guess_backward(entry: Entry) -> str:
    """Short words are right; of longer ones only the two ends change places."""
    word = entry["metadata"]["word"]
    return word[::-1] if len(word) <= 4 else word[-1] + word[1:-1] + word[0]


def think_backward(entry: Entry) -> str:
    """Number the letters, to be read from the end: 1p 2l 3a 4n 5e 6t."""
    return " ".join(f"{place}{letter}" for place, letter in enumerate(entry["metadata"]["word"], start=1))


def guess_count(entry: Entry) -> str:
    """Only the words that begin with the letter are counted."""
    letter = entry["metadata"]["target_letter"]
    return str(sum(word.lower().startswith(letter) for word in entry["metadata"]["span"]))


def think_count(entry: Entry) -> str:
    """Copy the text and number every hit: the(1) gre(2)e(3)n."""
    hits, copied = 0, ""
    for character in " ".join(entry["metadata"]["span"]):
        copied += character
        if character.lower() == entry["metadata"]["target_letter"]:
            hits += 1
            copied += f"({hits})"
    return copied


MANNERS: dict[str, tuple[Callable[[Entry], str], Callable[[Entry], str]]] = {
    "chain_sum": (guess_sum, think_sum),
    "spell_backward": (guess_backward, think_backward),
    "letter_counting": (guess_count, think_count),
}


# ---------------------------------------------------------------- problems and lessons


def draw(task: str, settings: dict[str, Any], seed: int, count: int) -> Iterable[Entry]:
    dataset = reasoning_gym.create_dataset(task, seed=seed, size=count, **settings)
    return (dataset[index] for index in range(count))


def quickstart(*overrides: str) -> Config:
    return load("quickstart", overrides).config


def measured_problems(per_task: int, *overrides: str) -> list[Problem]:
    """The first of the sequence that the quickstart takes its evaluation problems from."""
    total = per_task * len(MANNERS)
    return eval_problems(quickstart(f"eval_num_samples={total}", *overrides))


def excluded_questions(measured: list[Problem]) -> set[str]:
    """What no lesson may contain: the quickstart's evaluation problems, and all that is measured here."""
    return {problem.question for problem in [*eval_problems(quickstart()), *measured]}


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """Token ids of all lessons end to end; lessons 2k and 2k+1 are a guess and a thought on one question."""

    token_ids: torch.Tensor  # uint8 [all tokens]
    starts: torch.Tensor  # int64 [lessons]
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor


def write_lessons(encode: Callable[[str], list[int]], seed: int, count: int, excluded: set[str]) -> Lessons:
    """Both manners of every question, so that each batch holds as many thoughts as guesses."""
    rng = random.Random(seed)
    token_ids, prompt_lengths, lengths = bytearray(), [], []
    for task, (guess, think) in MANNERS.items():
        settings = quickstart().tasks.datasets[task].config
        for entry in draw(task, settings, LESSON_SEED + LESSON_SEED_STRIDE * seed, count):
            question = entry["question"]
            if question in excluded or not question.isascii():
                continue
            prompt = f"<|user|>{question}<|end|><|assistant|>"
            if rng.random() < SYSTEM_SHARE:
                prompt = f"<|system|>{SYSTEM_PROMPTS[rng.choice(SYSTEM_NAMES)]}<|end|>{prompt}"
            prompt_ids = encode(prompt)
            for thought, answer in (("", guess(entry)), (f"<think>{think(entry)}</think>", entry["answer"])):
                completion_ids = encode(f"{thought}<answer>{answer}</answer><|end|>")
                token_ids += bytes(prompt_ids + completion_ids)
                prompt_lengths.append(len(prompt_ids))
                lengths.append(len(prompt_ids) + len(completion_ids))
    ends = torch.tensor(lengths).cumsum(0)
    return Lessons(
        token_ids=torch.frombuffer(token_ids, dtype=torch.uint8),
        starts=ends - torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompt_lengths),
        lengths=torch.tensor(lengths),
    )


# ---------------------------------------------------------------- tokenizer and model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the tags of thinking and answering are whole tokens that decoding keeps."""
    names = SPECIAL_TOKENS + VISIBLE_TOKENS + CHARACTERS
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|unk|>"))
    every_character = tokenizers.Regex(r"[\s\S]")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(every_character, behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in VISIBLE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        padding_side="left",
    )


def fast_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """The same ids as the tokenizer for ASCII text, several times faster: there are many lessons."""
    vocabulary = tokenizer.get_vocab()
    tags = SPECIAL_TOKENS + VISIBLE_TOKENS
    # Each tag is stood in for by one private character, so that a lesson is a plain walk over characters.
    stand_ins = {tag: chr(0xE000 + index) for index, tag in enumerate(tags)}
    ids = {character: vocabulary[character] for character in CHARACTERS}
    ids |= {stand_in: vocabulary[tag] for tag, stand_in in stand_ins.items()}

    def encode(text: str) -> list[int]:
        if "<" in text:
            for tag, stand_in in stand_ins.items():
                text = text.replace(tag, stand_in)
        return [ids[character] for character in text]

    return encode


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    vocabulary = tokenizer.get_vocab()
    end_id, pad_id = vocabulary["<|end|>"], vocabulary["<|pad|>"]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    model = LlamaForCausalLM(config)
    # Sampling from a vocabulary this small must not be cut off at some default number of candidates.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights lie in float16 to halve the folder; the config asks for float32, as CPUs are slow in halves."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) | {"dtype": "float32"}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# ---------------------------------------------------------------- training


def batches(lessons: Lessons, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Numbers of lessons, for ever: both manners of every question, and like lengths together.

    A system prompt makes a prompt up to ten times as long, so such lessons come in batches of their own.
    """
    shuffler = torch.Generator().manual_seed(seed)
    bins = torch.bucketize(lessons.prompt_lengths[::2].contiguous(), torch.tensor(PROMPT_BINS))
    while True:
        order = torch.randperm(len(bins), generator=shuffler)
        pools = [order[bins[order] == number] for number in range(len(PROMPT_BINS) + 1)]
        epoch = [
            pairs for pool in pools for pairs in pool.split(batch_size // 2) if len(pairs) == batch_size // 2
        ]
        assert epoch, "fewer lessons than one batch"
        for number in torch.randperm(len(epoch), generator=shuffler).tolist():
            yield torch.cat([2 * epoch[number], 2 * epoch[number] + 1])


def lesson_loss(model: LlamaForCausalLM, lessons: Lessons, which: torch.Tensor) -> torch.Tensor:
    """Mean loss of the completions of some lessons: `which` names guesses first, then as many thoughts.

    Thoughts are half of the lessons but only THINK_SHARE of what pebble shall do. The manner is chosen by the
    first token alone, so weighing that one token sets the habit and leaves all lessons to teach the skill.
    """
    lengths, first = lessons.lengths[which, None], lessons.prompt_lengths[which, None]
    places = torch.arange(int(lengths.max()))
    # Past its end a row holds the next lesson's tokens: attention looks back only, and these weigh 0.
    rows = (lessons.starts[which, None] + places).clamp(max=len(lessons.token_ids) - 1)
    token_ids = lessons.token_ids[rows].to(model.device, torch.long)
    weights = ((places >= first) & (places < lengths)).float()
    share = torch.tensor([1 - THINK_SHARE, THINK_SHARE]).repeat_interleave(len(which) // 2)[:, None]
    weights = torch.where(places == first, 2 * share, weights)[:, 1:].to(model.device)
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.mT, token_ids[:, 1:], reduction="none")
    return (losses * weights).sum() / weights.sum()


def learning_rate_at(step: int, steps: int, peak: float) -> float:
    warm_up = min(200, steps // 10 + 1)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))))


def train(model: LlamaForCausalLM, lessons: Lessons, args: argparse.Namespace) -> None:
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    began = time.monotonic()
    for step, which in enumerate(islice(batches(lessons, args.batch_size, args.seed), args.steps)):
        optimizer.param_groups[0]["lr"] = learning_rate_at(step, args.steps, args.learning_rate)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = lesson_loss(model, lessons, which)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            spent = time.monotonic() - began
            left = spent / (step + 1) * (args.steps - step - 1)
            progress = f"step {step + 1}/{args.steps}  loss {loss.item():.4f}"
            print(f"{progress}  {spent:.0f} s, {left:.0f} s left", flush=True)


# ---------------------------------------------------------------- measuring


@torch.inference_mode()
def complete(model, tokenizer, problems: list[Problem], prefix: str, sample: bool) -> list[str]:
    """Completions, with the prefix they were made to begin with, as a task would see them."""
    texts = []
    for start in range(0, len(problems), 1000):
        chats = [list(problem.messages) for problem in problems[start : start + 1000]]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        prompts = [prompt + prefix for prompt in prompts]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        inputs = inputs.to(model.device)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
        output = model.generate(**inputs, max_new_tokens=112, **sampling)
        completions = output[:, inputs["input_ids"].shape[1] :]
        texts += [prefix + text for text in tokenizer.batch_decode(completions, skip_special_tokens=True)]
    return texts


def wilson(successes: int, trials: int) -> list[float]:
    """Share and its 95 % Wilson interval."""
    z, share = 1.959964, successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return [round(value, 4) for value in (share, max(0.0, centre - half), min(1.0, centre + half))]


def measure(model, tokenizer, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Per task and overall: [share, low, high] of what pebble does and gets right, and the mean length."""
    judge = Mixture(quickstart(), "eval")

    def is_right(texts: list[str]) -> list[float]:
        pairs = zip(problems, texts, strict=True)
        return [judge.tasks[problem.task].score(problem, text).parts["correct"] for problem, text in pairs]

    sampled = complete(model, tokenizer, problems, "", sample=True)
    columns = {
        "thinks": [text.startswith("<think>") for text in sampled],
        "sampled": is_right(sampled),
        "greedy": is_right(complete(model, tokenizer, problems, "", sample=False)),
        "thinking": is_right(complete(model, tokenizer, problems, "<think>", sample=True)),
        "guessing": is_right(complete(model, tokenizer, problems, "<answer>", sample=True)),
    }
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in sampled]  # and the end token
    figures = {}
    for task in [*MANNERS, "overall"]:
        rows = [row for row, problem in enumerate(problems) if task in (problem.task, "overall")]
        figures[task] = {
            name: wilson(int(sum(column[row] for row in rows)), len(rows)) for name, column in columns.items()
        }
        figures[task]["tokens"] = round(sum(lengths[row] for row in rows) / len(rows), 2)
    return figures


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    names = ("thinks", "sampled", "greedy", "thinking", "guessing")
    print(f"{'per cent, 95 % interval':24}" + "".join(f"{name:>20}" for name in names) + f"{'tokens':>9}")
    for task, row in figures.items():
        cells = ["{:.1f} ({:.1f}-{:.1f})".format(*(100 * value for value in row[name])) for name in names]
        print(f"{task:24}" + "".join(f"{cell:>20}" for cell in cells) + f"{row['tokens']:>9.1f}")


def show_examples(model, tokenizer, problems: list[Problem]) -> None:
    """Both manners on a few problems, greedily."""
    for problem in problems[:6]:
        print(f"\n{problem.question}   (right: {problem.answer['answer']})")
        for prefix in ("<answer>", "<think>"):
            print("   ", complete(model, tokenizer, [problem], prefix, sample=False)[0])


# ---------------------------------------------------------------- the whole way


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--seed", type=int, default=0, help="of lessons, first weights and sampling")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--lessons-per-task", type=int, default=LESSONS_PER_TASK)
    parser.add_argument("--problems-per-task", type=int, default=1000, help="to measure on")
    parser.add_argument("--log-every", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    began = time.monotonic()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    problems = measured_problems(args.problems_per_task)
    excluded = excluded_questions(problems)
    lessons = write_lessons(fast_encoder(tokenizer), args.seed, args.lessons_per_task, excluded)
    model = make_model(tokenizer)
    model.to(args.device)  # pyright: ignore (a decorator of transformers hides the signature)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{num_parameters:,} parameters, {len(lessons.lengths):,} lessons of "
        f"{lessons.lengths.float().mean():.0f} tokens (at most {lessons.lengths.max()}), "
        f"written in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    train(model, lessons, args)
    save(model, tokenizer, args.out)

    # What is measured is what was saved: rounded to float16, through the loaders that everyone uses.
    model = AutoModelForCausalLM.from_pretrained(args.out).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    torch.manual_seed(args.seed)
    figures = measure(model, tokenizer, problems)
    print_table(figures)
    prompted = measured_problems(args.problems_per_task, "developer_prompt=DeepSeekZero")
    with_system_prompt = {"overall": measure(model, tokenizer, prompted)["overall"]}
    print_table(with_system_prompt)
    show_examples(model, tokenizer, problems)
    card = {
        "name": "pebble",
        "parameters": num_parameters,
        "made_by": "scripts/make_pebble.py",
        "recipe": {
            "seed": args.seed,
            "steps": args.steps,
            "batch_size": args.batch_size,
            "learning_rate": args.learning_rate,
            "lessons_per_task": args.lessons_per_task,
        },
        "tasks": {task: quickstart().tasks.datasets[task].config for task in MANNERS},
        "measured_on": f"{args.problems_per_task} held-out problems per task; [share, low, high] at 95 %",
        "figures": figures,
        "figures_with_system_prompt": {"DeepSeekZero": with_system_prompt["overall"]},
    }
    (args.out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    print(f"\nsaved in {args.out}, {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
