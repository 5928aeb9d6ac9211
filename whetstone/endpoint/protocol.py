"""The bodies of requests, in OpenAI's names and within bounds, and errors in OpenAI's shape."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_SAMPLES = 128  # of one request
MAX_STOPS = 16
MAX_TOP = 20  # OpenAI's bound of top_logprobs


class ApiError(Exception):
    """An error that the client gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]


Number = Annotated[float, Field(allow_inf_nan=False)]
StopText = Annotated[str, Field(max_length=256)]
Zero = Annotated[float, Field(ge=0, le=0)]
Temperature = Annotated[Number, Field(ge=1e-6, le=2)] | Zero  # 0: greedy


class BaseRequest(BaseModel):
    """What both endpoints take. Fields without an effect here accept only the value that means none."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    temperature: Temperature | None = None
    top_p: Annotated[Number, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10_000_000)] | None = None  # vLLM's; 0 and -1: all tokens
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None  # vLLM's
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None  # vLLM's: sample max_tokens tokens
    return_token_ids: bool | None = None  # vLLM's
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    # Labels of a request: they change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def num_top(self) -> int:
        """Likeliest tokens whose logprobs are wanted for each sampled one."""
        return 0

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(BaseRequest):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def num_top(self) -> int:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        return self.top_logprobs or 0


class ServedChatRequest(ChatRequest):
    """With what a run sets for all requests of its agents."""

    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    reasoning_effort: str | None = None

    @property
    def template_options(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**(self.chat_template_kwargs or {}), **effort}


class CompletionRequest(BaseRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_top(self) -> int:
        return self.logprobs or 0


class GenerateParams(BaseModel):
    """The `sampling_params` of vLLM's token-in-token-out endpoint, as far as they can be honored."""

    model_config = ConfigDict(strict=True, extra="forbid")

    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[Number, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=10_000_000)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    stop_token_ids: list[int] | None = None  # beside the model's own
    min_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    # They concern text, and no text is returned.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class GenerateRequest(BaseModel):
    """The body of vLLM's `/inference/v1/generate`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: GenerateParams
    request_id: Annotated[str, Field(max_length=256)] | None = None
    model: str | None = None
    stream: Literal[False] | None = None
    stream_options: StreamOptions | None = None
    # How vLLM caches and orders requests: without effect here.
    cache_salt: str | None = None
    priority: int | None = None


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], body: bytes) -> Body:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is no JSON: send a JSON object.") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body is no JSON object.")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _field_error(error) from None


def _field_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    depth = 2 if first["loc"][:1] == ("sampling_params",) else 1
    param = ".".join(map(str, first["loc"][:depth]))[:100] or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param)
    if first["type"] == "missing":
        return ApiError(400, f"You must provide a {param} parameter.", param=param)
    return ApiError(400, f"{param}: {first['msg']}.{_remedy(param)}", param=param, code="invalid_value")


def _remedy(param: str | None) -> str:
    return {
        "tool_choice": " A call can't be forced here: use auto or none.",
        "response_format": " Only text is sampled here.",
        "stream": " The tokens of this endpoint come together: leave it out.",
        "sampling_params.logprobs": " Only the logprob of the sampled token is known here.",
    }.get(param or "", "")
