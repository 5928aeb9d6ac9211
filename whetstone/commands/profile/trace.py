"""A trace of torch's profiler -> seconds by stage and by kind of work.

On a GPU work is kernels and copies, counted for the range (`profile_range`) that started them; on a CPU it is
operators, less the operators inside them. Idle is what is left of a stage.
"""

import bisect
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.update.gradient import PREFIX

IDLE = "idle"
# What a name is taken for: the first pattern that it matches.
_PATTERNS = [
    (kind, re.compile(pattern, re.I))
    for kind, pattern in (
        ("collective", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast_coalesced"),
        ("optimizer", r"adam|multi_tensor|optimi[sz]er"),
        ("attention", r"flash|fmha|attention|attn|scaled_dot_product|sdpa|_merge_kernel"),
        ("matrix products", r"gemm|gemv|cublas|cutlass|nvjet|xmma|wgmma|splitk|triton_tem|matmul"),
        ("matrix products", r"^(aten|mkldnn)::_?(mm|addmm|bmm|baddbmm|linear|mv|addmv|dot)\b"),
        ("drawing tokens", r"_draw_kernel|_chunk_kernel|_cutoff_kernel|multinomial|aten::(sort|topk)\b"),
        ("copies", r"memcpy|memset|copy|^aten::(cat|clone|contiguous|to|fill_|zero_)\b|CatArray"),
        ("copies", r"^aten::_?(index|gather|scatter|embedding)\w*$|index_?select"),
        ("elementwise", r"elementwise|reduce|softmax|norm|triton|vectorized|indexing|_kernel\b"),
        ("other", r"^aten::(empty|view|as_strided|transpose|slice|select|expand|t$|reshape|detach|split)"),
        ("other", r"^aten::(unsqueeze|squeeze|permute|narrow|alias|resolve|item|_local_scalar|result_type)"),
        ("elementwise", r"^aten::"),
    )
]
KINDS = (
    "matrix products", "attention", "elementwise", "drawing tokens", "optimizer", "copies", "collective",
    "other", IDLE,
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A stretch of time, in seconds."""

    name: str
    begin: float
    end: float
    thread: Any = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Work:
    """Something the device did. It counts for the range in which it was started."""

    name: str
    seconds: float
    started_at: float


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Where the time of one profiled step went, in seconds."""

    stages: dict[str, float]  # rollout, update: as the clock on the wall has it
    kinds: dict[str, dict[str, float]]  # stage -> kind -> seconds, what is idle included
    parts: dict[str, float]  # of the update: prepare, forward, head, backward, optimizer, other
    longest: list[tuple[str, str, int, float]]  # kind, name, how often, seconds
    on_gpu: bool


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def read_events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def analyse(events: Iterable[dict[str, Any]], *, num_longest: int = 12) -> TimeBreakdown:
    """The numbers of a trace."""
    whole = [event for event in events if event.get("ph") == "X"]
    marks = [_span(e) for e in whole if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)]
    kernels = [e for e in whole if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        work, busy = _kernels(kernels, whole), [_span(event) for event in kernels]
    else:
        operators = [_span(event) for event in whole if event.get("cat") == "cpu_op"]
        work, busy = _operators(operators), operators
    stages = [mark for mark in marks if not _is_inside_another(mark, marks)]
    parts = [mark for mark in marks if _is_inside_another(mark, marks)]
    stage_at, part_at = _finder(stages), _finder(parts)
    kinds: dict[str, dict[str, float]] = {stage.name: defaultdict(float) for stage in stages}
    by_part: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for item in work:
        stage = stage_at(item.started_at)
        if stage is None:
            continue
        kinds[stage][kind_of(item.name)] += item.seconds
        calls[item.name] += 1
        seconds[item.name] += item.seconds
        if stage == "update":
            by_part[part_at(item.started_at) or "other"] += item.seconds
    walls: dict[str, float] = defaultdict(float)
    for stage in stages:
        kinds[stage.name][IDLE] += max(0.0, stage.seconds - _covered(busy, stage))
        walls[stage.name] += stage.seconds
    names = sorted(seconds, key=lambda name: -seconds[name])[:num_longest]
    return TimeBreakdown(
        stages=dict(walls),
        kinds={stage: dict(by_kind) for stage, by_kind in kinds.items()},
        parts=dict(by_part),
        longest=[(kind_of(name), name, calls[name], seconds[name]) for name in names],
        on_gpu=bool(kernels),
    )


def _span(event: dict[str, Any]) -> Span:
    begin = event["ts"] / 1e6
    thread = (event.get("pid"), event.get("tid"))
    return Span(event["name"].removeprefix(PREFIX), begin, begin + event["dur"] / 1e6, thread)


def _kernels(kernels: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[Work]:
    """A kernel is known to the call that started it by a number that both carry."""
    started = {
        event["args"]["correlation"]: event["ts"] / 1e6
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    calls = [event.get("args", {}).get("correlation") for event in kernels]
    return [
        Work(event["name"], event["dur"] / 1e6, started.get(call, event["ts"] / 1e6))
        for event, call in zip(kernels, calls, strict=True)
    ]


def _operators(operators: list[Span]) -> list[Work]:
    """Each operator's own time: without that of the operators it called."""
    work = []
    by_thread: dict[Any, list[Span]] = defaultdict(list)
    for span in operators:
        by_thread[span.thread].append(span)
    for spans in by_thread.values():
        stack: list[tuple[Span, list[float]]] = []  # with the seconds of operators inside
        for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
            while stack and stack[-1][0].end <= span.begin:
                stack.pop()
            if stack:
                stack[-1][1].append(span.seconds)
            stack.append((span, []))
            work.append(stack[-1])
    return [Work(span.name, max(0.0, span.seconds - sum(inside)), span.begin) for span, inside in work]


def _is_inside_another(mark: Span, marks: Sequence[Span]) -> bool:
    longer = [other for other in marks if other.seconds > mark.seconds]
    return any(other.begin <= mark.begin and mark.end <= other.end for other in longer)


def _finder(marks: list[Span]) -> Any:
    """Time -> the name of the mark that it lies in; marks do not overlap."""
    marks = sorted(marks, key=lambda mark: mark.begin)
    begins = [mark.begin for mark in marks]

    def find(moment: float) -> str | None:
        index = bisect.bisect_right(begins, moment) - 1
        return marks[index].name if index >= 0 and moment < marks[index].end else None

    return find


def _covered(spans: list[Span], stage: Span) -> float:
    """Seconds of `stage` in which at least one of `spans` was under way."""
    total, until = 0.0, stage.begin
    for span in sorted(spans, key=lambda span: span.begin):
        begin, end = max(span.begin, until), min(span.end, stage.end)
        if end > begin:
            total += end - begin
            until = end
    return total
