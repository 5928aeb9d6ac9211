"""Server processes: started, waited for, restarted, stopped with all their children, gone when we are."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.waiting import wait_until
from whetstone.config import load
from whetstone.engines.packages import check_packages
from whetstone.engines.servers.http import HttpClient, RequestRejected, free_port
from whetstone.engines.servers.process import RESTARTS, ServerCommand, ServerProcess, error_lines
from whetstone.engines.servers.setup import COMMANDS
from whetstone.errors import UserError

# Answers after a moment, and has a child that would outlive it.
SERVER = """
import subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
subprocess.Popen(["sleep", "77.25"])
print("getting ready", flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b'{"detail": "Not Found"}')
    def log_message(self, *args): ...
time.sleep(0.2)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def process_of(tmp_path, code=SERVER):
    port = free_port()
    command = ServerCommand(
        args=[sys.executable, "-c", code, str(port)], environment={}, url=f"http://127.0.0.1:{port}"
    )
    return ServerProcess(command, tmp_path / "logs" / "server.log")


def children(session):
    listed = subprocess.run(["ps", "-o", "args=", "-g", str(session)], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "defunct" not in line]


def test_start_restart_and_stop(tmp_path):
    server = process_of(tmp_path)
    server.start()
    try:
        server.wait_until_up(20)
        with pytest.raises(RequestRejected, match="Not Found"):
            HttpClient(server.command.url).get("/else", timeout_s=2)
        assert server.process is not None
        first = server.process.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not server.is_running)
        server.restart_if_dead()
        wait_until(lambda: not children(first))  # what it left behind is gone
        server.wait_until_up(20)
        assert server.restarts == 0
        session = server.process.pid
        assert len(children(session)) == 2
    finally:
        server.stop()
    assert not server.is_running
    wait_until(lambda: not children(session))


def test_a_server_that_can_not_start_says_why(tmp_path):
    server = process_of(tmp_path, "raise ValueError('no such model')")
    server.start()
    with pytest.raises(UserError, match=r"exit code 1.*ValueError: no such model.*server.log"):
        server.wait_until_up(20)
    for _ in range(RESTARTS):
        server.restart_if_dead()
        assert server.process is not None
        server.process.wait()
    with pytest.raises(UserError, match=rf"\b{RESTARTS + 1}\b.*no such model"):
        server.restart_if_dead()


@pytest.mark.parametrize(
    ("code", "setting"),
    [
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", "max_num_seqs"),
        ("raise ValueError('No available memory for the cache blocks.')", "server_gpu_memory_utilization"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "--shm-size"),
    ],
)
def test_a_known_end_of_a_server_names_what_to_change(tmp_path, code, setting):
    server = process_of(tmp_path, code)
    server.start()
    with pytest.raises(UserError, match=setting):
        server.wait_until_up(20)


def test_a_server_that_takes_too_long_is_stopped(tmp_path):
    server = process_of(tmp_path, "import time; print('getting ready', flush=True); time.sleep(60)")
    server.start()
    with pytest.raises(UserError, match=r"0\.5 s.*server_timeout_s.*getting ready"):
        server.wait_until_up(0.5)
    assert not server.is_running


def test_servers_end_with_the_run_that_was_killed(tmp_path):
    code = f"""
import pathlib, sys, time
from whetstone.engines.servers.process import ServerCommand, ServerProcess
command = ServerCommand(args=["sleep", "78.5"], environment={{}}, url="x")
server = ServerProcess(command, pathlib.Path({str(tmp_path)!r}) / "log")
server.start()
print(server.process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    session = int(parent.stdout.readline())
    assert children(session)
    parent.kill()
    parent.wait()
    wait_until(lambda: not children(session))


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for engine, words in (
        ("vllm", "pip install 'vllm>=0.22,<0.33'"),
        ("sglang", "pip install 'sglang>=0.5.16,<0.5.24'"),
    ):
        config = load(None, [f"rollout_engine={engine}"]).config
        with pytest.raises(UserError) as raised:
            COMMANDS[engine](config, devices=None, host="127.0.0.1", port=8000)
        assert words in str(raised.value) and "rollout_servers" in str(raised.value)


def test_servers_may_have_an_environment_of_their_own(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for engine in ("vllm", "sglang"):
        words = [f"rollout_engine={engine}", f"server_python={sys.executable}"]
        config = load(None, words).config
        check_packages(config)
        command = COMMANDS[engine](config, devices=None, host="127.0.0.1", port=8000)
        assert command.args[0] == sys.executable
        config = load(None, [*words[:1], "server_python=/nowhere/python"]).config
        with pytest.raises(UserError, match=rf"server_python: /nowhere/python.*{engine}"):
            COMMANDS[engine](config, devices=None, host="127.0.0.1", port=8000)
    with pytest.raises(UserError, match="pip install 'vllm"):  # the engine in the trainer's own process
        check_packages(load(None, ["rollout_engine=vllm", "vllm_mode=colocate", *words[1:]]).config)


def test_the_flags_that_training_needs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = (
        "use_vllm=true use_peft=true lora_r=20 max_prompt_length=100 max_completion_length=28 max_num_seqs=12"
    )
    config = load(None, [*words.split(), "server_args=[--trust-remote-code]"]).config
    command = COMMANDS["vllm"](config, devices=None, host="127.0.0.1", port=8123)
    line = " ".join(command.args)
    for part in (
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--max-model-len 128",
        "--max-num-seqs 12",
        "--max-lora-rank 32",
        "--port 8123",
        "--trust-remote-code",
    ):
        assert part in line
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_the_essence_of_what_an_engine_said():
    checked = (
        "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (1024) is greater "
        "than the derived max_model_len (512).\n    For further information visit the documentation"
    )
    assert error_lines(checked).startswith("Value error, User-specified max_model_len (1024)")
    assert error_lines("starting\nRuntimeError: out of memory\nbye") == "RuntimeError: out of memory"
    assert error_lines("one\ntwo\nthree", 2) == "two | three"
    assert error_lines("") == "nothing"
