"""What is served: a model, its adapters by name, and how requests become prompts."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from whetstone import seeds
from whetstone.endpoint.choice import Codec
from whetstone.endpoint.messages import template_messages
from whetstone.endpoint.protocol import ApiError, BaseRequest, ChatRequest, GenerateParams
from whetstone.engines.base import SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.errors import UserError
from whetstone.inference.sampler import Sampler
from whetstone.inference.source import load_source
from whetstone.model.adapters import attach_adapters
from whetstone.run.host import available_memory
from whetstone.run.source import find_source
from whetstone.serving.engine_backend import EngineBackend

MAX_LENGTH_ON_GPU, MAX_LENGTH_ON_CPU = 32_768, 8_192  # tokens, where the model takes more
SEQUENCES_ON_GPU, SEQUENCES_ON_CPU = 256, 32
MAX_CHARACTERS_PER_TOKEN = 256  # of a prompt, on average
CACHE_SHARE = 0.5  # of a CPU's available memory


class ServedModel:
    """`names`: as requests name the model and its adapters -> number of the adapter."""

    def __init__(self, sampler: Sampler, names: Mapping[str, int], *, system: str | None, max_length: int):
        self.sampler, self.names, self.system, self.max_length = sampler, dict(names), system, max_length
        self.codec = Codec(chat=sampler.chat, stop_ids=frozenset(sampler.policy.stop_token_ids))
        self._lock = threading.Lock()  # a tokenizer encodes for one thread at a time

    @classmethod
    def open(
        cls,
        name: str,
        *,
        adapters: Mapping[str, str] | None = None,
        served_name: str | None = None,
        system: str | None = None,
        device: str = "auto",
        max_length: int | None = None,
        max_sequences: int | None = None,
    ) -> Self:
        """Load a run, a checkpoint or a model, and adapters by name -> folder, run or checkpoint."""
        source = find_source(name)
        title = served_name or source.title
        policy = load_source(source, device)
        numbers: dict[str, int] = {}
        if adapters:
            if policy.is_lora:
                raise UserError(
                    f"{name} is itself an adapter: serve its base model, and give this one as "
                    f"--adapter {title}={name}, too."
                )
            folders = {key: find_source(path).model for key, path in adapters.items()}
            numbers = attach_adapters(policy.lm, folders).numbers
            if title in numbers:
                raise UserError(f"--adapter {title} has the name of the model: choose another one.")
        on_gpu = policy.device.type == "cuda"
        longest = policy.max_length or MAX_LENGTH_ON_GPU
        bound = max_length or (MAX_LENGTH_ON_GPU if on_gpu else MAX_LENGTH_ON_CPU)
        length = min(longest, bound)
        sampler = Sampler(source, policy, max_sequences or (SEQUENCES_ON_GPU if on_gpu else SEQUENCES_ON_CPU))
        return cls(sampler, {title: 0, **numbers}, system=system, max_length=length)

    @property
    def title(self) -> str:
        return next(iter(self.names))

    def start(self) -> EngineBackend:
        """A backend on the sampler's engine."""
        return EngineBackend(
            self.sampler.engine, max_length=self.max_length, num_sequences=self._num_sequences()
        )

    def _num_sequences(self) -> int:
        engine = self.sampler.engine
        if not isinstance(engine, NativeEngine):
            return SEQUENCES_ON_CPU
        available = available_memory()
        if engine.shape.device.type == "cuda" or available is None:
            return engine.max_slots  # a GPU allocates what fits
        fitting = int(available * CACHE_SHARE) // (engine.shape.bytes_per_token() * self.max_length)
        return max(1, min(engine.max_slots, fitting))

    def adapter(self, name: str) -> int:
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404,
                f"The model '{name[:100]}' does not exist: this server has {known}.",
                param="model",
                code="model_not_found",
            )
        return self.names[name]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """`options`: variables of the chat template."""
        converted = template_messages(messages)
        for name, value in (options or {}).items():
            param = name if name == "reasoning_effort" else "chat_template_kwargs"
            if self.sampler.chat.template is None:
                raise ApiError(400, f"The model has no chat template: leave out {param}.", param=param)
            try:
                self.sampler.chat.template.check_options({name: value})
            except UserError as error:
                raise ApiError(400, str(error), param=param, code="invalid_value") from None
        self._check_size(sum(len(message["content"]) for message in converted), "messages")
        try:
            with self._lock:
                return self.sampler.encode_messages(converted, self.system, tools, options)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    def encode_prompts(self, prompt: Any) -> list[tuple[int, ...]]:
        """The prompts of `/v1/completions`: a text or tokens, or a list of either."""
        is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = prompt if is_batch else [prompt]
        self._check_size(max(map(len, prompts), default=0), "prompt")
        try:
            with self._lock:
                return [
                    self.sampler.encode_text(p) if isinstance(p, str) else self.sampler.encode(p)
                    for p in prompts
                ]
        except UserError as error:
            raise ApiError(400, str(error), param="prompt") from None

    def _check_size(self, num_characters: int, param: str) -> None:
        """What is far too long is not encoded: that takes time from the others."""
        if num_characters > self.max_length * MAX_CHARACTERS_PER_TOKEN:
            raise self._too_long(f"{num_characters:,} characters", param)

    def _too_long(self, size: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self.max_length:,} tokens, but the request has {size}: "
            "shorten it.",
            param=param,
            code="context_length_exceeded",
        )

    def sampling(
        self,
        request: BaseRequest | GenerateParams,
        prompt_ids: tuple[int, ...],
        max_tokens: int | None,
        default: int,
    ) -> SamplingParams:
        """What is sampled with: the request's settings, else the defaults of the run or the model."""
        room = self.max_length - len(prompt_ids)
        wanted = "" if max_tokens is None else f" and {max_tokens:,} of the answer"
        if room < 1 or (max_tokens or 0) > room:
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise self._too_long(f"{len(prompt_ids):,} of the prompt{wanted}", param)
        if not prompt_ids:
            raise ApiError(400, "The prompt is empty: give at least one token.", param="prompt")
        names = ("temperature", "top_p", "min_p", "ignore_eos")
        changes = {name: value for name in names if (value := getattr(request, name)) is not None}
        if request.top_k is not None:
            changes["top_k"] = max(0, request.top_k)
        changes["max_tokens"] = min(default, room) if max_tokens is None else max_tokens
        changes["num_top"] = self._num_top(request) if isinstance(request, BaseRequest) else 0
        return replace(self.sampler.defaults, **changes)

    def _num_top(self, request: BaseRequest) -> int:
        engine = self.sampler.engine
        if isinstance(engine, NativeEngine) and engine.shape.device.type == "cpu":
            return request.num_top
        is_chat = isinstance(request, ChatRequest)
        if request.num_top > (0 if is_chat else 1):  # 1: the sampled token, which is known
            raise ApiError(
                400,
                "Logprobs of other tokens than the sampled one are given by the native engine on a CPU only.",
                param="top_logprobs" if is_chat else "logprobs",
                code="invalid_value",
            )
        return 0

    def token_text(self, token: int) -> str:
        return self.sampler.chat.decode([token], keep_special=True)


def sample_seeds(seed: int | None, count: int) -> tuple[int, ...]:
    """Seeds of a request's samples: a function of `seed`, or random."""
    base = secrets.randbits(62) if seed is None else seed
    return tuple(seeds.seed(base, "sample", sample) for sample in range(count))
