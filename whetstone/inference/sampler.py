"""A loaded model that answers prompts: whole samples, or pieces of text while they are sampled.

One engine, one call at a time: other threads wait. Escape the text before you show it: a model wrote it.
"""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from whetstone import seeds
from whetstone.config import Config
from whetstone.engines import make_engine
from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.errors import UserError
from whetstone.files import valid_text
from whetstone.inference.answers import Answer, AnswerStream, Piece, TokenDetails
from whetstone.inference.prompts import Message, Prompt, check_messages
from whetstone.inference.source import before_training, load_source
from whetstone.model.attention import PackedAttention, packed_segments
from whetstone.model.chat import Chat
from whetstone.model.padded import rows_hidden
from whetstone.model.policy import Policy
from whetstone.rollout.collector import explain_engine_oom, sampling_params
from whetstone.run.record import began_at
from whetstone.run.source import Source, find_source
from whetstone.tasks.prompts import build_messages, developer_prompt
from whetstone.types import Completion, Problem

MAX_TOKENS = 1024  # of an answer, where neither a run nor the model says
TEMPERATURE = 0.7  # the same
MIN_ROOM = 2048  # tokens of a conversation that the engine makes room for at once
INSPECT_ROWS = 256  # logits that are in memory at once


class Sampler:
    def __init__(self, source: Source, policy: Policy, max_num_seqs: int | None = None) -> None:
        """`max_num_seqs`: samples at once (None: that of the run)."""
        self.source, self.policy = source, policy
        model = source.config.model
        if source.run is None and not policy.tokenizer.chat_template:  # a base model
            model = model.model_copy(update={"apply_chat_template": False})
        self.chat = Chat(policy.tokenizer, model, began_at(source.run))
        self.system = developer_prompt(source.config.tasks)  # the system prompt of the run
        self.defaults = run_defaults(source.config) if source.run is not None else model_defaults(policy)
        plain: dict[str, Any] = {
            "rollout_engine": "native",
            "async_rollouts": 0,
            "rollout_quantization": "none",
        }
        if max_num_seqs is not None:
            plain |= {"max_num_seqs": max_num_seqs}
        rollout = source.config.rollout.model_copy(update=plain)
        self.engine = make_engine(source.config.model_copy(update={"rollout": rollout}), policy)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, name: str | Path, *, device: str = "auto") -> Self:
        """Load a run folder, a checkpoint, a model folder, `pebble`, `smollm2-135m` or a hub name."""
        source = find_source(name)
        return cls(source, load_source(source, device))

    def open_base(self) -> Self:
        """The model that the run started from, on the same device."""
        source = before_training(self.source)
        return type(self)(source, load_source(source, self.policy.device.type))

    def sample(self, prompt: Prompt, n: int = 1, **settings: Any) -> list[Answer]:
        """`n` answers to a prompt.

        `settings`: system, seed, temperature, top_p, top_k, min_p, max_tokens; and `stop`, texts that end an
        answer and are not part of it.
        """
        return self.sample_batch([prompt], n, **settings)[0]

    def sample_batch(self, prompts: Sequence[Prompt], n: int = 1, **settings: Any) -> list[list[Answer]]:
        """`n` answers to each prompt, sampled together."""
        stops = settings.pop("stop", ())
        requests, sampling = self._requests(prompts, n, **settings)
        answers: dict[tuple[int, int], Answer] = {}
        if stops:
            for request, piece in self._pieces(requests, sampling, stops):
                if piece.answer is not None:
                    answers[request, piece.sample] = piece.answer
        else:
            with self._lock, explain_engine_oom():
                for output in self.engine.generate(requests, sampling):
                    prompt_ids = requests[output.request].prompt_ids
                    answers[output.request, output.sample] = self._answer(prompt_ids, output.completion)
        return [[answers[request, sample] for sample in range(n)] for request in range(len(requests))]

    def stream(self, prompt: Prompt, n: int = 1, **settings: Any) -> Generator[Piece]:
        """The pieces of `n` answers as they are sampled; closing the iterator stops the engine."""
        stops = settings.pop("stop", ())
        pieces = self._pieces(*self._requests([prompt], n, **settings), stops)
        return (piece for _, piece in pieces)

    def _pieces(
        self, requests: list[Request], sampling: SamplingParams, stops: Sequence[str]
    ) -> Generator[tuple[int, Piece]]:
        """The number of the request, and a piece of one of its answers."""
        streams = [[AnswerStream(self.chat.decode, stops) for _ in request.seeds] for request in requests]
        num_running = sum(map(len, streams))
        # An architecture that the native engine can't run is sampled by transformers, without pieces.
        engine = self.engine
        run = engine.stream if isinstance(engine, NativeEngine) else engine.generate
        with self._lock, explain_engine_oom():
            for output in run(requests, sampling):
                stream = streams[output.request][output.sample]
                prompt_ids = requests[output.request].prompt_ids
                if stream.is_finished:  # by a stop text
                    continue
                if isinstance(output, GenerationOutput):
                    piece = stream.end(output.sample, self._answer(prompt_ids, output.completion))
                else:
                    piece = stream.advance(output, prompt_ids)
                num_running -= stream.is_finished
                yield output.request, piece
                if num_running == 0:
                    return

    @torch.inference_mode()
    def inspect(self, answer: Answer, top: int = 5) -> list[TokenDetails]:
        """Each token of an answer by one more forward pass, at temperature 1: logprob, entropy, likeliest."""
        ids = torch.tensor([*answer.prompt_ids, *answer.token_ids], device=self.policy.device)
        start, count = len(answer.prompt_ids), len(answer.token_ids)
        attend = PackedAttention(packed_segments([len(ids)]), self.policy.device)
        positions = torch.arange(len(ids), device=self.policy.device)
        with self._lock, explain_engine_oom():
            if self.policy.is_packed:
                hidden = self.policy.hidden(ids[None], positions[None], attend)[0]
            else:
                hidden = rows_hidden(self.policy.trunk, [ids])[0]
            details = []
            for first in range(0, count, INSPECT_ROWS):
                rows = torch.arange(first, min(first + INSPECT_ROWS, count), device=ids.device)
                logprobs = self.policy.head(hidden[start - 1 + rows]).float().log_softmax(-1)
                details += self._details(logprobs, ids[start + rows], top)
        return details

    def _details(self, logprobs: Tensor, token_ids: Tensor, top: int) -> list[TokenDetails]:
        """[N, V] logprobs and the [N] tokens that were sampled."""
        own = logprobs.gather(-1, token_ids[:, None])[:, 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        best = logprobs.topk(min(top, logprobs.shape[-1]))
        columns = (token_ids, own, entropies, best.indices, best.values)
        return [
            TokenDetails(
                token_id=token,
                text=self._token_text(token),
                logprob=logprob,
                entropy=entropy,
                likeliest=tuple((self._token_text(i), p) for i, p in zip(indices, values, strict=True)),
            )
            for token, logprob, entropy, indices, values in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def _token_text(self, token: int) -> str:
        return self.policy.tokenizer.decode([token], skip_special_tokens=False)

    def encode(self, prompt: Prompt, system: str | None = None) -> tuple[int, ...]:
        """The tokens of a prompt. A conversation without a system message gets `system` (None: the run's)."""
        if not isinstance(prompt, str) and all(isinstance(entry, int) for entry in prompt):
            return self._check_ids(tuple(entry for entry in prompt if isinstance(entry, int)))
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.encode_messages(check_messages(turns), system)

    def encode_messages(
        self,
        messages: list[dict[str, Any]],
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The same of messages as chat templates take them, with the tools that the model may call, and with
        variables of the template.
        """
        if not any(message["role"] in ("system", "developer") for message in messages):
            role = self.source.config.tasks.developer_role
            text = self.system if system is None else valid_text(system) or None
            messages = list(build_messages(text, role, "", tuple(messages)))
        if self.chat.config.apply_chat_template:
            return self.chat.encode(_problem(messages, tools), options)
        if tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            raise UserError("The model has no chat template, so it takes no tools: leave them out.")
        return self.encode_text(self._plain_prompt(messages))

    def _check_ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        size = self.policy.config.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            raise UserError(
                f"A prompt has token ids beyond the {size:,} of the model: encode it with its tokenizer."
            )
        return token_ids

    def _plain_prompt(self, messages: Sequence[Message]) -> str:
        """A conversation of a model without a chat template: prompt_template once for each question."""
        text, first = "", []
        for message in messages:
            if message["role"] == "assistant":
                text += f"{message['content'].removeprefix(self.chat.config.assistant_prefix)}\n"
            elif message["role"] in ("system", "developer"):
                first.append(message)
            else:
                text += self.chat.prompt(_problem([*first, message]))
                first = []
        return text

    @property
    def next_question(self) -> tuple[str, ...]:
        """How a model without a chat template would begin the user's next turn: an answer ends before it."""
        config = self.chat.config
        begin = config.prompt_template.rpartition("{system}")[2].partition("{question}")[0].strip()
        return () if config.apply_chat_template or not begin else (f"\n{begin}",)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that the model continues, without a chat template."""
        return tuple(self.policy.tokenizer(valid_text(text))["input_ids"])

    def sampling(self, **settings: Any) -> SamplingParams:
        """The sampling parameters: the defaults with `settings` in place of them (None: the default)."""
        changes = {name: value for name, value in settings.items() if value is not None}
        return replace(self.defaults, **changes)

    def close(self) -> None:
        self.engine.close()

    def _answer(self, prompt_ids: tuple[int, ...], completion: Completion) -> Answer:
        return Answer(
            text=self.chat.decode(completion.token_ids),
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            prompt_ids=prompt_ids,
        )

    def _requests(
        self, prompts: Sequence[Prompt], n: int, *, system: str | None = None, seed: int = 0, **settings: Any
    ) -> tuple[list[Request], SamplingParams]:
        sampling = self.sampling(**settings)
        if not prompts or n < 1:
            raise UserError("There is nothing to sample: give a prompt, and n of at least 1.")
        ids = [self.encode(prompt, system) for prompt in prompts]
        limits = [self._limit(len(tokens), sampling.max_tokens) for tokens in ids]
        sample_seeds = tuple(seeds.seed(seed, "sample", sample) for sample in range(n))
        requests = [
            Request(prompt_ids=tokens, seeds=sample_seeds, max_tokens=(limit,) * n)
            for tokens, limit in zip(ids, limits, strict=True)
        ]
        room = max(limits)
        if len(requests) * n == 1 and isinstance(self.engine, NativeEngine):
            room = self._room(len(ids[0]), room)
        return requests, replace(sampling, max_tokens=room)

    def _room(self, num_tokens: int, limit: int) -> int:
        """Tokens that the engine makes room for behind a prompt; the request has its own limit.

        More than needed: it builds its state (on a GPU its graphs) again when a conversation outgrows it.
        """
        size = max(MIN_ROOM, 1 << (num_tokens + limit - 1).bit_length())
        return max(limit, min(size, self.policy.max_length or size) - num_tokens)

    def _limit(self, num_tokens: int, max_tokens: int) -> int:
        """The new tokens that the model's context leaves."""
        longest = self.policy.max_length
        if num_tokens == 0:
            raise UserError("The prompt is empty: give at least one token.")
        if longest is not None and num_tokens >= longest:
            raise UserError(
                f"The prompt has {num_tokens:,} tokens, and the model takes {longest:,} with its answer: "
                "shorten it, or begin a new conversation."
            )
        return max_tokens if longest is None else min(max_tokens, longest - num_tokens)


def _problem(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Problem:
    """Messages as the chat format takes them."""
    return Problem(id="prompt", task="prompt", messages=tuple(messages), answer=None, tools=tuple(tools))


def run_defaults(config: Config) -> SamplingParams:
    """The sampling of a run's evaluation."""
    temperature = config.evaluation.eval_temperature
    return sampling_params(config, config.rollout.temperature if temperature is None else temperature)


def model_defaults(policy: Policy) -> SamplingParams:
    """The sampling that the model's own generation_config.json names."""
    settings = policy.lm.generation_config
    names = ("temperature", "top_p", "top_k", "min_p") if settings.do_sample else ()
    named = {name: value for name in names if (value := getattr(settings, name)) is not None}
    return SamplingParams(
        **{"max_tokens": settings.max_new_tokens or MAX_TOKENS, "temperature": TEMPERATURE, **named}
    )
