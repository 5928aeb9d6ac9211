"""The policy over HTTP while a step is sampled: one server of a run, one base_url for each rollout.

    http://127.0.0.1:PORT/sessions/ID/v1                       chat/completions, models
    http://127.0.0.1:PORT/sessions/ID/inference/v1/generate    vLLM's tokens in, tokens out

A session is known by its id alone, which an agent can't guess of another one.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote

from whetstone.endpoint.http import Handler, HttpServer, IsGone
from whetstone.endpoint.messages import check_tools
from whetstone.endpoint.protocol import (
    ApiError,
    BaseRequest,
    ChatRequest,
    GenerateParams,
    GenerateRequest,
    parse_body,
)
from whetstone.endpoint.responses import Shape, generate_body, generate_choice
from whetstone.environments.agents import MODEL
from whetstone.rollout.agents.calls import Call, Reply
from whetstone.types import Finish

RETRY_COUNT = "x-stainless-retry-count"  # of OpenAI's clients: 0 where a request is sent for the first time
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
logger = logging.getLogger("whetstone")


class _Session(NamedTuple):
    deliver: Callable[[Call], None]
    wake: Callable[[], None]


class AgentEndpoint(HttpServer, contextlib.AbstractContextManager["AgentEndpoint"]):
    def __init__(self, token_text: Callable[[int], str], *, vocab_size: int, max_length: int) -> None:
        self.token_text, self.vocab_size, self.max_length = token_text, vocab_size, max_length
        self._sessions: dict[str, _Session] = {}
        self._warned: set[str] = set()
        super().__init__(AgentHandler, "127.0.0.1", 0, None)
        threading.Thread(target=self.serve_forever, name="agents", daemon=True).start()

    def open(self, session: str, deliver: Callable[[Call], None], wake: Callable[[], None]) -> str:
        """Take requests of a session; its base_url."""
        self._sessions[session] = _Session(deliver, wake)
        return f"{self.url}/sessions/{session}/v1"

    def forget(self, session: str) -> None:
        self._sessions.pop(session, None)

    def find(self, session: str) -> _Session:
        try:
            return self._sessions[session]
        except KeyError:
            raise session_over() from None

    def warn_once(self, parameter: str, text: str) -> None:
        if parameter not in self._warned:
            self._warned.add(parameter)
            logger.warning(text)

    def __exit__(self, *_: object) -> None:
        self.close()


class AgentHandler(Handler):
    server: AgentEndpoint

    def dispatch(self, url: SplitResult) -> None:
        path = unquote(url.path).rstrip("/")
        parts = path.split("/", 3)  # "", "sessions", ID, the rest
        rest = parts[3] if len(parts) == 4 and parts[1] == "sessions" else ""
        calls = {"v1/chat/completions": self._chat, "inference/v1/generate": self._generate}
        is_model = rest == "v1/models" or rest.startswith("v1/models/")
        if rest not in calls and not is_model:
            raise ApiError(404, f"Unknown request URL: {self.command} {path[:200]}.", code="unknown_url")
        expected = "GET" if is_model else "POST"
        if self.command != expected:
            raise ApiError(405, f"Method {self.command} is not allowed for {rest}: use {expected}.")
        session = self.server.find(parts[2])
        if is_model:
            name = rest.removeprefix("v1/models").removeprefix("/")
            model = {
                "id": name or MODEL,
                "object": "model",
                "created": 0,
                "owned_by": "whetstone",
                "max_model_len": self.server.max_length,
            }
            return self.send_json(200, model if name else {"object": "list", "data": [model]})
        calls[rest](session, parts[2], self.read_body())

    def _chat(self, session: _Session, name: str, body: bytes) -> None:
        request = parse_body(ChatRequest, body)
        _check_single(request.n, request.ignore_eos)
        if request.num_top:
            raise ApiError(400, "A session has the logprobs of sampled tokens alone.", param="top_logprobs")
        wants_tools = bool(request.tools) and request.tool_choice != "none"
        call = Call(
            session=name,
            messages=request.messages,
            tools=check_tools(request.tools or []) if wants_tools else (),
            max_tokens=request.max_completion_tokens or request.max_tokens,
            stops=request.stops,
            max_calls=1 if request.parallel_tool_calls is False else None,
            sampling=_agent_sampling(request),
            is_repeat=self.headers.get(RETRY_COUNT, "0") != "0",
        )
        session.deliver(call)
        self.send_answer(_ChatAnswer(self.server, call, session.wake, request))

    def _generate(self, session: _Session, name: str, body: bytes) -> None:
        request = parse_body(GenerateRequest, body)
        params = request.sampling_params
        _check_single(params.n, params.ignore_eos)
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self.server.vocab_size:
            size = self.server.vocab_size
            raise ApiError(400, f"token_ids has ids beyond the {size:,} of the model.", param="token_ids")
        call = Call(
            session=name,
            token_ids=tuple(request.token_ids),
            max_tokens=params.max_tokens,
            stop_ids=frozenset(params.stop_token_ids or ()),
            sampling=_agent_sampling(params),
        )
        session.deliver(call)
        self.send_answer(_GenerateAnswer(call, session.wake, request))


def session_over() -> ApiError:
    return ApiError(404, "There is no such session, or it is over.", code="session_over")


def _check_single(n: int | None, ignore_eos: bool | None) -> None:
    if (n or 1) > 1:
        raise ApiError(400, "A session is one conversation: ask for one answer at a time.", param="n")
    if ignore_eos:
        raise ApiError(400, "An answer that is trained on ends at its stop token.", param="ignore_eos")


def _agent_sampling(request: BaseRequest | GenerateParams) -> Mapping[str, float]:
    """How the agent would sample."""
    sampling = {name: float(value) for name in SAMPLING if (value := getattr(request, name)) is not None}
    return {name: max(0.0, value) for name, value in sampling.items()}  # top_k: -1 means 0


@dataclass(frozen=True)
class _ChatAnswer:
    """`endpoint.http.Answer`; a stream begins when the turn is finished."""

    server: AgentEndpoint
    call: Call
    wake: Callable[[], None]
    request: ChatRequest

    @property
    def is_stream(self) -> bool:
        return bool(self.request.stream)

    def body(self, is_gone: IsGone) -> dict[str, Any]:
        reply = self.call.wait(is_gone, self.wake)
        return self._shape(reply).whole([[reply.delta]], len(reply.completion.token_ids))

    def events(self, is_gone: IsGone) -> Generator[dict[str, Any]]:
        reply = self.call.wait(is_gone, self.wake)
        shape = self._shape(reply)
        yield shape.first_chunk(0)
        yield shape.chunk(0, reply.delta, 0)
        if shape.includes_usage:
            yield shape.usage_chunk(len(reply.completion.token_ids))

    def _shape(self, reply: Reply) -> Shape:
        return Shape(
            token_text=self.server.token_text,
            model=self.request.model,
            is_chat=True,
            has_logprobs=bool(self.request.logprobs),
            has_token_ids=bool(self.request.return_token_ids),
            includes_usage=self.request.includes_usage,
            prompts=[reply.prompt_ids],
        )


@dataclass(frozen=True)
class _GenerateAnswer:
    call: Call
    wake: Callable[[], None]
    request: GenerateRequest
    is_stream: bool = False

    def body(self, is_gone: IsGone) -> dict[str, Any]:
        reply = self.call.wait(is_gone, self.wake)
        completion = reply.completion
        choice = generate_choice(
            0,
            completion.token_ids,
            completion.logprobs,
            "length" if completion.finish is Finish.LENGTH else "stop",
            has_logprobs=self.request.sampling_params.logprobs is not None,
        )
        return generate_body(self.request.request_id, len(reply.prompt_ids), [choice])

    def events(self, is_gone: IsGone) -> Generator[dict[str, Any]]:
        yield self.body(is_gone)
