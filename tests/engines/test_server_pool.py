"""Servers as an engine: rollouts, weights, versions, failures. Against a small server of ours that speaks
vLLM's and SGLang's interfaces over real HTTP (tests/support/protocol_server.py), not against vLLM or SGLang.
"""

import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from tests.conftest import make_policy
from tests.support.models import tiny_policy
from tests.support.protocol_server import ModelServer
from tests.support.waiting import wait_until
from whetstone.config import load
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.servers.pool import ServerHandle, ServerPool, ServerSharing
from whetstone.engines.servers.setup import COMMANDS
from whetstone.engines.servers.sglang import SEEDS, SGLangServer
from whetstone.engines.servers.vllm.server import VLLMServer, parse_version
from whetstone.engines.servers.weights import buckets, named_weights
from whetstone.errors import UserError
from whetstone.types import Finish

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [(5, 9, 33, 8), (7, 3, 41, 60), (11, 12, 13)]
REQUESTS = [Request(prompt_ids=prompt, seeds=(1, 2, 3)) for prompt in PROMPTS]
SAMPLING = SamplingParams(max_tokens=5, temperature=0.8)
SGLANG = ["sglang", "sglang-0.5.16"]
DIALECTS = ["vllm", "vllm-0.24", *SGLANG]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model that servers start with; policies of the tests begin with the same weights."""
    path = tmp_path_factory.mktemp("model")
    make_policy("smollm").lm.save_pretrained(path)
    return path


class House:
    """Servers, and a fleet of them."""

    def __init__(self, folder, dialect="vllm", count=2, policy=None, **settings):
        self.folder, self.dialect = folder, dialect
        self.policy = policy or make_policy("smollm")
        self.servers = [self.start() for _ in range(count)]
        self.pool = self.build_pool(**settings)

    def start(self, port=0):
        dialect, _, older = self.dialect.partition("-")
        return ModelServer(dialect, self.folder, port, is_newest=not older)

    def restart(self, index):
        """At the same address, with the weights that it began with."""
        self.servers[index] = self.start(self.servers[index].port)

    def build_pool(
        self, timeout_s=5.0, request_timeout_s=20.0, weight_transfer="auto", in_flight=2, sharing=None
    ):
        kind = VLLMServer if self.dialect.startswith("vllm") else SGLangServer
        handles = [
            ServerHandle(
                server=kind(
                    server.url,
                    stops=self.policy.stop_token_ids,
                    max_tokens=16,
                    weight_transfer=weight_transfer,
                    group_port=None,
                    request_timeout_s=request_timeout_s,
                    is_shared=sharing is not None,
                )
            )
            for server in self.servers
        ]
        return ServerPool(
            handles,
            self.policy,
            max_in_flight=in_flight,
            timeout_s=timeout_s,
            weight_dir=None,
            sharing=sharing,
        )

    def move(self, seed):
        """What an update does."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)

    def collect(self, requests=REQUESTS, sampling=SAMPLING):
        return {(o.request, o.sample): o.completion for o in self.pool.generate(requests, sampling)}

    def expected(self, requests=REQUESTS, sampling=SAMPLING):
        """The native engine on the policy itself: the server draws in the same way."""
        if self.dialect.startswith("sglang"):
            requests = [
                Request(prompt_ids=r.prompt_ids, seeds=tuple(s % SEEDS for s in r.seeds)) for r in requests
            ]
        engine = NativeEngine(self.policy, 4)
        engine.update_weights(self.pool.policy_version)
        return {(o.request, o.sample): o.completion for o in engine.generate(requests, sampling)}

    def check(self):
        """All samples, of the policy's weights as they are now."""
        ours, native = self.collect(), self.expected()
        assert ours.keys() == native.keys()
        for place, completion in ours.items():
            assert completion.token_ids == native[place].token_ids
            assert completion.finish == native[place].finish
            assert completion.policy_version == self.pool.policy_version
            assert torch.allclose(
                torch.tensor(completion.logprobs), torch.tensor(native[place].logprobs), atol=1e-5
            )

    def close(self):
        self.pool.close()
        for server in self.servers:
            if not server.is_dead:
                server.kill()


