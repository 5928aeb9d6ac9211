"""The HTTP server of `whet serve`."""

from urllib.parse import SplitResult, unquote

from whetstone.endpoint.http import Handler, HttpServer
from whetstone.endpoint.protocol import ApiError
from whetstone.serving.api import Api
from whetstone.serving.engine_backend import EngineBackend


class ApiServer(HttpServer):
    def __init__(self, api: Api, backend: EngineBackend, host: str, port: int, api_key: str | None) -> None:
        self.api, self.backend = api, backend
        super().__init__(ModelHandler, host, port, api_key)
        api.num_open = lambda: self.num_open


class ModelHandler(Handler):
    server: ApiServer

    def dispatch(self, url: SplitResult) -> None:
        path = unquote(url.path).rstrip("/")
        api, name = self.server.api, path.removeprefix("/v1/models/")
        answers = {
            "/v1/chat/completions": api.chat,
            "/v1/completions": api.completions,
            "/inference/v1/generate": api.generate,
        }
        expected = "POST" if path in answers else "GET"
        is_known = expected == "POST" or path in ("/health", "/v1/models") or name != path
        if not is_known:
            raise ApiError(
                404,
                f"Unknown request URL: {self.command} {path[:200] or '/'} (known: /v1/chat/completions, "
                "/v1/completions, /v1/models, /health).",
                code="unknown_url",
            )
        if self.command != expected:
            raise ApiError(405, f"Method {self.command} is not allowed for {path}: use {expected}.")
        if path == "/health":
            if not self.server.backend.is_alive:
                raise ApiError(503, self.server.backend.reason, kind="server_error", code="unavailable")
            return self.send_json(200, {"status": "ok"})
        if expected == "GET":
            return self.send_json(200, api.models() if path == "/v1/models" else api.model(name))
        self.send_answer(answers[path](self.read_body()))
