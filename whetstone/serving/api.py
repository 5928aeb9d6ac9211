"""The endpoints, on a backend: the body of a request -> the body of the answer, or the events of a stream."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

from whetstone.endpoint.choice import Choice, Delta
from whetstone.endpoint.http import ClientGone, IsGone
from whetstone.endpoint.messages import check_tools
from whetstone.endpoint.protocol import (
    MAX_SAMPLES,
    ApiError,
    CompletionRequest,
    GenerateRequest,
    ServedChatRequest,
    parse_body,
)
from whetstone.endpoint.responses import Shape, generate_body, generate_choice
from whetstone.endpoint.text_stream import num_until_token
from whetstone.environments.calls import Tools
from whetstone.serving.backend import (
    Backend,
    BackendUnavailable,
    GenerationRequest,
    TokenStream,
    merge_chunks,
)
from whetstone.serving.models import ServedModel, sample_seeds
from whetstone.types import Finish

POLL_S = 0.25  # between two looks whether the client is still there
PAUSE_S, MAX_PAUSE_S = 0.0005, 0.1  # between two events of an answer, for each that is being given
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass(frozen=True, kw_only=True)
class Work:
    """A request, ready for the backend."""

    generations: list[GenerationRequest]  # one for each prompt
    stops: list[str]
    tools: Tools
    max_calls: int | None
    shape: Shape


class Api:
    def __init__(self, served: ServedModel, backend: Backend) -> None:
        self.served, self.backend = served, backend
        self._started_at = int(time.time())
        self.num_open: Callable[[], int] = lambda: 1  # requests that are being answered

    def pause(self) -> None:
        """With many clients fewer events carry more tokens each: events cost time that sampling needs."""
        time.sleep(min(MAX_PAUSE_S, PAUSE_S * self.num_open()))

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.model(name) for name in self.served.names]}

    def model(self, name: str) -> dict[str, Any]:
        is_adapter = self.served.adapter(name) > 0
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "whetstone",
            "max_model_len": self.served.max_length,
            "parent": self.served.title if is_adapter else None,
        }

    def chat(self, body: bytes) -> "Answer":
        request = parse_body(ServedChatRequest, body)
        adapter = self.served.adapter(request.model)
        wants_tools = bool(request.tools) and request.tool_choice != "none"
        tools = check_tools(request.tools or []) if wants_tools else ()
        prompt_ids = self.served.encode_chat(request.messages, tools, request.template_options)
        stops = [*request.stops, *self.served.sampler.next_question]
        max_tokens = request.max_completion_tokens or request.max_tokens
        default = self.served.sampler.defaults.max_tokens
        sampling = self.served.sampling(request, prompt_ids, max_tokens, default)
        generation = GenerationRequest(
            prompt_ids=prompt_ids,
            seeds=sample_seeds(request.seed, request.n or 1),
            sampling=sampling,
            adapter=adapter,
            is_streamed=bool(request.stream or stops),
        )
        shape = Shape(
            token_text=self.served.token_text,
            model=request.model,
            is_chat=True,
            has_logprobs=bool(request.logprobs),
            has_token_ids=bool(request.return_token_ids),
            includes_usage=request.includes_usage,
            prompts=[prompt_ids],
        )
        work = Work(
            generations=[generation],
            stops=stops,
            tools=tools,
            max_calls=1 if request.parallel_tool_calls is False else None,
            shape=shape,
        )
        return Answer(self, work, is_stream=bool(request.stream))

    def completions(self, body: bytes) -> "Answer":
        request = parse_body(CompletionRequest, body)
        adapter = self.served.adapter(request.model)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(400, "best_of is not supported: leave it out.", param="best_of")
        prompts = self.served.encode_prompts(request.prompt)
        count = request.n or 1
        if len(prompts) * count > MAX_SAMPLES:
            raise ApiError(400, f"The request has more than {MAX_SAMPLES} answers: split it.", param="prompt")
        generations = [
            GenerationRequest(
                prompt_ids=prompt_ids,
                seeds=sample_seeds(request.seed, count),
                sampling=self.served.sampling(request, prompt_ids, request.max_tokens, COMPLETION_TOKENS),
                adapter=adapter,
                is_streamed=bool(request.stream or request.stops),
            )
            for prompt_ids in prompts
        ]
        shape = Shape(
            token_text=self.served.token_text,
            model=request.model,
            is_chat=False,
            has_logprobs=request.logprobs is not None,
            has_token_ids=bool(request.return_token_ids),
            includes_usage=request.includes_usage,
            prompts=prompts,
        )
        work = Work(generations=generations, stops=request.stops, tools=(), max_calls=None, shape=shape)
        return Answer(self, work, is_stream=bool(request.stream))

    def generate(self, body: bytes) -> "GenerateAnswer":
        """vLLM's token-in-token-out endpoint."""
        request = parse_body(GenerateRequest, body)
        params = request.sampling_params
        (prompt_ids,) = self.served.encode_prompts(request.token_ids)
        generation = GenerationRequest(
            prompt_ids=prompt_ids,
            seeds=sample_seeds(params.seed, params.n or 1),
            sampling=self.served.sampling(params, prompt_ids, params.max_tokens, COMPLETION_TOKENS),
            adapter=self.served.adapter(request.model or self.served.title),
            is_streamed=False,
        )
        return GenerateAnswer(
            backend=self.backend,
            generation=generation,
            request_id=request.request_id,
            has_logprobs=params.logprobs is not None,
            stop_ids=frozenset(params.stop_token_ids or ()),
        )


