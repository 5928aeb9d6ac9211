"""One engine on its works, in a process of its own: called by rollout.py, prints a JSON row per work.

    python benchmarks/rollout_contenders.py vllm 1.5b '[[256, "full", 512]]'

Each is warmed up with a short round of the same batch first; set-up seconds (loading aside) are in the row.
vLLM gets one process for its engine, async scheduling, prefix caching, CUDA graphs up to the largest batch,
`ignore_eos` and `max_tokens` (no `min_tokens`), flat logprobs of the sampled token only, no detokenising.
"""

import atexit
import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from random_model import make_tokenizer
from rollout_work import VOCABULARY, Work, model_config

WARM_TOKENS = 24
SERVED = ("vllm", "sglang")  # set up before the first round, in a process of their own
REPEATS = 2  # for everyone; the best counts


def timed(run: Callable[[Work], int], work: Work) -> dict:
    tokens = sum(work.lengths())
    best = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        made = run(work)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
        assert made == tokens, (made, tokens)
    return {"seconds": round(best, 3), "tokens_per_s": round(tokens / best), "repeats": REPEATS}


def make_policy(size: str):
    from transformers import AutoModelForCausalLM

    from whetstone.model.policy import Policy

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(model_config(size), dtype=torch.bfloat16)
    return Policy(model, make_tokenizer(VOCABULARY), torch.device("cuda"))


def through_engine(engine: Any, work: Work) -> int:
    from whetstone.engines.base import Request, SamplingParams

    lengths, group = work.lengths(), work.group
    requests = [
        Request(
            prompt_ids=tuple(prompt),
            seeds=tuple(range(group * n, group * n + group)),
            max_tokens=tuple(lengths[group * n : group * n + group]),
        )
        for n, prompt in enumerate(work.prompts())
    ]
    sampling = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True)
    return sum(len(one.completion.token_ids) for one in engine.generate(requests, sampling))


def native(size: str, *, fp8: bool = False) -> Callable[[Work], int]:
    from whetstone.engines.native import NativeEngine

    engine = NativeEngine(make_policy(size), fp8=fp8)

    return functools.partial(through_engine, engine)


def generate(size: str) -> Callable[[Work], int]:
    """`model.generate` on one padded batch, tokens only."""
    policy = make_policy(size)
    policy.set_attention("sdpa")

    def run(work: Work) -> int:
        prompts = [prompt for prompt in work.prompts() for _ in range(work.group)]
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device="cuda")
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device="cuda")
        settings = {"do_sample": True, "top_k": 0, "eos_token_id": [-1], "pad_token_id": 0}
        with torch.inference_mode():
            out = policy.lm.generate(tokens, attention_mask=mask, max_new_tokens=work.new_tokens, **settings)
        return (out.shape[1] - width) * len(prompts)

    return run


def continuous(size: str) -> Callable[[Work], int]:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    policy = make_policy(size)
    policy.set_attention("sdpa")

    def run(work: Work) -> int:
        prompts = [prompt for prompt in work.prompts() for _ in range(work.group)]
        settings = GenerationConfig(
            max_new_tokens=work.new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        done = policy.lm.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        return sum(len(one.generated_tokens) for one in done.values())

    return run


def vllm(size: str, **more: Any) -> Callable[..., int]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    folder = tempfile.mkdtemp()
    model_config(size).save_pretrained(folder)
    graphs = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=16_640,
        max_num_seqs=1024,
        max_num_batched_tokens=16_384,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=True,
        async_scheduling=True,
        compilation_config={"cudagraph_capture_sizes": graphs},
        **more,
    )

    def run(work: Work, logprobs: bool = True) -> int:
        prompts = [{"prompt_token_ids": p} for p in work.prompts() for _ in range(work.group)]
        settings = [
            SamplingParams(
                temperature=1.0,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0 if logprobs else None,
                flat_logprobs=logprobs,
                detokenize=False,
            )
            for length in work.lengths()
        ]
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def sglang(size: str) -> Callable[[Work], int]:
    """Its server, through the run's own client: a request for each sequence, with logprobs.

    SGLANG_PYTHON names the interpreter that has it, SGLANG_ARGS more of its arguments.
    """
    from whetstone.config import load
    from whetstone.engines import make_engine

    policy, folder = make_policy(size), tempfile.mkdtemp()
    policy.lm.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    flags = ["--max-prefill-tokens", "16384", *os.environ.get("SGLANG_ARGS", "").split()]
    words = [
        "rollout_engine=sglang",
        f"model_name_or_path={folder}",
        "bf16=true",
        "max_num_seqs=1024",
        "server_max_model_length=16640",
        "server_gpu_memory_utilization=0.8",
        "server_timeout_s=900",
        f"output_dir={folder}",
        f"server_args={json.dumps(flags)}",
    ]
    if python := os.environ.get("SGLANG_PYTHON"):
        words.append(f"server_python={python}")
    engine: Any = make_engine(load(None, words).config, policy)
    atexit.register(engine.close)
    engine.update_weights(0)

    def run(work: Work) -> int:
        engine.handles[0].server.http.post(
            "/flush_cache?timeout=30", {}
        )  # prompts are not cached for anybody
        return through_engine(engine, work)

    return run


CONTENDERS = {
    "native": native,
    "native fp8": functools.partial(native, fp8=True),
    "generate": generate,
    "continuous batching": continuous,
    "vllm": vllm,
    "sglang": sglang,
    "vllm fp8": functools.partial(vllm, quantization="fp8"),
}


def main() -> None:
    who, size, works = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    logging.disable(logging.INFO)
    begun = time.perf_counter()
    run = CONTENDERS[who](size)
    loaded = time.perf_counter() - begun
    for number, shape, new_tokens in works:
        work = Work(size, number, shape, new_tokens)
        begun = time.perf_counter()
        run(Work(size, number, "long" if shape == "long" else "full", WARM_TOKENS))
        warm = time.perf_counter() - begun
        # Loading is set-up for servers (they compile and capture there); ours captures in the first round.
        setup = loaded + warm if who.startswith(SERVED) else warm
        ways: dict[str, Callable[[Work], int]] = {who: run}
        if who == "vllm":
            ways["vllm without logprobs"] = functools.partial(run, logprobs=False)
        for name, way in ways.items():
            torch.cuda.reset_peak_memory_stats()
            row = {"who": name, **work.row(), **timed(way, work)}
            row |= {"peak_gb": round(peak_gb(who), 1), "setup_s": round(setup, 1)}
            if new_tokens != 512:
                row["new_tokens"] = new_tokens
            print("ROW " + json.dumps(row), flush=True)


def peak_gb(who: str) -> float:
    """vLLM and SGLang take their share of the card at the start, in another process: what is taken counts."""
    if who.startswith(SERVED):
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e9
    return torch.cuda.max_memory_allocated() / 1e9


if __name__ == "__main__":
    main()
