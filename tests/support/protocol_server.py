"""A small real HTTP server of ours that speaks vLLM's and SGLang's documented interfaces, as far as training
uses them, and samples from a real model with the native engine. SGLang's part is in sglang_protocol.py.

It stands in for them in the tests: it is no vLLM and no SGLang. It takes weights from disk, as LoRA adapters
and (SGLang) over a process group, knows the version of its weights, and can be told to misbehave. `make
test-vllm` and `make test-sglang` run the same clients against the real ones.

    python -m tests.support.protocol_server DIALECT FOLDER PORT     as a process that can be killed
"""

import json
import socket
import sys
import tempfile
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import Characters
from tests.support.sglang_protocol import sglang
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.model.policy import Policy


class ModelServer:
    """One start of a server: a port, a model as it lies on disk, and what was done to it."""

    def __init__(
        self,
        dialect: str,
        folder: Path,
        port: int = 0,
        *,
        is_newest: bool = True,
        context_length: int | None = None,
    ):
        self.dialect = dialect
        self.folder = folder
        self.is_newest = is_newest  # vLLM 0.32 or 0.24, SGLang 0.5.23 or 0.5.16
        self.context_length = context_length  # SGLang: the flag; None: as the model has it
        self.tokenizer: Any = Characters()
        if (folder / "tokenizer.json").is_file():
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.policies = {"policy": Policy(self.base, self.tokenizer, torch.device("cpu"))}
        self.tensors = load_file(folder / "model.safetensors")  # as its loader knows them
        self.label = "default"
        self.identity = uuid.uuid4().hex
        self.asleep: set[str] = set()
        self.groups: dict[str, Any] = {}
        self.num_completions = self.num_in_flight = self.most_in_flight = 0
        self.pushes: list[str] = []  # how weights came
        self.num_aborts = 0  # how often all requests were aborted
        self.has_session = False  # of a weight update
        self.left: set[str] = set()  # adapters of requests whose client has left
        # Misbehaviour
        self.delay_s = 0.0
        self.die_after: int | None = None  # completions
        self.spoil: Any = None  # a function of an answer
        self.fail_push = False
        self.is_dead = False
        self.lock, self.count_lock = threading.Lock(), threading.Lock()
        self.http = _Http(("127.0.0.1", port), _handler_of(self))
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """As SIGKILL would: nothing answers any more, and what was under way is cut off."""
        self.is_dead = True
        self.http.shutdown()
        self.http.server_close()
        self.http.cut_all()

    def crash(self, message: str) -> NoReturn:
        """It ends, as SGLang does where its scheduler fails."""
        threading.Thread(target=self.kill, daemon=True).start()
        while not self.is_dead:
            time.sleep(0.01)
        raise RuntimeError(message)

    # What both dialects need

    def sample(self, name: str, prompt: list[int], seed: int, sampling: SamplingParams) -> Any:
        """None: it was aborted."""
        assert not self.asleep, "a server that sleeps was asked for a completion"
        num_aborts, ends = self.num_aborts, time.monotonic() + self.delay_s
        with self.count_lock:
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            with self.lock:
                if num_aborts != self.num_aborts:
                    return None
                engine = NativeEngine(self.policies[name], 1)
                (one,) = engine.generate([Request(prompt_ids=tuple(prompt), seeds=(seed,))], sampling)
            while time.monotonic() < ends and num_aborts == self.num_aborts and not self.is_dead:
                time.sleep(0.005)
        finally:
            with self.count_lock:
                self.num_in_flight -= 1
        if num_aborts != self.num_aborts:
            return None
        self.num_completions += 1
        if self.die_after is not None and self.num_completions > self.die_after:
            threading.Thread(target=self.kill, daemon=True).start()
            time.sleep(0.3)
        return one.completion

    def load_folder(self, folder: str) -> None:
        if self.fail_push:
            raise RuntimeError("no memory left for the new weights")
        self.load_tensors(load_file(f"{folder}/model.safetensors"))
        self.pushes.append("disk")

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Names are those of a checkpoint. The real loaders only warn of others, and keep the old weights."""
        unknown = tensors.keys() - self.tensors.keys() - {"lm_head.weight"}
        if unknown:
            raise ValueError(f"Parameter {min(unknown)} not found in params_dict")
        self.tensors |= {name: tensor for name, tensor in tensors.items() if name in self.tensors}
        new = self.tensors
        if not new.keys() <= self.base.state_dict().keys():  # experts, which transformers joins
            with tempfile.TemporaryDirectory() as folder:
                save_file(self.tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
                self.base.config.save_pretrained(folder)
                again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            new = again.state_dict()
        with self.lock, torch.no_grad():  # the engine moves parameters while it samples
            for name, tensor in self.base.state_dict().items():
                if name in new:  # a tied head is not
                    tensor.copy_(new[name])

    def load_adapter(self, name: str, folder: str) -> None:
        from peft import PeftModel

        again = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(again, folder)
        self.policies[name] = Policy(model, self.tokenizer, torch.device("cpu"))
        self.pushes.append("adapter")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, address: Any, handler: Any):
        self.open: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def cut_all(self) -> None:
        for request in list(self.open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients that leave early


def _handler_of(model: ModelServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length)
            self.answer(json.loads(text) if text else {})

        def answer(self, body: Any) -> None:
            parts = urlsplit(self.path)
            speak = vllm if model.dialect == "vllm" else sglang
            try:
                status, content = speak(model, parts.path, body, parse_qs(parts.query))
            except KeyError as error:
                status, content = 404, {"error": {"message": f"{error} does not exist"}}
            except Exception as error:  # as their servers do
                status, content = 500, {"error": {"message": str(error)}}
            if model.is_dead:
                return
            if body.get("lora_path") and self.client_has_left():
                model.left.add(body["lora_path"])
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def client_has_left(self) -> bool:
            try:
                return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def vllm(model: ModelServer, path: str, body: Any, query: dict[str, list[str]]) -> tuple[int, Any]:
    if path in ("/health", "/reset_prefix_cache"):
        return 200, ""
    if path == "/version":
        return 200, {"version": "0.32.0" if model.is_newest else "0.24.0"}
    if path == "/v1/models":
        return 200, {"data": [{"id": name} for name in model.policies]}
    if path == "/server_info":
        settings = {"logprobs_mode": "processed_logprobs", "max_model_len": 128, "enable_sleep_mode": True}
        return 200, {"vllm_config": {"instance_id": model.identity, "model_config": settings}}
    if path == "/weight_info" and model.is_newest:
        return 200, {"weight_version": model.label}
    if path == "/update_weight_version" and model.is_newest:
        model.label = body["new_version"]
        return 200, {"success": True}
    if path == "/collective_rpc":
        assert body["method"] == "reload_weights"
        model.load_folder(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}
    if path == "/v1/load_lora_adapter":
        model.load_adapter(body["lora_name"], body["lora_path"])
        return 200, "Success"
    if path == "/v1/unload_lora_adapter":
        del model.policies[body["lora_name"]]
        return 200, "Success"
    if path == "/sleep":
        model.asleep = {"weights", "kv_cache"}
        return 200, ""
    if path == "/wake_up":
        model.asleep -= set(query.get("tags", ["weights", "kv_cache"]))
        return 200, ""
    if path == "/v1/completions":
        return 200, _vllm_completion(model, body)
    return 404, {"detail": "Not Found"}


def _vllm_completion(model: ModelServer, body: Any) -> Any:
    sampling = SamplingParams(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        top_p=body["top_p"],
        top_k=body["top_k"],
        min_p=body["min_p"],
        ignore_eos=body["ignore_eos"] and not body["stop_token_ids"],
    )
    done = model.sample(body["model"], body["prompt"], body["seed"], sampling)
    choice = {
        "index": 0,
        "prompt_token_ids": body["prompt"],
        "token_ids": list(done.token_ids),
        "logprobs": {"token_logprobs": list(done.logprobs)},
        "finish_reason": done.finish.value,
    }
    answer = {"model": body["model"], "choices": [choice]}
    return answer if model.spoil is None else model.spoil(answer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, _, older = sys.argv[1].partition("-")
    server = ModelServer(kind, Path(sys.argv[2]), int(sys.argv[3]), is_newest=not older)
    print(server.url, flush=True)
    server.thread.join()
