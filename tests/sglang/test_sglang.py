"""The real SGLang on a GPU, as `whet serve` and a run start it. `make test-sglang` sets it up.

SGLANG_PYTHON    the interpreter that has SGLang (server_python); default: this one
SGLANG_ARGS      more arguments of the server, such as --attention-backend triton --disable-cuda-graph
SMOLLM2          a model folder for the run that starts its own server; default: the embedded model
SGLANG_NCCL=1    weights over NCCL too: one GPU, which both sides take for that of another host

A server's first start takes one to two minutes; most tests share it. float16 against the trainer's float32.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import collect
from whetstone.config import load
from whetstone.engines import make_engine
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.servers.http import HttpClient, RequestRejected, free_port
from whetstone.engines.servers.pool import ServerPool
from whetstone.model.attention import PackedAttention, packed_segments
from whetstone.model.hub import resolve
from whetstone.model.policy import Policy, load_policy
from whetstone.types import Finish

PYTHON = os.environ.get("SGLANG_PYTHON")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang needs a CUDA device"),
    pytest.mark.skipif(
        PYTHON is None and importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed here: SGLANG_PYTHON names the interpreter that has it",
    ),
]
ROOT = Path(__file__).resolve().parents[2]
MODEL = os.environ.get("SMOLLM2") or "pebble"
HAS_NCCL = os.environ.get("SGLANG_NCCL") == "1"
ONE_GPU = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
LENGTH = 1024  # of a completion
SERVER = [
    "rollout_engine=sglang",
    "server_timeout_s=400",
    "server_gpu_memory_utilization=0.3",
    f"server_args={json.dumps(os.environ.get('SGLANG_ARGS', '').split())}",
    *([] if PYTHON is None else [f"server_python={PYTHON}"]),
]
BASE = [*SERVER, "max_num_seqs=32", f"max_completion_length={LENGTH}", "max_prompt_length=64"]
PROMPTS = [(6, 20, 30, 40), (6, 21, 31, 41, 50, 51), (6, 22)]
REQUESTS = [Request(prompt_ids=prompt, seeds=(2**62 + 1, 2, 3, 4)) for prompt in PROMPTS]
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


class Served:
    """`whet serve` as a process."""

    def __init__(self, folder: Path):
        self.log = folder / "servers" / "server-0.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [*BASE, f"output_dir={folder}", "run_name=", f"server_port={port}"]
        environment = {**os.environ, **({**ONE_GPU, "NCCL_HOSTID": "server"} if HAS_NCCL else {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whetstone", "serve", "quickstart", *words],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("Up: "):
                break
        assert self.lines[-1:] and self.lines[-1].startswith("Up: "), [*self.lines, self.tail()]
        rest = self.process.stdout
        threading.Thread(target=lambda: self.lines.extend(rest), daemon=True).start()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.is_file() else ""

    def pid(self) -> int:
        """Of the process that answers HTTP."""
        command = ["ps", "-o", "pid=", "--ppid", str(self.process.pid)]
        (pid,) = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return int(pid)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    begun = time.monotonic()
    server = Served(tmp_path_factory.mktemp("served"))
    print(f"up after {time.monotonic() - begun:.0f} s")
    yield server
    print(server.tail())
    server.stop()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(load("quickstart", BASE).config.model)


@pytest.fixture(scope="module")
def engine(served: Served, policy: Policy) -> Iterator[ServerPool]:
    pool = connect(served, policy)
    pool.update_weights(0)
    yield pool
    pool.close()


def connect(served: Served, policy: Policy, *words: str) -> ServerPool:
    pool = make_engine(load("quickstart", [*BASE, f"rollout_servers={served.url}", *words]).config, policy)
    assert isinstance(pool, ServerPool)
    return pool


def move(policy: Policy, seed: int, size: float = 0.02) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * size)


@torch.no_grad()
def distribution(policy: Policy, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> Any:
    """The trainer's logprobs of all tokens at each place of a completion."""
    ids = torch.tensor([*prompt, *tokens], device=policy.device)
    attend = PackedAttention(packed_segments([len(ids)]), policy.device)
    positions = torch.arange(len(ids), device=policy.device)[None]
    hidden = policy.hidden(ids[None], positions, attend)[0, len(prompt) - 1 : -1]
    return (policy.head(hidden).float() / temperature).log_softmax(-1).cpu()


def check(engine: ServerPool, policy: Policy, version: int) -> None:
    """Greedy tokens are the trainer's likeliest, and all logprobs the trainer's."""
    ours, native = collect(engine, REQUESTS, GREEDY), collect(NativeEngine(policy, 8), REQUESTS, GREEDY)
    pairs = [(a, b) for place in ours
             for a, b in zip(ours[place].token_ids, native[place].token_ids, strict=False)]  # fmt: skip
    print(f"version {version}: {sum(a == b for a, b in pairs)} of {len(pairs)} greedy tokens the native's")
    for sampling in (GREEDY, SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, temperature=0.6)):
        gaps, missed = [], []
        for (request, _), one in collect(engine, REQUESTS, sampling).items():
            rows = distribution(policy, PROMPTS[request], one.token_ids, sampling.temperature or 1.0)
            own = rows.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
            gaps.append((own - torch.tensor(one.logprobs)).abs())
            missed.append(rows.amax(-1) - own)
            assert one.policy_version == version
        gap, miss = torch.cat(gaps), torch.cat(missed)
        print(
            f"  temperature {sampling.temperature}: logprobs {gap.mean():.1e} apart, at most {gap.max():.1e}"
        )
        assert gap.mean() < 0.01 and gap.max() < 0.5
        if sampling.is_greedy:
            assert miss.mean() < 0.005 and miss.max() < 0.2


