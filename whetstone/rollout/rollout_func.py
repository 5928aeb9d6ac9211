"""TRL's `rollout_func`: a function of the user's that gets prompts and returns tokens, sampled by our engine.

Its `trainer` has what such functions use to sample and to read settings, under the names of TRL 1.16. The
function runs in the run's own process, like an engine of the user's: nothing limits its time.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from whetstone import seeds
from whetstone.config import Config, flatten
from whetstone.config.plugins import load_object, users_code
from whetstone.endpoint.choice import ChatCodec
from whetstone.engines.base import Engine, Request, SamplingParams
from whetstone.errors import UserError
from whetstone.rollout.episodes import Sampled
from whetstone.types import Completion, Episode, Finish, Problem, Turn

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"  # 1: sampled by the policy; 0: put there by an environment
NOT_FIELDS = (*REQUIRED, MASK, "logprob_token_ids")


class RolloutFunction:
    """Calls the function with the prompts of a batch and reads its answer."""

    def __init__(
        self,
        spec: str,
        config: Config,
        *,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        vocabulary_size: int,
        accelerator: SimpleNamespace,
    ) -> None:
        self.spec, self.config = spec, config
        self.function = load_object(spec, "rollout_func")
        self._stops, self._vocabulary_size = frozenset(stop_token_ids), vocabulary_size
        self._trainer = Trainer(config, tokenizer, accelerator)

    def sample(
        self,
        engine: Engine,
        codec: ChatCodec,
        problems: Sequence[Problem],
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        max_length: int | None,
    ) -> Iterator[Sampled]:
        is_chat = self.config.model.apply_chat_template
        prompts: list[Any] = [
            [dict(message) for message in problem.messages] if is_chat else problem.question
            for problem in problems
            for _ in range(num_samples)
        ]
        self._trainer.begin(engine, sampling, seed_parts, num_samples)
        with users_code(f"rollout_func {self.spec} failed"):
            output = self.function(prompts, self._trainer)
        columns = self._check(output, len(prompts))
        for index in range(len(prompts)):
            yield self._read(output, columns[index], index, num_samples, codec, max_length)

    def _check(self, output: Any, count: int) -> list[dict[str, Any]]:
        """The extra fields of each completion, which reward functions get."""
        if not isinstance(output, Mapping) or any(key not in output for key in REQUIRED):
            raise self._error(f"must return a dictionary with {', '.join(REQUIRED)}")
        for key in (*REQUIRED, *([MASK] if MASK in output else [])):
            if not isinstance(output[key], Sequence) or len(output[key]) != count:
                raise self._error(f"must return {count} entries of {key}, one for each prompt it got")
        fields = {key: value for key, value in output.items() if key not in NOT_FIELDS}
        columns: list[dict[str, Any]] = [{} for _ in range(count)]
        for key, values in fields.items():
            is_list = isinstance(values, list)
            for index in range(min(count, len(values)) if is_list else count):
                columns[index][str(key)] = values[index] if is_list else values
        try:
            return json.loads(json.dumps(columns))
        except (TypeError, ValueError):
            raise self._error(f"returned something that is no plain data in {', '.join(fields)}") from None

    def _read(
        self,
        output: Mapping[str, Any],
        columns: dict[str, Any],
        index: int,
        num_samples: int,
        codec: ChatCodec,
        max_length: int | None,
    ) -> Sampled:
        prompt = self._token_ids(output["prompt_ids"][index], "prompt_ids", index)
        ids = self._token_ids(output["completion_ids"][index], "completion_ids", index)
        mask = [bool(value) for value in output[MASK][index]] if MASK in output else [True] * len(ids)
        logprobs = self._logprobs(output["logprobs"][index], mask, index)
        if len(mask) != len(ids) or not any(mask):
            raise self._error(
                f"must return an {MASK} as long as completion_ids, with a 1 (completion {index})"
            )
        if max_length is not None and len(prompt) + len(ids) > max_length:
            raise self._error(
                f"returned {len(prompt) + len(ids)} tokens in completion {index}, more than the {max_length} "
                "that the model allows"
            )
        first = mask.index(True)  # what an environment said before belongs to the prompt
        parts = split_turns(ids[first:], logprobs[first:], mask[first:])
        last_id = parts[-1][0][-1]
        finish = Finish.STOP if last_id in self._stops else Finish.LENGTH
        turns = tuple(
            Turn(
                completion=Completion(
                    token_ids=said,
                    logprobs=own,
                    finish=finish if number == len(parts) - 1 else Finish.STOP,
                    policy_version=self._trainer.policy_version,
                ),
                observation_ids=seen if number < len(parts) - 1 else (),
            )
            for number, (said, own, seen) in enumerate(parts)
        )
        said = [codec.decode(turn.completion.token_ids) for turn in turns]
        message = {"role": "assistant", "content": codec.decode(ids)}  # as TRL hands it to reward functions
        return Sampled(
            problem=index // num_samples,
            sample=index % num_samples,
            turns=turns,
            text="\n".join(said),
            episode=Episode(finish=finish, messages=(message,), rewards=()) if len(turns) > 1 else None,
            prompt_ids=prompt + ids[:first],
            columns=columns,
            messages=(message,),
        )

    def _token_ids(self, values: Any, key: str, index: int) -> tuple[int, ...]:
        ids = tuple(values) if isinstance(values, Sequence) else ()
        usable = all(type(token) is int and 0 <= token < self._vocabulary_size for token in ids)
        if not ids or not usable:
            raise self._error(f"must return token ids, as a list of int, in {key} (completion {index})")
        return ids

    def _logprobs(self, values: Any, mask: Sequence[bool], index: int) -> tuple[float, ...]:
        flat: list[Any] = [
            value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
            for value in (values if isinstance(values, list | tuple) else ())
        ]
        usable = len(flat) == len(mask) and all(
            not own or (isinstance(value, int | float) and math.isfinite(value))
            for value, own in zip(flat, mask, strict=True)
        )
        if not usable:
            raise self._error(
                f"must return a logprob for each token of completion {index}: those of "
                "trainer.vllm_generation.generate, and 0 for what an environment said"
            )
        return tuple(float(value) if own else 0.0 for value, own in zip(flat, mask, strict=True))

    def _error(self, text: str) -> UserError:
        return UserError(f"rollout_func {self.spec} {text}.")


def split_turns(
    ids: Sequence[int], logprobs: Sequence[float], mask: Sequence[bool]
) -> list[tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]]:
    """Turns: what was sampled, its logprobs, and what an environment said behind it."""
    turns: list[tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]] = []
    for is_own, run in groupby(range(len(ids)), key=lambda index: mask[index]):
        positions = list(run)
        tokens = tuple(ids[index] for index in positions)
        if is_own:
            turns.append((tokens, tuple(logprobs[index] for index in positions), ()))
        else:
            turns[-1] = (*turns[-1][:2], tokens)
    return turns


class Trainer:
    """What a `rollout_func` gets as its trainer."""

    use_vllm = True  # `vllm_generation` is there, whatever engine samples

    def __init__(self, config: Config, tokenizer: Any, accelerator: SimpleNamespace) -> None:
        self.processing_class = tokenizer
        self.accelerator = accelerator
        self.args = SimpleNamespace(**flatten(config))
        self.state = SimpleNamespace(global_step=0)
        self.model = SimpleNamespace(training=True)
        self.num_generations = self.num_generations_eval = config.rollout.num_generations
        self.max_completion_length = config.rollout.max_completion_length
        self.chat_template_kwargs = dict(config.model.chat_template_kwargs)
        self.vllm_generation = Generation(self)
        self.policy_version = 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"rollout_func uses trainer.{name}, which Whetstone does not have: sample with "
            "trainer.vllm_generation.generate, read trainer.processing_class and trainer.args"
        )

    def begin(
        self,
        engine: Engine,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        num_samples: int,
    ) -> None:
        self._engine, self._sampling, self._seed_parts, self._num_calls = engine, sampling, seed_parts, 0
        self.model.training = "rollout" in seed_parts
        self.state.global_step = next(
            (p for p in seed_parts[2:] if isinstance(p, int)), self.state.global_step
        )
        self.num_generations = self.num_generations_eval = num_samples
        self.args.num_generations, self.args.temperature = num_samples, sampling.temperature

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        ids = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids.append(self.processing_class(prompt)["input_ids"])
                continue
            text = self.processing_class.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
            )
            ids.append(self.processing_class(text, add_special_tokens=False)["input_ids"])
        return ids, None, {}

    def _generate_single_turn(
        self, prompt_ids: Sequence[Sequence[int]], images: Any = None, multimodal_fields: Any = None,
        num_generations: int = 1, has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:  # fmt: skip
        """A completion of each prompt, with its logprobs; seeds depend on the call and the prompt's index."""
        if images:
            raise UserError("rollout_func samples with images, which no engine here takes: leave them out.")
        number, self._num_calls = self._num_calls, self._num_calls + 1
        groups: dict[tuple[int, ...], list[int]] = {}  # equal prompts are one request: it is prefilled once
        for index, prompt in enumerate(prompt_ids):
            groups.setdefault(tuple(prompt), []).append(index)
        requests = [
            Request(
                prompt_ids=prompt,
                seeds=tuple(seeds.seed(*self._seed_parts, "rollout_func", number, index) for index in group),
            )
            for prompt, group in groups.items()
        ]
        members = list(groups.values())
        completions: dict[int, Completion] = {}
        for output in self._engine.generate(requests, self._sampling) if requests else ():
            completions[members[output.request][output.sample]] = output.completion
            self.policy_version = output.completion.policy_version
        done = [completions[index] for index in range(len(prompt_ids))]
        return [list(c.token_ids) for c in done], [list(c.logprobs) for c in done]


class Generation:
    """`trainer.vllm_generation` of TRL, on our engine."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Any = None,
        num_generations: int = 1,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Token ids of prompts, of completions, logprobs and their tokens; one completion for each prompt."""
        ids, logprobs = self._trainer._generate_single_turn(prompts, images)
        nested = [[[value] for value in row] for row in logprobs]
        return [list(prompt) for prompt in prompts], ids, nested, [[[token] for token in row] for row in ids]

    def sync_weights(self) -> None:
        """The engine has the policy's weights already."""
