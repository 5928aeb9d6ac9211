"""Run by tests/support/kernels.py in a process of its own with Triton's interpreter: the GPU kernels, on
the CPU, against plain torch in float64.
"""

from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F

from tests.conftest import ARCHITECTURES, make_policy
from tests.support import triton_interpreter as interpreter  # noqa: F401
from tests.support.quantization import quantize_rows
from whetstone import seeds
from whetstone.engines.base import SamplingParams
from whetstone.engines.native import slot_state
from whetstone.engines.native.cpu import sample_rows
from whetstone.engines.native.decode_step import FusedStep, ModuleStep, make_step
from whetstone.engines.native.decoder_layers import read_decoder_layers
from whetstone.engines.native.fp8 import ScaledTensor
from whetstone.engines.native.gpu import DRY_RUN_TOKENS, PagedEngine
from whetstone.engines.native.kernels import attention as attention_kernels
from whetstone.engines.native.kernels import sample as sample_kernels
from whetstone.engines.native.kernels.attention import decode_attention
from whetstone.engines.native.kernels.pointwise import add_norm, gated
from whetstone.engines.native.prefill import PagedPrefill, PrefillSequence
from whetstone.engines.native.scheduler import History
from whetstone.engines.native.slot_state import PAGE, AttentionLayer, CacheShape, PagedState
from whetstone.model import shared_prefixes
from whetstone.model.adapters import AdapterLinear, AdapterSelection
from whetstone.model.attention import LayerOptions, PackedAttention, packed_segments
from whetstone.model.verification import relative_error, text_tokens

CPU = torch.device("cpu")


def make_state(num_layers=1, heads=2, width=32, slots=4, table=8, tokens=16, pages=24) -> PagedState:
    shape = CacheShape(
        num_layers=num_layers, num_heads=heads, head_dim=width, dtype=torch.float32, device=CPU
    )
    state = PagedState(shape, slots, table, tokens)
    state.allocate_pages(pages)
    state.pages.normal_()
    return state


