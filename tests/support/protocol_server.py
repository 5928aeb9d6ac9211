"""A small real HTTP server of ours that speaks vLLM's and SGLang's documented interfaces, as far as training
uses them, and samples from a real model with the native engine.

It stands in for them in the tests: it is no vLLM and no SGLang. It takes weights from disk, as LoRA adapters
and (SGLang) over a process group, knows the version of its weights, and can be told to misbehave. `make
test-vllm` runs the same clients against a real vLLM.

    python -m tests.support.protocol_server DIALECT FOLDER PORT     as a process that can be killed
"""

import json
import socket
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import transformers
from safetensors.torch import load_file

from tests.conftest import Characters
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.model.policy import Policy
from whetstone.parallel import external_group
from whetstone.types import Finish


class ModelServer:
    """One start of a server: a port, a model as it lies on disk, and what was done to it."""

    def __init__(self, dialect: str, folder: Path, port: int = 0, *, keeps_label: bool = True):
        self.dialect = dialect
        self.folder = folder
        self.keeps_label = keeps_label  # vLLM: whether it has /weight_info, as 0.32 does
        self.tokenizer: Any = Characters()
        if (folder / "tokenizer.json").is_file():
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.policies = {"policy": Policy(self.base, self.tokenizer, torch.device("cpu"))}
        self.label = "default"
        self.identity = uuid.uuid4().hex
        self.asleep: set[str] = set()
        self.groups: dict[str, Any] = {}
        self.num_completions = self.num_in_flight = self.most_in_flight = 0
        self.pushes: list[str] = []  # how weights came
        # Misbehaviour
        self.delay_s = 0.0
        self.die_after: int | None = None  # completions
        self.spoil: Any = None  # a function of an answer
        self.fail_push = False
        self.is_dead = False
        self.lock = threading.Lock()
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

    # What both dialects need

    def sample(self, name: str, prompt: list[int], seed: int, sampling: SamplingParams) -> Any:
        assert not self.asleep, "a server that sleeps was asked for a completion"
        with self.lock:
            engine = NativeEngine(self.policies[name], 1)
            (one,) = engine.generate([Request(prompt_ids=tuple(prompt), seeds=(seed,))], sampling)
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        time.sleep(self.delay_s)
        with self.lock:
            self.num_in_flight -= 1
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
        own = self.base.state_dict()
        with self.lock, torch.no_grad():  # the engine moves parameters while it samples
            for name, tensor in tensors.items():
                if name in own:  # a tied head is not
                    own[name].copy_(tensor)

    def load_adapter(self, name: str, folder: str) -> None:
        from peft import PeftModel

        again = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(again, folder)
        self.policies[name] = Policy(model, self.tokenizer, torch.device("cpu"))
        self.pushes.append("adapter")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
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
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def vllm(model: ModelServer, path: str, body: Any, query: dict[str, list[str]]) -> tuple[int, Any]:
    if path in ("/health", "/reset_prefix_cache"):
        return 200, ""
    if path == "/version":
        return 200, {"version": "0.32.0" if model.keeps_label else "0.24.0"}
    if path == "/v1/models":
        return 200, {"data": [{"id": name} for name in model.policies]}
    if path == "/server_info":
        settings = {"logprobs_mode": "processed_logprobs", "max_model_len": 128, "enable_sleep_mode": True}
        return 200, {"vllm_config": {"instance_id": model.identity, "model_config": settings}}
    if path == "/weight_info" and model.keeps_label:
        return 200, {"weight_version": model.label}
    if path == "/update_weight_version" and model.keeps_label:
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


def sglang(model: ModelServer, path: str, body: Any, query: dict[str, list[str]]) -> tuple[int, Any]:
    if path in ("/health", "/flush_cache"):
        return 200, "Cache flushed.\n"
    if path == "/server_info":
        return 200, {"tp_size": 1, "enable_memory_saver": True, "enable_weights_cpu_backup": True}
    if path == "/model_info":
        return 200, {"weight_version": model.label}
    if path == "/update_weights_from_disk":
        model.load_folder(body["model_path"])
        model.label = body["weight_version"]
    elif path == "/init_weights_update_group":
        model.groups[body["group_name"]] = external_group.join(
            body["master_address"],
            body["master_port"],
            rank=body["rank_offset"],
            world_size=body["world_size"],
            name=body["group_name"],
            backend=body["backend"],
        )
    elif path == "/update_weights_from_distributed":
        shapes = zip(body["dtypes"], body["shapes"], strict=True)
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes]
        external_group.broadcast(tensors, model.groups[body["group_name"]])
        model.load_tensors(dict(zip(body["names"], tensors, strict=True)))
        model.pushes.append("distributed")
        model.label = body["weight_version"] or model.label
    elif path == "/update_weight_version":
        model.label = body["new_version"]
    elif path == "/load_lora_adapter":
        model.load_adapter(body["lora_name"], body["lora_path"])
    elif path == "/unload_lora_adapter":
        del model.policies[body["lora_name"]]
    elif path == "/release_memory_occupation":
        model.asleep |= set(body["tags"])
    elif path == "/resume_memory_occupation":
        model.asleep -= set(body["tags"])
    elif path == "/generate":
        return 200, _sglang_completion(model, body)
    else:
        return 404, {"detail": "Not Found"}
    return 200, {"success": True, "message": ""}


def _sglang_completion(model: ModelServer, body: Any) -> Any:
    params = body["sampling_params"]
    sampling = SamplingParams(
        max_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=max(0, params["top_k"]),
        min_p=params["min_p"],
        ignore_eos=params["ignore_eos"],  # it is looked at before `stop_token_ids`
    )
    name = body["lora_path"] or "policy"
    version = model.label
    done = model.sample(name, body["input_ids"], params["sampling_seed"], sampling)
    pairs = [[p, token, None] for p, token in zip(done.logprobs, done.token_ids, strict=True)]
    reason: dict[str, Any] = {"type": done.finish.value}
    reason["matched" if done.finish is Finish.STOP else "length"] = done.token_ids[-1]
    meta = {
        "output_token_logprobs": pairs,
        "finish_reason": reason,
        "weight_version": version,
    }
    answer = {"text": "", "output_ids": list(done.token_ids), "meta_info": meta}
    return answer if model.spoil is None else model.spoil(answer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    server = ModelServer(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    print(server.url, flush=True)
    server.thread.join()