def num_running(served: Served) -> int:
    """Running and waiting; the server updates it now and then."""
    loads = HttpClient(served.url).get("/v1/loads?include=core")["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def wait_for(is_so: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_so()


def test_tokens_and_logprobs(engine: ServerPool, policy: Policy) -> None:
    check(engine, policy, 0)


def test_filters(engine: ServerPool, policy: Policy) -> None:
    """Tokens are from the nucleus; logprobs are without filters, as docs/servers.md says."""
    sampling = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.5)
    for (request, _), one in collect(engine, REQUESTS, sampling).items():
        rows = distribution(policy, PROMPTS[request], one.token_ids, 0.8)
        own = rows.gather(-1, torch.tensor(one.token_ids)[:, None])
        above = (rows.exp() * (rows > own)).sum(-1)  # the mass of likelier tokens
        assert above.max() < 0.5 + 0.02
        assert (own[:, 0] - torch.tensor(one.logprobs)).abs().mean() < 0.01
    first = collect(engine, REQUESTS, SamplingParams(max_tokens=48, top_k=1))
    assert {place: one.token_ids for place, one in first.items()} == {
        place: one.token_ids for place, one in collect(engine, REQUESTS, GREEDY).items()
    }


def test_stop_tokens_and_limits(engine: ServerPool, policy: Policy) -> None:
    """One stop token, several, none; each sample's own limit; a stop token at the limit."""
    found = collect(engine, REQUESTS, SamplingParams(max_tokens=256)).values()
    stops = {one.token_ids[-1] for one in found if one.finish is Finish.STOP}
    assert stops and stops <= set(policy.stop_token_ids)
    assert not any(token in policy.stop_token_ids for one in found for token in one.token_ids[:-1])
    endless = collect(engine, REQUESTS, SamplingParams(max_tokens=200, ignore_eos=True))
    assert {len(one.token_ids) for one in endless.values()} == {200}
    assert {one.finish for one in endless.values()} == {Finish.LENGTH}
    request = Request(prompt_ids=PROMPTS[0], seeds=(1, 2, 3), max_tokens=(1, 7, 90))
    done = collect(engine, [request], SamplingParams(max_tokens=256, ignore_eos=True))
    assert [len(done[0, sample].token_ids) for sample in range(3)] == [1, 7, 90]
    server, own = engine.handles[0].server, engine.handles[0].server.stops
    server.stops = (*own, *range(10, 40))
    try:
        several = collect(engine, REQUESTS, SamplingParams(max_tokens=256)).values()
        ends = {one.token_ids[-1] for one in several if one.finish is Finish.STOP}
        assert len(ends) > 1 and ends <= set(server.stops)
        server.stops = tuple(range(policy.config.vocab_size))
        for one in collect(engine, REQUESTS, SamplingParams(max_tokens=1)).values():
            assert one.finish is Finish.STOP and len(one.token_ids) == 1
    finally:
        server.stops = own