def attention_with(window=None, softcap=None, programs=1, heads=6, width=32) -> None:
    """Many `programs` wanted makes splits."""
    torch.manual_seed(0)
    state = make_state(width=width, slots=6, pages=36)
    state.table.copy_(torch.randperm(36).view(6, 6).repeat(1, 2)[:, :8])
    state.table[5, :3] = state.table[0, :3]  # slots 0 and 5 share a prompt
    lengths = {0: (130, 70), 5: (130, 1), 1: (0, 0), 2: (64, 63)}  # slot: prompt, own; 3 is not active
    for slot, (prefix, own) in lengths.items():
        state.slots[:, slot] = torch.tensor([1, prefix, own, 0, 9, 0])
    rows = torch.tensor([0, 5, 2, -1, 1, 3, 3], dtype=torch.int32)
    query, key, value = torch.randn(7, heads * width), torch.randn(7, 2 * width), torch.randn(7, 2 * width)
    options = LayerOptions(layer=0, scale=0.3, sliding_window=window, softcap=softcap)
    layer = AttentionLayer(options=options, heads=heads, kv_heads=2, head_dim=width)
    before = state.pages.clone()
    attention_kernels.TARGET_PROGRAMS = programs
    out = decode_attention(query, key, value, state, rows, layer)
    group = heads // 2
    for row, slot in enumerate(rows.tolist()):
        if slot not in lengths:
            continue
        prefix, own = lengths[slot]
        first = -(-prefix // 64)
        places = [(state.table[slot, n // 64], n % 64) for n in range(prefix)]
        places += [(state.table[slot, first + n // 64], n % 64) for n in range(own)]
        for number, new in ((0, key), (1, value)):  # the new token is in the cache now
            page = state.table[slot, first + own // 64]
            assert torch.equal(state.pages[number, 0, page, :, own % 64].flatten(), new[row])
        for head in range(heads):
            cached = [torch.stack([before[n, 0, page, head // group, at] for page, at in places])
                      if places else torch.zeros(0, width) for n in (0, 1)]  # fmt: skip
            own_part = slice(head // group * width, head // group * width + width)
            keys = torch.cat([cached[0], key[row, own_part][None]]).double()
            values = torch.cat([cached[1], value[row, own_part][None]]).double()
            scores = keys @ query[row, head * width : head * width + width].double() * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if window:
                scores[: max(0, len(scores) - window)] = -torch.inf
            expected = scores.softmax(0) @ values
            got = out[row, head * width : head * width + width].double()
            assert torch.allclose(got, expected, atol=2e-5), (slot, head, (got - expected).abs().max())
    changed = {p for p in range(36) if not torch.equal(state.pages[:, 0, p], before[:, 0, p])}
    assert len(changed) == 4, changed  # one page each of the four active slots


def pointwise() -> None:
    torch.manual_seed(0)
    x, residual, weight, post = torch.randn(3, 48), torch.randn(3, 48), torch.rand(48), torch.rand(48)
    for offset in (0.0, 1.0):

        def norm(value, w, offset=offset):
            return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6) * (w + offset)

        for after in (None, post):
            kept = residual.clone()
            out = add_norm(x, kept, weight, after, (1e-6, offset))
            total = residual.double() + (x.double() if after is None else norm(x.double(), post.double()))
            assert torch.allclose(kept.double(), total, atol=1e-5)
            assert torch.allclose(out.double(), norm(total, weight.double()), atol=1e-5)
            kept_too = residual.clone()  # the same, from parts of x
            parts = torch.stack([x - 3, x * 0 + 1, x * 0 + 2])
            assert torch.allclose(add_norm(parts, kept_too, weight, after, (1e-6, offset)), out, atol=1e-5)
            assert torch.allclose(kept_too, kept, atol=1e-5)
    both = torch.randn(3, 2 * 40)
    assert torch.allclose(gated(both, gelu=False), F.silu(both[:, :40]) * both[:, 40:], atol=1e-5)
    expected = F.gelu(both[:, :40], approximate="tanh") * both[:, 40:]
    assert torch.allclose(gated(both, gelu=True), expected, atol=1e-5)


def fp8() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(3, 48).bfloat16(), torch.randn(3, 48).bfloat16()
    weight, both = torch.rand(48).bfloat16(), torch.randn(3, 2 * 40).bfloat16()
    residual[2], x[2] = 0, 0  # a row without anything
    scale_of = torch.tensor([2.0, 0.5, 8.0])  # powers of two: multiplying rounds nothing
    kept, kept_too = residual.clone(), residual.clone()
    plain = add_norm((x * scale_of[:, None]).bfloat16(), kept, weight, None, (1e-6, 0.0)).float()
    rounded = add_norm(ScaledTensor(x, scale_of), kept_too, weight, None, (1e-6, 0.0), fp8=True)
    assert torch.equal(kept, kept_too)
    gates = gated(both * scale_of[:, None].bfloat16(), gelu=False).float()
    for exact, (values, scale) in (
        (plain, rounded),
        (gates, gated(ScaledTensor(both, scale_of), gelu=False)),
    ):
        assert values.dtype == torch.float8_e4m3fn
        assert torch.allclose(scale, quantize_rows(exact).scale, rtol=1e-2)  # bf16 rounds the plain one
        near = float(scale.max()) / 64
        assert torch.allclose(values.float() * scale[:, None], exact, rtol=2**-4 + 2**-8, atol=near)


def eight_bit_step() -> None:
    """A whole step in 8 bits beside the same step as it is, before and after the weights moved."""
    policy = make_policy("qwen2", head_dim=32, hidden_size=128)
    blocks, rows = read_decoder_layers(policy), torch.arange(2, dtype=torch.int32)
    exact, rounded = FusedStep(policy, blocks), FusedStep(policy, blocks, fp8=True)
    state = make_state(num_layers=2, heads=2, width=32, slots=2)

    def logits(step: FusedStep) -> torch.Tensor:
        state.slots.zero_()
        state.slots[slot_state.ACTIVE], state.slots[slot_state.TOKEN] = (
            1,
            torch.tensor([5, 9], dtype=torch.int32),
        )
        with torch.no_grad():
            return step(state, rows)

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a - b).norm() / b.norm()).item()

    before = logits(exact)
    assert 1e-3 < distance(logits(rounded), before) < 0.1, distance(logits(rounded), before)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std())
    after = logits(exact)
    rounded.refresh()
    assert distance(after, before) > 0.3
    assert distance(logits(rounded), after) < 0.1, distance(logits(rounded), after)


def drawing(dtype=torch.float32, **settings) -> None:
    draw([SamplingParams(max_tokens=16, **settings)] * 3, dtype)


def draw(params: list[SamplingParams], dtype=torch.float32) -> None:
    """Slots with parameters of their own."""
    torch.manual_seed(1)
    num = len(params)
    state = make_state(slots=num)
    logits = (torch.randn(num, 400) * 3).to(dtype)
    logits[-1, 200:] = -torch.inf  # whole chunks without mass
    rows = torch.arange(num, dtype=torch.int32)
    state.slots[slot_state.ACTIVE], state.slots[slot_state.MAX_NEW] = 1, 16
    drawn = torch.arange(num) % 7
    state.slots[slot_state.NUM_GENERATED] = drawn
    state.seeds.copy_(torch.tensor([seeds.seed(0, n) for n in range(num)]))
    state.settings.copy_(torch.tensor([slot_state.slot_settings(sampling) for sampling in params]).t())
    greedy = any(sampling.is_greedy for sampling in params)
    filtered = any(bool(p.top_k) or p.top_p < 1 or p.min_p > 0 for p in params)
    sample_kernels.CHUNK = 128
    sample_kernels.sample(logits, state, rows, greedy=greedy, filtered=filtered)
    uniform = [seeds.uniforms(seeds.seed(0, n), int(drawn[n]), 1)[0] for n in range(num)]
    tokens, logprobs = sample_rows(logits, torch.tensor(uniform, dtype=torch.float32), params)
    place = torch.arange(num)
    ours = state.out_tokens[place, drawn].long()
    assert torch.equal(ours, tokens), (ours, tokens)
    assert torch.allclose(state.out_logprobs[place, drawn], logprobs, atol=1e-4)
    assert torch.equal(state.slots[slot_state.NUM_GENERATED], (drawn + 1).int())
    assert torch.equal(state.slots[slot_state.TOKEN].long(), ours)


def endings() -> None:
    """A stop token, the limit, and rows that are not there."""
    state = make_state(slots=4)
    logits = torch.full((4, 50), -9.0)
    logits[torch.arange(4), torch.tensor([7, 8, 7, 8])] = 9.0
    state.slots[slot_state.ACTIVE] = torch.tensor([1, 1, 1, 0])
    state.slots[slot_state.MAX_NEW], state.slots[slot_state.NUM_GENERATED] = 5, torch.tensor([0, 4, 0, 2])
    state.stops[0] = 7
    state.settings[slot_state.USES_STOPS] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    sample_kernels.sample(
        logits, state, torch.tensor([0, 1, -1, 3], dtype=torch.int32), greedy=True, filtered=False
    )
    assert state.slots[slot_state.ACTIVE].tolist() == [0, 0, 1, 0]
    assert state.slots[slot_state.NUM_GENERATED].tolist() == [1, 5, 0, 2]
    assert state.out_tokens[0, 0] == 7 and state.out_tokens[1, 4] == 8
    third = torch.tensor([2], dtype=torch.int32)  # it ignores stop tokens
    sample_kernels.sample(logits[2:3], state, third, greedy=True, filtered=False)
    assert state.slots[slot_state.ACTIVE, 2] == 1 and state.slots[slot_state.NUM_GENERATED, 2] == 1


def whole_step(architecture: str) -> None:
    """Prefill and one decode step, fused and by modules, beside the model's own pass over all tokens."""
    policy = make_policy(architecture, head_dim=32, hidden_size=128)
    state = make_state(num_layers=policy.config.num_hidden_layers, heads=2, width=32)
    prompts = [(5, 9, 33, 8, 17), (7, 3, 41, 60, 61, 62, 13, 20, 21, 22, 23)]
    blocks = read_decoder_layers(policy)
    steps = [FusedStep(policy, blocks), ModuleStep(policy)]
    with torch.no_grad():
        for step in steps:
            state.pages.normal_()
            sequences = []
            for slot, prompt in enumerate(prompts):
                state.slots[:, slot] = torch.tensor([1, len(prompt) - 1, 0, 0, 4, prompt[-1]])
                state.table[slot, :2] = torch.tensor([2 * slot, 2 * slot + 1])
                sequences.append(PrefillSequence(prompt[:-1], [2 * slot], [], []))
            step.prefill(PagedPrefill(state, sequences))
            logits = step(state, torch.tensor([1, -1, 0], dtype=torch.int32))
            for row, prompt in ((0, prompts[1]), (2, prompts[0])):
                attend = PackedAttention(packed_segments([len(prompt)]), CPU)
                hidden = policy.hidden(torch.tensor([prompt]), torch.arange(len(prompt))[None], attend)
                expected = policy.head(hidden[0, -1])
                error = (logits[row] - expected).abs().max() / expected.abs().max()
                assert error < 1e-4, (architecture, type(step).__name__, error)


def dry_run() -> None:
    """The fused step is accepted, and its logits are those of the model on the texts."""
    policy = make_policy("smollm3", head_dim=32, hidden_size=128)
    engine = PagedEngine.__new__(PagedEngine)  # its constructor makes a CUDA stream
    engine.policy, engine.adapters = policy, None
    engine._state = make_state(num_layers=4, heads=2, width=32)
    engine.shape = engine.state.shape
    step = make_step(policy, engine._dry_run)
    assert isinstance(step, FusedStep)
    with torch.no_grad():
        logits = engine._dry_run(step)
        policy.set_attention("eager")
        texts = text_tokens(policy.tokenizer, policy.config.vocab_size, policy.max_length)
        for row, text, length in zip(logits, texts, DRY_RUN_TOKENS, strict=False):
            expected = policy.lm(input_ids=text[None, :length], use_cache=False).logits[0, -1]
            assert relative_error(row, expected) < 1e-4
    assert len(logits) == len(DRY_RUN_TOKENS)


def next_turns() -> None:
    """Sequences that go on where others ended, beside the same tokens computed at once by the modules.

    Keys and values of the second layer depend on what the first has read of the history. The modules write
    the longest history, which the interpreter would take seconds for; a step writes the other one itself.
    """
    policy = make_policy("qwen2", head_dim=32, hidden_size=128, max_position_embeddings=256)
    state = make_state(num_layers=2, heads=2, width=32, pages=27)
    modules = ModuleStep(policy)
    generator = torch.Generator().manual_seed(4)
    whole = [tuple(torch.randint(3, 60, (n,), generator=generator).tolist()) for n in (90, 24, 12)]
    splits = [(70, 10), (18, 3), None]  # tokens in the prompt's pages, and after it in a page of its own
    with torch.no_grad():
        for step in (FusedStep(policy, read_decoder_layers(policy)), modules):
            state.pages.normal_()
            first, second, together = [], [], []
            for number, (tokens, split) in enumerate(zip(whole, splits, strict=True)):
                old, new, at_once = (list(range(n + 3 * number, n + 3 * number + 3)) for n in (0, 9, 18))
                history = None
                if split is not None:
                    prompt, generated = tokens[: split[0]], list(tokens[split[0] : sum(split)])
                    first.append(PrefillSequence(prompt, old[:2], generated, old[2:]))
                    history = History(old[:2], split[0], old[2:], split[1])
                second.append(PrefillSequence(tokens, new, [], [], 0, history))
                together.append(PrefillSequence(tokens, at_once, [], []))
            runs = ((modules, first[:1]), (step, first[1:]), (step, second), (modules, together))
            for runner, batch in runs:
                runner.prefill(PagedPrefill(state, batch))
            assert [len(sequence) for sequence in second] == [10, 3, 12]
            for ours, theirs in zip(second, together, strict=True):
                a, b = (torch.from_numpy(sequence.cells()) for sequence in (ours, theirs))
                ours_kv, theirs_kv = (state.pages[:, :, c // PAGE, :, c % PAGE] for c in (a, b))
                error = (ours_kv - theirs_kv).abs().max() / theirs_kv.abs().max()
                assert error < 1e-5, (type(step).__name__, error)


def common_prefixes() -> None:
    """Pages after prompts that share prefixes, beside those of each prompt alone, by the modules. Short
    prefixes for the fused step: the interpreter takes a tenth of a second for a token.
    """
    policy = make_policy("qwen2", head_dim=32, hidden_size=128, max_position_embeddings=256)
    state = make_state(num_layers=2, heads=2, width=32, pages=32)
    modules, fused = ModuleStep(policy), FusedStep(policy, read_decoder_layers(policy))
    with torch.no_grad(), mock.patch.multiple(shared_prefixes, MIN_PREFIX=8, PREFIX_STEP=1):
        for step, length in ((fused, 9), (modules, PAGE + 2)):
            generator = torch.Generator().manual_seed(5)
            ids = [tuple(torch.randint(3, 60, (length,), generator=generator).tolist()) for _ in range(2)]
            start, other = ids
            # The third repeats the first, and the last was preempted: only what is behind its prompt is new.
            prompts = [(*start, 5, 6), (*other, 9), (*start, 5, 6), (*start, 7), (*other, 9, 4, 8), (8, 9)]
            state.pages.normal_()
            together = [PrefillSequence(p, [2 * n, 2 * n + 1], [], []) for n, p in enumerate(prompts)]
            together.append(PrefillSequence(start, [], [7, 9], [12]))
            packed = PagedPrefill(state, together)
            assert sorted(packed.lengths) == sorted([length + 2, length + 1, 1, 1, 2, 2, length + 2])
            step.prefill(packed)
            for sequence in together:
                alone = replace(sequence, prompt_pages=[13, 14], generated_pages=[15])
                modules.prefill(PagedPrefill(state, [alone]))
                ours, theirs = (torch.from_numpy(one.cells()) for one in (sequence, alone))
                ours, theirs = ours[ours >= 0], theirs[ours >= 0]
                ours_kv, theirs_kv = (state.pages[:, :, c // PAGE, :, c % PAGE] for c in (ours, theirs))
                error = (ours_kv - theirs_kv).abs().max() / theirs_kv.abs().max()
                assert error < 1e-5, (type(step).__name__, error)


def adapters_by_row() -> None:
    """Rows with adapters of their own, fused and by modules, beside the packed pass of the modules."""
    policy = make_policy("qwen2", head_dim=32, hidden_size=128)
    selection = AdapterSelection(("first", "second"))
    torch.manual_seed(2)
    for layer in policy.trunk.layers:
        for parent, name in (
            (layer.self_attn, "q_proj"),
            (layer.self_attn, "v_proj"),
            (layer.mlp, "down_proj"),
        ):
            base = getattr(parent, name)
            ranks = {1: 4, 2: 2} if name != "v_proj" else {2: 3}
            factors = {
                number: (torch.randn(rank, base.in_features), torch.randn(base.out_features, rank) / 8)
                for number, rank in ranks.items()
            }
            setattr(parent, name, AdapterLinear(base, factors, selection))
    state = make_state(num_layers=2, heads=2, width=32)
    prompt, chosen = (7, 3, 41, 60, 61, 62, 13, 20), (1, 0, 2)
    state.adapters[:3] = torch.tensor(chosen)
    logits = {}
    with torch.no_grad():
        for step in (FusedStep(policy, read_decoder_layers(policy)), ModuleStep(policy)):
            state.pages.normal_()
            sequences = []
            for slot, adapter in enumerate(chosen):
                state.slots[:, slot] = torch.tensor([1, len(prompt) - 1, 0, 0, 4, prompt[-1]])
                state.table[slot, :2] = torch.tensor([2 * slot, 2 * slot + 1])
                sequences.append(PrefillSequence(prompt[:-1], [2 * slot], [], [], adapter))
            step.prefill(PagedPrefill(state, sequences))
            logits[type(step).__name__] = step(state, torch.tensor([0, 1, 2], dtype=torch.int32))
        for row, adapter in enumerate(chosen):
            attend = PackedAttention(packed_segments([len(prompt)]), CPU)
            with selection.rows(torch.full((1, len(prompt)), adapter)):
                hidden = policy.hidden(torch.tensor([prompt]), torch.arange(len(prompt))[None], attend)
            expected = policy.head(hidden[0, -1])
            for name, own in logits.items():
                error = (own[row] - expected).abs().max() / expected.abs().max()
                assert error < 1e-4, (name, adapter, error)
    assert (logits["FusedStep"][0] - logits["FusedStep"][1]).abs().max() > 0.1


MIXED = [
    SamplingParams(max_tokens=16, temperature=0.0, top_k=3),
    SamplingParams(max_tokens=16, temperature=1.3, min_p=0.05, top_p=0.9),
    SamplingParams(max_tokens=16, temperature=0.7),
    SamplingParams(max_tokens=16, temperature=0.9, top_k=20),
]
CASES = {
    "attention": attention_with,
    "attention in splits": lambda: attention_with(programs=256),
    "attention in splits of a window": lambda: attention_with(programs=256, window=70),
    "attention with a softcap": lambda: attention_with(softcap=2.0),
    "attention of heads that are no power of two": lambda: attention_with(width=48),
    "norm and gate": pointwise,
    "norm and gate in 8 bits": fp8,
    "a step in 8 bits": eight_bit_step,
    "the next turns of conversations": next_turns,
    "drawing": drawing,
    "drawing greedily": lambda: drawing(temperature=0.0),
    "drawing greedily, filters ignored": lambda: drawing(temperature=0.0, top_p=0.3, top_k=5, min_p=0.1),
    "drawing from the top k": lambda: drawing(temperature=0.6, top_k=20),
    "drawing from the top p of bf16": lambda: drawing(dtype=torch.bfloat16, top_p=0.8),
    "drawing through all filters": lambda: drawing(temperature=1.3, min_p=0.05, top_k=200, top_p=0.9),
    "drawing with parameters of each row": lambda: draw(MIXED),
    "adapters of each row": adapters_by_row,
    "common prefixes of prompts": common_prefixes,
    "dry run": dry_run,
    "endings": endings,
    **{f"a step of {name}": lambda name=name: whole_step(name) for name in ("qwen3", "gemma2")},
}

MORE = {
    "attention in a window": lambda: attention_with(window=70),
    **{f"a step of {name}": lambda name=name: whole_step(name) for name in ARCHITECTURES},
}