class Answer:
    """The answer to a request that was understood."""

    def __init__(self, api: Api, work: Work, *, is_stream: bool) -> None:
        self._api, self._work, self.is_stream = api, work, is_stream
        self._num_tokens = 0

    def body(self, is_gone: IsGone) -> dict[str, Any]:
        """Wait for all samples."""
        answers: list[list[Delta]] = [[] for _ in range(self._num_choices)]
        for index, delta in self._deltas(is_gone):
            answers[index].append(delta)
        return self._work.shape.whole(answers, self._num_tokens)

    def events(self, is_gone: IsGone) -> Generator[dict[str, Any]]:
        """The chunks of a stream; where the backend fails, the last one is an error."""
        shape = self._work.shape
        num_sent = [0] * self._num_choices  # characters
        for index in range(self._num_choices) if shape.is_chat else ():
            yield shape.first_chunk(index)
        try:
            for index, delta in self._deltas(is_gone):
                has_tokens = shape.has_logprobs or shape.has_token_ids  # those without text, too
                if delta.text or delta.tool_calls or delta.finish_reason or has_tokens:
                    yield shape.chunk(index, delta, num_sent[index])
                num_sent[index] += len(delta.text)
        except ApiError as error:
            yield error.body()
            return
        if shape.includes_usage:
            yield shape.usage_chunk(self._num_tokens)

    @property
    def _num_choices(self) -> int:
        return sum(len(generation.seeds) for generation in self._work.generations)

    def _deltas(self, is_gone: IsGone) -> Generator[tuple[int, Delta]]:
        """(number of the sample, what is new of it) until all have ended; leaving early cancels the rest."""
        work, streams = self._work, list[TokenStream]()
        try:
            streams.extend(self._api.backend.submit(generation) for generation in work.generations)
            first = 0
            looked_at = time.monotonic()
            for stream, generation in zip(streams, work.generations, strict=True):
                choices = [
                    Choice(self._api.served.codec, work.stops, tools=work.tools, prompt=generation.prompt_ids)
                    for _ in generation.seeds
                ]
                while not all(choice.is_finished for choice in choices):
                    chunks = stream.read(POLL_S)
                    if time.monotonic() - looked_at >= POLL_S:
                        looked_at = time.monotonic()
                        if is_gone():
                            raise ClientGone
                    for chunk in merge_chunks(chunks):
                        choice = choices[chunk.sample]
                        if choice.is_finished:
                            continue
                        delta = choice.push(chunk)
                        if choice.is_finished and chunk.finish is None:  # by a stop string
                            stream.cancel(chunk.sample)
                        yield (
                            first + chunk.sample,
                            replace(delta, tool_calls=delta.tool_calls[: work.max_calls]),
                        )
                    if generation.is_streamed and not all(choice.is_finished for choice in choices):
                        self._api.pause()
                self._num_tokens += sum(choice.num_tokens for choice in choices)
                first += len(choices)
        except BackendUnavailable as error:
            raise ApiError(503, str(error), kind="server_error", code="unavailable") from None
        finally:
            for stream in streams:
                stream.cancel()


@dataclass(frozen=True, kw_only=True)
class GenerateAnswer:
    """The answer of vLLM's `/inference/v1/generate`: tokens in, tokens with their logprobs out."""

    backend: Backend
    generation: GenerationRequest
    request_id: str | None
    has_logprobs: bool
    stop_ids: frozenset[int]  # of the request, beside the model's own
    is_stream: bool = False

    def events(self, is_gone: IsGone) -> Generator[dict[str, Any]]:
        yield self.body(is_gone)

    def body(self, is_gone: IsGone) -> dict[str, Any]:
        try:
            stream = self.backend.submit(self.generation)
            try:
                choices = self._choices(stream, is_gone)
            finally:
                stream.cancel()
        except BackendUnavailable as error:
            raise ApiError(503, str(error), kind="server_error", code="unavailable") from None
        return generate_body(self.request_id, len(self.generation.prompt_ids), choices)

    def _choices(self, stream: TokenStream, is_gone: IsGone) -> list[dict[str, Any]]:
        choices: dict[int, dict[str, Any]] = {}
        while len(choices) < len(self.generation.seeds):
            chunks = stream.read(POLL_S)
            if not chunks and is_gone():
                raise ClientGone
            for chunk in chunks:  # not streamed: each is a whole sample
                reason = "length" if chunk.finish is Finish.LENGTH else "stop"
                count = num_until_token(chunk.token_ids, self.stop_ids)
                choices[chunk.sample] = generate_choice(
                    chunk.sample,
                    chunk.token_ids[:count],
                    chunk.logprobs[:count],
                    reason if count is None else "stop",
                    has_logprobs=self.has_logprobs,
                )
        return [choices[sample] for sample in sorted(choices)]