@pytest.fixture
def house(folder, monkeypatch):
    monkeypatch.setattr("whetstone.engines.servers.pool.CHECK_EVERY_S", 0.05)
    made = []

    def make(*args, **settings):
        made.append(House(folder, *args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_samples_are_of_the_weights_that_were_sent_last(house, dialect):
    home = house(dialect)
    home.pool.update_weights(0)
    home.check()
    before = home.expected()
    for version in (1, 2):
        home.move(version)
        home.pool.update_weights(version)
        home.check()
    assert all(server.pushes == ["disk"] * 3 for server in home.servers)
    assert before[0, 0].token_ids != home.expected()[0, 0].token_ids  # else the test proves nothing


class Process:
    """The same server as a process of its own: it has its own process groups, and SIGKILL."""

    def __init__(self, dialect, folder):
        self.words = [sys.executable, "-m", "tests.support.protocol_server", dialect, str(folder)]
        self.start("0")

    def start(self, port):
        self.process = subprocess.Popen([*self.words, port], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.port = self.url.rsplit(":")[-1]
        self.is_dead = False

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.is_dead = True


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["sglang", "sglang-0.5.16"])
def test_weights_over_a_process_group(folder, house, dialect):
    """`update_weights_from_distributed`, over gloo as both are on a CPU; then SIGKILL in the middle of a
    batch and a new start at the same address.
    """
    home = house(dialect, 0)
    server = Process(dialect, folder)
    home.servers.append(server)
    home.pool = home.build_pool(weight_transfer="nccl", timeout_s=60)
    for version in (0, 1):
        home.move(version)
        home.pool.update_weights(version)
        home.check()
    samples = home.pool.generate(REQUESTS * 8, SAMPLING)
    taken = [next(samples)]
    server.kill()
    restart = threading.Thread(target=server.start, args=(server.port,))
    restart.start()
    taken += samples
    restart.join()
    native = home.expected(REQUESTS * 8)
    assert {(o.request, o.sample): o.completion.token_ids for o in taken} == {
        place: completion.token_ids for place, completion in native.items()
    }
    assert home.pool.num_retried > 0
    assert len(distributed_c10d._world.pg_map) == 1  # the group with the killed server was destroyed
    home.pool.close()
    assert not distributed_c10d._world.pg_map


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_lora_run_sends_its_adapter_alone(house, dialect):
    from peft import LoraConfig, get_peft_model

    from whetstone.model.policy import Policy

    base = make_policy("smollm")
    model = get_peft_model(base.lm, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    home = house(dialect, 1, policy=Policy(model, base.tokenizer, base.device))
    for version in (0, 1):
        home.move(version)
        home.pool.update_weights(version)
        home.check()
    assert home.servers[0].pushes == ["adapter"] * 2
    assert len(home.servers[0].policies) == 2  # the base and the newest
    home.servers[0].kill()
    home.restart(0)
    home.check()


def test_work_is_spread_and_a_slow_server_gets_less(house):
    home = house("vllm")
    home.servers[1].delay_s = 0.2
    home.pool.update_weights(0)
    home.check()
    quick, slow = (server.num_completions for server in home.servers)
    assert quick + slow == 9 and quick > slow > 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_dies_in_the_middle_loses_nothing(house, dialect):
    home = house(dialect)
    home.pool.update_weights(0)
    home.servers[0].die_after = 2
    home.check()
    assert home.pool.num_retried > 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_only_server_dies_and_comes_back_with_old_weights(house, dialect, caplog):
    home = house(dialect, 1)
    home.move(7)
    home.pool.update_weights(1)
    home.servers[0].die_after = 3

    def bring_back():
        wait_until(lambda: "waiting for its return" in caplog.text)
        home.restart(0)

    helper = threading.Thread(target=bring_back)
    helper.start()
    home.check()
    helper.join()
    assert home.servers[0].pushes == ["disk"]  # the new start was given the current weights, once


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_started_anew_between_two_requests_is_found_out(house, dialect):
    """It answers at once and without an error, with the weights it began with: the worst case."""
    home = house(dialect, 1)
    home.move(3)
    home.pool.update_weights(1)
    home.servers[0].kill()
    home.restart(0)
    home.check()
    assert home.pool.num_retried > 0 and home.servers[0].pushes == ["disk"]


def test_a_dead_server_is_back_in_time_for_the_next_batch(house):
    home = house("vllm")
    home.pool.update_weights(0)
    home.servers[0].kill()
    home.check()
    home.restart(0)
    home.move(1)
    home.pool.update_weights(1)
    home.check()
    home.check()
    assert home.servers[0].num_completions > 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_processes_of_one_run_share_servers(house, dialect):
    """The first sends weights, the second is told; a server that is started anew in the middle is found out
    by both.
    """
    news = queue.SimpleQueue()

    def broadcast(what):
        news.put(what)
        return what

    home = house(dialect)
    first = home.pool = home.build_pool(sharing=ServerSharing(is_leader=True, broadcast=broadcast))
    second = home.build_pool(sharing=ServerSharing(is_leader=False, broadcast=lambda what: news.get()))
    native, drawn = {}, []
    with ThreadPoolExecutor(2) as pool:
        for version in (1, 2):
            home.move(version)
            list(pool.map(lambda pool: pool.update_weights(version), (first, second)))  # noqa: B023
            if version == 2:
                home.servers[0].kill()
                home.restart(0)
            native = {place: one.token_ids for place, one in home.expected().items()}
            drawn = pool.map(lambda pool: list(pool.generate(REQUESTS, SAMPLING)), (first, second))
            for samples in drawn:
                assert {(o.request, o.sample): o.completion.token_ids for o in samples} == native
                assert {o.completion.policy_version for o in samples} == {version}
    assert home.servers[1].num_completions > 0
    if not dialect.startswith("sglang"):
        assert home.servers[1].pushes == ["disk"] * 2  # once for each version, by the first process
    second.close()


def test_a_failure_of_the_first_process_reaches_the_others(house):
    home = house("vllm", 1, timeout_s=0.5)
    home.servers[0].kill()
    news = queue.SimpleQueue()
    first = home.build_pool(
        timeout_s=0.5, sharing=ServerSharing(is_leader=True, broadcast=lambda what: news.put(what) or what)
    )
    second = home.build_pool(
        timeout_s=0.5, sharing=ServerSharing(is_leader=False, broadcast=lambda what: news.get())
    )
    for pool in (first, second):
        with pytest.raises(UserError, match="No rollout server is up"):
            pool.update_weights(0)


def test_no_server_at_all_ends_with_a_sentence(house):
    home = house("vllm", 1, timeout_s=1.0)
    home.pool.update_weights(0)
    home.servers[0].kill()
    begun = time.monotonic()
    with pytest.raises(UserError, match=r" 1 s.*whet serve.*auto_resume"):
        home.collect()
    assert time.monotonic() - begun < 60  # the default is 240 s


def test_a_server_that_hangs_is_left(house):
    home = house("vllm", 2, request_timeout_s=1.0)
    home.pool.update_weights(0)
    home.servers[0].delay_s = 30
    home.check()
    assert "within 1 s" in home.pool.handles[0].trouble


def test_server_that_refuses_weights_is_lost_and_named(house):
    home = house("vllm", 1, timeout_s=30.0)
    home.servers[0].fail_push = True
    with pytest.raises(UserError, match=r"5 times.*no memory left for the new weights"):
        home.pool.update_weights(0)


def _spoiled(change):
    """An answer whose only choice was changed."""

    def spoil(answer):
        change(answer["choices"][0])
        return answer

    return spoil


def _logprobs(choice):
    return choice["logprobs"]["token_logprobs"]


LONG = {"token_ids": [9] * 30, "logprobs": {"token_logprobs": [-1.0] * 30}}
SPOILED = {
    "no json": (lambda answer: "<html>", "something without"),
    "no token ids": (_spoiled(lambda choice: choice.pop("token_ids")), "something without 'token_ids'"),
    "a logprob too few": (_spoiled(lambda choice: _logprobs(choice).pop()), "8 tokens with 7 logprobs"),
    "null": (_spoiled(lambda choice: _logprobs(choice).__setitem__(0, None)), "no logprobs"),
    "another prompt": (_spoiled(lambda choice: choice.update(prompt_token_ids=[1])), "another prompt"),
    "a stop that is none": (
        _spoiled(lambda choice: choice.update(finish_reason="stop", token_ids=[9] * 8)),
        "stopped with token 9",
    ),
    "too long": (_spoiled(lambda choice: choice.update(LONG)), "30 tokens where at most 8"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_malformed_answers_end_the_run_with_a_sentence(house, fault):
    spoil, words = SPOILED[fault]
    home = house("vllm", 1)
    home.pool.update_weights(0)
    home.servers[0].spoil = spoil
    with pytest.raises(UserError, match=words):
        home.collect(sampling=SamplingParams(max_tokens=8, ignore_eos=True))


def test_an_aborted_completion_is_drawn_again(house):
    home = house("vllm")
    home.pool.update_weights(0)
    home.servers[0].spoil = lambda answer: {
        **answer,
        "choices": [{**answer["choices"][0], "finish_reason": "abort"}],
    }
    with pytest.raises(UserError, match="5 times"):
        for _ in range(8):
            home.check()
            time.sleep(0.1)


def test_generation_left_in_the_middle_leaves_nothing_under_way(house):
    home = house("vllm", 1)
    home.pool.update_weights(0)
    home.servers[0].delay_s = 5
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        samples = home.pool.generate(REQUESTS, SAMPLING)
        waiting = pool.submit(next, samples)
        home.servers[0].delay_s = 0.01
        waiting.result()
    samples.close()
    assert home.pool.num_generating == 0
    home.servers[0].delay_s = 0
    home.move(1)
    home.pool.update_weights(1)
    home.check()
    assert time.monotonic() - begun < 20


def test_sleep_and_wake_reach_the_servers(house):
    for dialect in ("vllm", "sglang"):
        home = house(dialect, 1)
        home.pool.update_weights(0)
        home.pool.sleep()
        assert home.servers[0].asleep == {"weights", "kv_cache"}
        home.move(1)
        home.pool.update_weights(1)
        assert home.servers[0].asleep == {"kv_cache"}  # only what the push needs
        home.pool.wake()
        home.check()


def test_a_server_that_several_processes_share_stays_awake(house):
    """Another one may still be sampling."""
    home = house("vllm", 1)
    home.pool = home.build_pool(sharing=ServerSharing())
    home.pool.update_weights(0)
    home.pool.sleep()
    assert home.servers[0].asleep == set()
    home.check()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_each_sample_has_its_own_limit(house, dialect):
    """A later turn of a conversation may say less than the first one."""
    home = house(dialect, 1)
    home.pool.update_weights(0)
    request = Request(prompt_ids=PROMPTS[0], seeds=(1, 2), max_tokens=(3, 7))
    outputs = home.pool.generate([request], SamplingParams(max_tokens=16, ignore_eos=True))
    assert {output.sample: len(output.completion.token_ids) for output in outputs} == {0: 3, 1: 7}


def test_a_server_for_shorter_texts_is_refused(house):
    home = house("vllm", 1)
    home.pool.handles[0].server.max_tokens = 128
    with pytest.raises(UserError, match=r"128 tokens.*max_completion_length.* 128"):
        home.pool.update_weights(0)


def test_files_do_not_reach_another_machine(house):
    home = house("vllm", 1)
    home.pool.update_weights(0)
    home.pool.handles[0].server.http.host = "127.0.0.2"
    with pytest.raises(UserError, match="weight_transfer_dir"):
        home.pool.update_weights(1)


def test_every_weight_is_sent_once_and_a_tied_head_too():
    policy = make_policy("smollm")
    names = [name for name, _ in named_weights(policy)]
    assert len(names) == len(set(names)) and "lm_head.weight" in names
    untied = dict(named_weights(make_policy("llama")))
    assert untied["lm_head.weight"].data_ptr() != untied["model.embed_tokens.weight"].data_ptr()
    sizes = [[tensor.nbytes for _, tensor in bucket] for bucket in buckets(named_weights(policy), 10_000)]
    assert sum(len(bucket) for bucket in sizes) == len(names)
    assert all(sum(bucket) <= 10_000 or len(bucket) == 1 for bucket in sizes)


def test_versions_are_numbers():
    assert parse_version("0.24.0+cu130") == (0, 24, 0)
    assert (0, 22) <= parse_version("0.32.1rc1") <= (0, 32, 99)
    assert parse_version("0.33.0") > (0, 32, 99)


class Later:
    """A stream whose requests come after `generate_open` has begun; the first one may be cancelled."""

    max_prompt_length, max_length = 4, None

    def __init__(self, server, requests, *, cancels):
        self.server, self.requests, self.cancels = server, list(requests), cancels
        self.num_sequences = 1 + len(self.requests)
        self.is_cancelled = False

    def take(self, *, wait):
        is_sampled = self.server.num_in_flight > 0  # the first request is with the server
        taken, self.requests = (self.requests, []) if is_sampled else ([], self.requests)
        if taken and self.cancels:
            self.server.delay_s, self.is_cancelled = 0.0, True
        return taken

    def cancelled(self):
        return [(0, 0)] if self.is_cancelled else []


def test_requests_that_come_later_are_sampled_at_once(house):
    home = house("vllm", 1, in_flight=32)
    home.pool.update_weights(0)
    home.servers[0].delay_s = 0.5
    first, *later = [Request(prompt_ids=PROMPTS[0], seeds=(seed,)) for seed in range(12)]
    stream = Later(home.servers[0], later, cancels=False)
    done = list(home.pool.generate_open([first], SAMPLING, stream))
    assert {output.request for output in done} == set(range(12))
    assert home.servers[0].most_in_flight > 6  # one at a time, if counted by those that began


def test_a_cancelled_sample_ends_and_its_server_stays(house):
    home = house("vllm", 1)
    home.pool.update_weights(0)
    home.servers[0].delay_s = 60
    first, *later = [Request(prompt_ids=prompt, seeds=(1,)) for prompt in PROMPTS]
    begun = time.monotonic()
    stream = Later(home.servers[0], later, cancels=True)
    done = list(home.pool.generate_open([first], SAMPLING, stream))
    assert {output.request for output in done} == {1, 2} and time.monotonic() - begun < 50
    assert home.pool.handles[0].is_connected and home.pool.num_retried == 0
    home.check()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_stop_tokens_end_completions(house, dialect):
    """SGLang looks at `ignore_eos` before it looks at the stop tokens."""
    home = house(dialect, 1)
    home.pool.update_weights(0)
    home.policy.lm.generation_config.eos_token_id = list(range(2, 40))
    home.servers[0].base.generation_config.eos_token_id = list(range(2, 40))
    home.pool.handles[0].server.stops = home.policy.stop_token_ids
    home.check()
    assert {completion.finish for completion in home.collect().values()} == {Finish.STOP, Finish.LENGTH}
    ours = home.collect(sampling=SamplingParams(max_tokens=16, ignore_eos=True))
    assert {len(completion.token_ids) for completion in ours.values()} == {16}


def test_sglang_may_stop_at_tokens_of_its_own(house):
    """Those of the model's and the tokenizer's configuration, where the generation config has others."""
    home = house("sglang", 1)
    home.pool.update_weights(0)
    home.servers[0].base.generation_config.eos_token_id = list(range(2, 40))
    found = home.collect().values()
    stopped = [completion for completion in found if completion.finish is Finish.STOP]
    assert stopped and all(2 <= completion.token_ids[-1] < 40 for completion in stopped)
    assert not {completion.token_ids[-1] for completion in stopped} <= {*home.policy.stop_token_ids}


@pytest.mark.parametrize("dialect", SGLANG)
def test_sglang_has_ended_our_requests_before_it_is_changed(house, dialect):
    """It samples on for a client that has left; 0.5.16 would end if its memory or weights changed then."""
    home = house(dialect, 1)
    home.pool.update_weights(0)
    for change in (lambda: home.pool.update_weights(1), home.pool.sleep):
        home.servers[0].delay_s = 0.3
        samples = home.pool.generate(REQUESTS, SAMPLING)
        next(samples)
        home.servers[0].delay_s = 60
        while home.servers[0].num_in_flight < 2:
            time.sleep(0.01)
        samples.close()
        assert home.servers[0].num_in_flight > 0
        begun = time.monotonic()
        change()
        assert time.monotonic() - begun < 20 and home.servers[0].num_in_flight == 0
    home.servers[0].delay_s = 0
    home.move(2)
    home.pool.update_weights(2)
    home.pool.wake()
    home.check()
    assert not home.servers[0].is_dead


@pytest.mark.parametrize("dialect", SGLANG)
def test_a_stop_token_at_the_limit_is_a_stop(house, dialect):
    """0.5.16 looks at the limit first."""
    home = house(dialect, 1)
    home.pool.update_weights(0)
    for policy in (home.policy.lm, home.servers[0].base):
        policy.generation_config.eos_token_id = list(range(2, 106))
    home.pool.handles[0].server.stops = home.policy.stop_token_ids
    one = SamplingParams(max_tokens=1)
    finishes = [completion.finish for completion in home.collect(sampling=one).values()]
    assert Finish.STOP in finishes
    assert finishes == [completion.finish for completion in home.expected(sampling=one).values()]


@pytest.mark.parametrize("dialect", SGLANG)
def test_an_adapter_follows_one_with_a_cancelled_request(house, dialect):
    """0.5.16 never unloads an adapter that a request was cancelled with."""
    from peft import LoraConfig, get_peft_model

    from whetstone.model.policy import Policy

    base = make_policy("smollm")
    model = get_peft_model(base.lm, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    home = house(dialect, 1, policy=Policy(model, base.tokenizer, base.device))
    home.pool.update_weights(0)
    home.servers[0].delay_s = 0.3
    samples = home.pool.generate(REQUESTS, SAMPLING)
    next(samples)
    samples.close()
    for version in (1, 2, 3):
        begun = time.monotonic()
        home.move(version)
        home.pool.update_weights(version)
        assert time.monotonic() - begun < 20
    home.servers[0].delay_s = 0
    home.check()
    assert len(home.servers[0].policies) == 3  # the base, the one left behind, the newest


def test_weights_that_sglang_refuses_end_the_run(house):
    home = house("sglang", 1)
    home.servers[0].fail_push = True
    with pytest.raises(UserError, match=r"refuses the new weights.*no memory left for the new weights"):
        home.pool.update_weights(0)


def test_sglang_gets_room_for_the_longest_completion(house, monkeypatch):
    """It leaves some tokens of its context length empty, and shortens completions in silence."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = ["rollout_engine=sglang", "max_prompt_length=4", "max_completion_length=16"]
    args = COMMANDS["sglang"](load(None, words).config, devices=None, host="127.0.0.1", port=1).args
    monkeypatch.undo()
    home = house("sglang", 1)
    home.pool.update_weights(0)
    wanted = SamplingParams(max_tokens=16, ignore_eos=True)
    home.servers[0].context_length = int(args[args.index("--context-length") + 1])
    assert {len(one.token_ids) for one in home.collect(sampling=wanted).values()} == {16}
    home.servers[0].context_length = 20
    with pytest.raises(UserError, match="HTTP 400"):
        home.collect(sampling=SamplingParams(max_tokens=17))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_changed_buffer_reaches_the_server(tmp_path, house, dialect):
    """The router's bias of GLM-4.5 and DeepSeek V3 is no parameter, and decides which experts are used."""
    policy = tiny_policy("glm4_moe")
    policy.lm.save_pretrained(tmp_path)
    home = house(dialect, 0, policy=policy)
    home.folder = tmp_path
    home.servers.append(home.start())
    home.pool = home.build_pool()
    before = home.expected()
    with torch.no_grad():
        policy.lm.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").copy_(
            torch.tensor([2.0, -2.0, 1.0, -1.0])
        )
    home.pool.update_weights(1)
    home.check()
    assert before[0, 0].logprobs != home.expected()[0, 0].logprobs
    home.move(2)  # and the experts, which transformers joins
    home.pool.update_weights(2)
    home.check()
    with pytest.raises(ValueError, match=r"experts\.down_proj not found"):
        home.servers[0].load_tensors(dict(policy.lm.named_parameters()))


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text"])
def test_a_server_gets_the_tensors_of_a_checkpoint(tmp_path, model_type):
    """transformers joins the experts of a layer in memory; vLLM and SGLang know those of the files."""
    policy = tiny_policy(model_type)
    policy.lm.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(named_weights(policy))
    assert sent.keys() - {"lm_head.weight"} == saved.keys() - {"lm_head.weight"}
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())
