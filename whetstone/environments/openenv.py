"""OpenEnv's environments over their WebSocket: `environment: ws://localhost:8000`.

Each episode is a session of the server, a connection of its own. Text and fields are mapped by the schema
that the server publishes: an action with one field gets what the policy said; one with several is a JSON
object in it. Both sides are hostile input here: what they say is parsed as JSON, nothing else.
"""

import contextlib
import functools
import json
import math
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whetstone.environments.games.base import Step
from whetstone.errors import UserError

SEED_RANGE = 1 << 32
MAX_MESSAGE = 4 << 20  # bytes
CLOSE_TIMEOUT_S = 1.0
RETRY_S = 0.2  # while the server has no free session
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class ServerFailed(Exception):
    """The server answered with an error, or with something that is no answer."""


class OpenEnvEnvironment:
    """`action_field`, `observation_field`: which fields carry text, where the schema does not tell."""

    def __init__(
        self,
        url: str,
        action_field: str | None = None,
        observation_field: str | Sequence[str] | None = None,
        connect_timeout_s: float = 20.0,
        message_timeout_s: float = 600.0,
        **reset: Any,
    ) -> None:
        """Further settings are handed to the environment's `reset`."""
        self._url, self._reset = url.rstrip("/"), reset
        self._connect_timeout_s, self._message_timeout_s = connect_timeout_s, message_timeout_s
        names = [observation_field] if isinstance(observation_field, str) else observation_field
        self._observation_fields = None if names is None else list(names)
        self._action = (
            _read_schema(self._url, connect_timeout_s) if action_field is None else {action_field: {}}
        )
        self._session = contextlib.ExitStack()

    def reset(self, seed: int, **row: Any) -> str:
        data = {**self._reset, **row, "seed": seed % SEED_RANGE}
        deadline = time.monotonic() + self._connect_timeout_s
        while True:
            self.close()
            self._connect()
            try:
                return self._text(self._ask("reset", data))
            except SessionsTaken:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def step(self, text: str) -> Step:
        try:
            action = self._read_action(text)
            result = self._ask("step", action)
        except InvalidAction as error:
            return f"Error: {error}.", 0.0, False, False, {}
        reward, done = float(result.get("reward") or 0.0), result.get("done") is True
        return self._text(result), reward, done, False, {}

    def close(self) -> None:
        """Give the server's session back."""
        self._session.close()

    def _connect(self) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        try:
            connection = connect(
                f"{self._url}/ws",
                compression=None,
                proxy=None,
                open_timeout=self._message_timeout_s,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=None,  # a step may keep the server from answering pings
                max_size=MAX_MESSAGE,
            )
            self._socket = self._session.enter_context(connection)
        except (OSError, WebSocketException) as error:
            raise ServerFailed(f"{self._url} can't be reached ({error})") from error
        limit = struct.pack("ll", math.ceil(self._message_timeout_s), 0)  # for a server that does not read
        self._socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a server that is full says so first
            self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        try:
            answer = json.loads(self._socket.recv(timeout=self._message_timeout_s))
        except TimeoutError:
            raise ServerFailed(f"{self._url} did not answer in {self._message_timeout_s:g} s") from None
        except ConnectionClosed as error:
            raise ServerFailed(f"{self._url} closed the connection ({error})") from None
        except (ValueError, RecursionError):
            raise ServerFailed(f"{self._url} answered with no JSON") from None
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise ServerFailed(f"{self._url} answered with no message of OpenEnv")
        if answer.get("type") == "error":
            raise _error(self._url, content)
        return content

    def _read_action(self, text: str) -> dict[str, Any]:
        if len(self._action) == 1:
            ((name, schema),) = self._action.items()
            kind = schema.get("type")
            if kind not in ("integer", "number", "boolean", "array", "object"):
                return {name: text}
            if kind in ("integer", "number"):
                numbers = _NUMBER.findall(text)
                if not numbers:
                    raise InvalidAction("there is no number in your answer")
                return {name: int(float(numbers[-1])) if kind == "integer" else float(numbers[-1])}
        start, end = text.find("{"), text.rfind("}")
        try:
            action = json.loads(text[start : end + 1])
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise InvalidAction(f"answer with a JSON object that has {', '.join(self._action)}")
        return action

    def _text(self, result: Mapping[str, Any]) -> str:
        """The observation: the fields that were named, its only field that is not empty, or all as JSON."""
        observation = result.get("observation")
        if not isinstance(observation, dict):
            raise ServerFailed(f"{self._url} sent no observation")
        if self._observation_fields is not None:
            missing = [name for name in self._observation_fields if name not in observation]
            if missing:
                raise ServerFailed(
                    f"the observation has no field {missing[0]}, but {', '.join(map(str, observation))}"
                )
            return "\n".join(_plain(observation[name]) for name in self._observation_fields)
        filled = [value for value in observation.values() if value not in (None, "", [], {})]
        return _plain(filled[0]) if len(filled) == 1 else _plain(observation)


class SessionsTaken(ServerFailed):
    """The server has as many sessions as it allows."""


class InvalidAction(Exception):
    """What the policy said is no action; it is told so."""


def _error(url: str, content: Mapping[str, Any]) -> Exception:
    code, message = content.get("code"), str(content.get("message", ""))[:300]
    if code == "CAPACITY_REACHED":
        return SessionsTaken(
            f"{url} has no free session ({message}): raise max_concurrent_envs of the server to the number "
            "of episodes at once"
        )
    if code == "VALIDATION_ERROR":
        return InvalidAction(f"the action is not valid: {json.dumps(content.get('errors', message))[:500]}")
    return ServerFailed(f"{url} answered {code}: {message}")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_schema(url: str, timeout_s: float) -> dict[str, Any]:
    """The fields of an action, of the required ones if there are some: name -> JSON schema."""
    import urllib.request  # with ssl and http a tenth of a scoring worker's start, and few need it

    address = "http" + url.removeprefix("ws") + "/schema"
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as response:
            schema = json.loads(response.read(MAX_MESSAGE))["action"]
        fields = {name: field for name, field in schema["properties"].items() if name != "metadata"}
        required = {name: fields[name] for name in schema.get("required", []) if name in fields}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"The server {url} does not tell its actions ({error}): start it, or set action_field to the "
            "field that gets what the policy says."
        ) from error
    if not fields:
        raise UserError(f"The actions of {url} have no fields: set action_field to one that takes a text.")
    return required or fields


def is_address(spec: str) -> bool:
    return spec.startswith(("ws://", "wss://"))


def openenv_factory(url: str) -> Callable[..., OpenEnvEnvironment]:
    """Imports the client, so that forks have it."""
    try:
        import websockets.sync.client  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"The environment {url} needs the package websockets, which can't be imported ({error}): run "
            "`pip install 'whetstone[openenv]'`."
        ) from error
    return functools.partial(OpenEnvEnvironment, url)