def test_the_longest_prompt_and_completion(engine: ServerPool) -> None:
    request = Request(prompt_ids=tuple(range(10, 74)), seeds=(1, 2))
    done = collect(engine, [request], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    assert {len(one.token_ids) for one in done.values()} == {LENGTH}
    with pytest.raises(RequestRejected, match="HTTP 400"):
        engine.handles[0].server.complete([5] * (2 * LENGTH), 1, SamplingParams(max_tokens=LENGTH))


def test_a_chat_prompt_has_the_same_tokens_there(served: Served, policy: Policy) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    text = policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    body = {"sampling_params": {"max_new_tokens": 8, "temperature": 0.0}, "return_prompt_token_ids": True}
    http = HttpClient(served.url)
    by_text, by_ids = (
        http.post("/generate", {**body, **given}) for given in ({"text": text}, {"input_ids": ids})
    )
    assert by_text["prompt_token_ids"] == by_ids["prompt_token_ids"] == ids
    assert by_text["output_ids"] == by_ids["output_ids"]


def test_cancelled_requests_end_and_the_server_lives(
    served: Served, engine: ServerPool, policy: Policy
) -> None:
    before = served.pid()
    for change in ("nothing", "weights", "sleep"):
        requests = [Request(prompt_ids=prompt, seeds=tuple(range(10))) for prompt in PROMPTS]
        requests[0] = Request(prompt_ids=PROMPTS[0], seeds=(1,), max_tokens=(4,))
        samples: Any = engine.generate(requests, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        next(samples)
        assert wait_for(lambda: num_running(served) > 5, 5)
        samples.close()
        if change == "nothing":
            assert wait_for(lambda: num_running(served) == 0, 20)
        elif change == "weights":
            engine.update_weights(0)
        else:
            engine.sleep()
            engine.wake()
        assert wait_for(lambda: num_running(served) == 0, 2)
    assert served.pid() == before
    check(engine, policy, 0)


@pytest.mark.parametrize("transfer", ["disk", "ipc", "nccl"])
def test_weights(served: Served, policy: Policy, transfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if transfer == "nccl":
        if not HAS_NCCL:
            pytest.skip("SGLANG_NCCL=1 runs it on one GPU")
        for name, value in {**ONE_GPU, "NCCL_HOSTID": "trainer"}.items():
            monkeypatch.setenv(name, value)
    own = [parameter.detach().clone() for parameter in policy.parameters()]
    pool = connect(served, policy, f"weight_transfer={transfer}")
    try:
        for version in (1, 2):
            move(policy, version)
            begun = time.monotonic()
            pool.update_weights(version)
            print(f"{transfer}: {time.monotonic() - begun:.2f} s")
            check(pool, policy, version)
        changed = collect(pool, REQUESTS, GREEDY)
        pool.sleep()
        pool.update_weights(3)
        pool.wake()
        assert tokens(collect(pool, REQUESTS, GREEDY)) == tokens(changed)
    finally:
        with torch.no_grad():
            for parameter, value in zip(policy.parameters(), own, strict=True):
                parameter.copy_(value)
        pool.close()
    fresh = connect(served, policy)
    fresh.update_weights(0)
    assert tokens(collect(fresh, REQUESTS, GREEDY)) != tokens(changed)
    fresh.close()


def tokens(samples: dict[Any, Any]) -> dict[Any, tuple[int, ...]]:
    return {place: one.token_ids for place, one in samples.items()}


def test_memory_is_released_and_comes_back(served: Served, policy: Policy) -> None:
    pool = connect(served, policy)
    pool.update_weights(0)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    pool.sleep()
    released = torch.cuda.mem_get_info()[0] - free
    print(f"released {released / 1e9:.1f} GB")
    assert released > 1e9
    pool.wake()
    check(pool, policy, 0)
    pool.close()


RUN = ["prompts_per_step=8", "num_generations=8", "max_completion_length=64", "eval_num_samples=0",
       "fixed_eval_steps=0", "save_steps=2", "reward_workers=1", "preflight=off", "watch=false"]  # fmt: skip


def whet_train(*words: str) -> None:
    command = [sys.executable, "-m", "whetstone", "train", "quickstart", *SERVER, *RUN, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def check_rows(folder: Path, steps: int) -> None:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    apart = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    print(
        "logprob difference of each step",
        apart,
        "clipped",
        [row["completions/clipped_ratio"] for row in rows],
    )
    assert len(rows) == steps and max(apart) < 0.02
    assert min(row["completions/clipped_ratio"] for row in rows) < 1


def test_a_run_goes_on_where_it_was(served: Served, tmp_path: Path) -> None:
    words = [f"rollout_servers={served.url}", f"output_dir={tmp_path}", "run_name=run"]
    words += ["overwrite_output_dir=false"]
    whet_train(*words, "max_steps=2")
    whet_train(*words, "max_steps=4", "auto_resume=true")
    check_rows(tmp_path, 4)


def test_sigkill_in_the_middle_of_a_batch(served: Served, policy: Policy) -> None:
    """`whet serve` starts it again with the weights of the folder; the batch has the current ones."""
    pool = connect(served, policy)
    move(policy, 9, 0.05)
    pool.update_weights(7)
    requests = [Request(prompt_ids=prompt, seeds=tuple(range(16))) for prompt in PROMPTS]
    requests[0] = Request(prompt_ids=PROMPTS[0], seeds=(1,), max_tokens=(4,))
    samples = pool.generate(requests, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    taken = [next(samples)]
    victim = served.pid()
    os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    taken += samples
    print(f"{len(taken)} samples, {pool.num_retried} drawn again, {time.monotonic() - begun:.0f} s")
    assert len({(one.request, one.sample) for one in taken}) == 33
    assert pool.num_retried > 0 and served.pid() != victim
    assert {one.completion.policy_version for one in taken} == {7}
    check(pool, policy, 7)
    pool.close()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_starts_its_own_server(tmp_path: Path, lora: bool) -> None:
    """And stops it; the weights of all of the model, or an adapter."""
    model = MODEL if lora else "pebble"
    words = [f"output_dir={tmp_path}", "run_name=run", "max_steps=3", f"model_name_or_path={resolve(model)}"]
    words += ["weight_transfer=ipc"] if not lora else ["use_peft=true", "lora_r=8", "lora_dropout=0"]
    whet_train(*words)
    check_rows(tmp_path, 3)
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert not any("sglang" in line and str(resolve(model)) in line for line in listed.splitlines())
