"""The answer of vLLM's `/inference/v1/generate`: tokens in, tokens with their logprobs out."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from whetstone.endpoint.http import ClientGone, IsGone
from whetstone.endpoint.protocol import ApiError
from whetstone.endpoint.responses import generate_body, generate_choice
from whetstone.endpoint.text_stream import num_until_token
from whetstone.serving.backend import Backend, BackendUnavailable, GenerationRequest, TokenStream
from whetstone.types import Finish

POLL_S = 0.25  # between two looks whether the client is still there


@dataclass(frozen=True, kw_only=True)
class GenerateAnswer:
    """`endpoint.http.Answer` that comes when all samples are finished."""

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
