"""A run on clusters: for each number of GPUs the fastest layout that fits, synchronous and one step off.

Layouts are compared by the engine with the longest completion; the best ones are simulated
(simulation.py). The batch stays the same whatever the number of GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.cluster.simulation import (
    Engines,
    Groups,
    Result,
    Stages,
    draw_batches,
    fullest_engine_seconds,
    longest_first,
    simulate,
)
from benchmarks.cluster.stages import (
    ServerLayout,
    exchange_seconds,
    gather_seconds,
    transfer_seconds,
    vllm_engines,
)
from whetstone.config import Config, Plan, make_plan
from whetstone.cost.memory import (
    SLOTS,
    MemoryPlan,
    Setup,
    memory_plan,
    setup_of,
    trained_parameters,
)
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import ModelShape
from whetstone.cost.step import (
    LAYER_S,
    SPLIT_LAYER_S,
    Layout,
    Machine,
    Work,
    cache_seconds,
    prefill_seconds,
    uncached_step,
)
from whetstone.cost.timing import PROMPT_S, ROLLOUT_S, SEQUENCE_S, batch_update_seconds
from whetstone.engines.servers.settings import MAX_SLOTS
from whetstone.errors import UserError

GPU_COUNTS = (1, 8, 16, 64, 256, 1024, 4096)
TP_SIZES = (1, 2, 4, 8)
SHARES = 16  # servers get so many parts of the GPUs: 1/16 to 15/16
SERVER_MEMORY, SERVER_RESERVED = 0.9, 2e9  # share of a GPU's memory; of that, for activations and graphs
NUM_SIMULATED = 3  # layouts for each number of GPUs
MIN_GAIN = 0.1  # of a step's time that one step off, or more GPUs, must save


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, and the GPU that it is for."""

    config: Config
    plan: Plan
    shape: ModelShape
    setup: Setup  # on one GPU
    machine: Machine
    capacity: float
    tokens: float  # mean length of a completion
    batches: Sequence[Groups]
    server_layer_s: float = SPLIT_LAYER_S  # of a decode step, where servers split layers

    @cached_property
    def groups(self) -> Groups:
        """Of a batch, the one with the longest completion first."""
        return longest_first(self.batches[0])

    @cached_property
    def samples(self) -> Groups:
        return longest_first([[length] for group in self.batches[0] for length in group])

    @property
    def sent(self) -> float:
        """Bytes of weights that the engines get after an update."""
        return 2.0 * trained_parameters(self.shape, self.setup)

    @property
    def work(self) -> Work:
        return Work(
            prompts=self.plan.prompts_per_batch,
            group=self.plan.num_generations,
            prompt_tokens=self.setup.prompt_tokens,
            shared_tokens=self.setup.shared_tokens,
            new_tokens=round(self.tokens),
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Ranks and servers of a run, and the stages of its step."""

    layout: Layout
    memory: MemoryPlan
    stages: Stages
    result: Result
    servers: int  # 0: the ranks sample
    server_tp: int

    @property
    def gpus(self) -> int:
        return self.layout.gpus + self.servers * self.server_tp


@dataclass(frozen=True, kw_only=True)
class Row:
    """None: it fits in no layout."""

    gpus: int
    colocated: Placement | None
    one_step_off: Placement | None

    @property
    def is_one_step_off(self) -> bool:
        """Whether one step off saves `MIN_GAIN`; otherwise newer samples are worth more."""
        if self.one_step_off is None or self.colocated is None:
            return self.one_step_off is not None
        return self.one_step_off.result.step_s < (1 - MIN_GAIN) * self.colocated.result.step_s

    @property
    def best(self) -> Placement | None:
        return self.one_step_off if self.is_one_step_off else self.colocated


@dataclass(frozen=True)
class _Option:
    seconds: float  # of a step, by estimate
    layout: Layout
    memory: MemoryPlan
    stages: Stages
    server_tp: int = 0  # 0: the ranks sample


def make_job(
    config: Config,
    shape: ModelShape,
    prompts: Prompts,
    *,
    machine: Machine,
    capacity: float,
    tokens: float | None = None,
) -> Job:
    if config.loss.is_supervised and not config.rollout.rejection_sampling:
        raise UserError("Layouts to sample and update are compared, and a supervised run samples nothing.")
    if config.model.load_in_4bit:
        raise UserError("load_in_4bit is for one GPU: add load_in_4bit=false.")
    plan = make_plan(config, num_problems=prompts.num_problems)
    setup = setup_of(config, plan, prompt_tokens=prompts.tokens, shared_tokens=prompts.shared)
    mean = min(tokens or setup.completion_tokens, setup.completion_tokens)
    batches = draw_batches(
        prompts=plan.prompts_per_batch,
        group=plan.num_generations,
        mean=mean,
        longest=setup.completion_tokens,
        seed=config.run.seed,
    )
    return Job(
        config=config,
        plan=plan,
        shape=shape,
        setup=setup,
        machine=machine,
        capacity=capacity,
        tokens=mean,
        batches=batches,
    )


def scale_rows(job: Job, counts: Sequence[int] = GPU_COUNTS) -> list[Row]:
    return [
        Row(gpus=gpus, colocated=colocated(job, gpus), one_step_off=with_servers(job, gpus))
        for gpus in sorted(set(counts))
    ]


def with_fast_servers(job: Job, rows: Sequence[Row]) -> list[Row]:
    """The same rows, if servers decode split layers as fast as whole ones, which was not measured."""
    fast = replace(job, server_layer_s=LAYER_S)
    return [replace(row, one_step_off=with_servers(fast, row.gpus)) for row in rows]


def colocated(job: Job, gpus: int) -> Placement | None:
    """All GPUs sample, then all update."""
    options: list[_Option] = []
    rollouts: dict[tuple[int, int], float] = {}
    for layout in layouts(job, gpus, TP_SIZES):
        setup = _setup(job, layout, samples_here=True)
        memory = memory_plan(job.shape, setup, job.capacity)
        if not memory.fits:
            continue
        stages = Stages(
            engines=_own_engines(job, layout, setup, memory),
            transfer_s=gather_seconds(job.machine, job.sent, layout),
            exchange_s=exchange_seconds(job.machine, job.work, layout),
            update_s=_update_seconds(job, setup, memory),
        )
        kind = layout.tp, stages.engines.slots
        if kind not in rollouts:
            rollouts[kind] = fullest_engine_seconds(stages.engines, job.groups)
        seconds = rollouts[kind] + stages.transfer_s + stages.exchange_s + stages.update_s
        options.append(_Option(seconds, layout, memory, stages))
    return _fastest(job, options)


def with_servers(job: Job, gpus: int, *, is_ahead: bool = True) -> Placement | None:
    """Servers sample on GPUs of their own, one step off or in turn with the update, in the fastest split."""
    options: list[_Option] = []
    trainers: dict[int, tuple[Layout, MemoryPlan, float] | None] = {}
    for servers, tp in _splits(job, gpus):
        ranks = gpus - servers * tp
        if ranks not in trainers:
            trainers[ranks] = _fastest_trainer(job, ranks)
        trainer = trainers[ranks]
        if trainer is None:
            continue
        layout, memory, update_s = trainer
        stages = Stages(
            engines=vllm_engines(
                job.machine,
                job.shape,
                ServerLayout(gpus=tp, tp=tp, split_layer_s=job.server_layer_s),
                number=servers,
                slots=_server_slots(job, tp),
                prompt_tokens=job.setup.prompt_tokens,
            ),
            transfer_s=transfer_seconds(job.machine, job.sent, layout, servers, tp),
            exchange_s=exchange_seconds(job.machine, job.work, layout),
            update_s=update_s,
            is_colocated=False,
            is_ahead=is_ahead,
        )
        least = stages.transfer_s + update_s
        if options and least > min(option.seconds for option in options):
            continue
        rollout = fullest_engine_seconds(stages.engines, job.samples) + stages.exchange_s
        seconds = stages.transfer_s + max(rollout, update_s) if is_ahead else least + rollout
        options.append(_Option(seconds, layout, memory, stages, server_tp=tp))
    return _fastest(job, options)


def _fastest(job: Job, options: list[_Option]) -> Placement | None:
    """By simulation of the few that are fastest by estimate."""
    placements = [
        Placement(
            layout=option.layout,
            memory=option.memory,
            stages=option.stages,
            result=simulate(option.stages, job.batches),
            servers=option.stages.engines.number if option.server_tp else 0,
            server_tp=option.server_tp,
        )
        for option in sorted(options, key=lambda option: option.seconds)[:NUM_SIMULATED]
    ]
    return min(placements, key=lambda placement: placement.result.step_s, default=None)


def layouts(job: Job, gpus: int, tp_sizes: Sequence[int]) -> Iterator[Layout]:
    """Every tp_size that the model allows, with every number of replicas that divides the ranks."""
    shape = job.shape
    for tp in tp_sizes:
        if gpus % tp or shape.heads % tp or shape.kv_heads % tp or shape.inner % tp:
            continue
        for replicas in _divisors(gpus // tp):
            layout = Layout(gpus=gpus, tp=tp, replicas=replicas)
            if replicas == 1 or _fills_hosts(layout.shards * tp, job.machine.per_host):
                yield layout


def _server_slots(job: Job, tp: int) -> int:
    most = job.config.rollout.max_num_seqs or MAX_SLOTS
    return max(1, min(most, int(_server_room(job, tp) / _cache_of(job, tp, job.tokens))))


def _own_engines(job: Job, layout: Layout, setup: Setup, memory: MemoryPlan) -> Engines:
    """The native engine on every data rank."""
    shared = setup.prompt_tokens / setup.group  # a group has its prompt once
    each = (shared + job.tokens) * job.shape.kv_bytes * setup.bytes_per_number / 2 / layout.tp
    slots = int(memory.rollout["KV cache"] / each)
    prefill = prefill_seconds(job.machine, job.shape, layout, setup.prompt_tokens)
    return Engines(
        number=layout.data,
        slots=max(1, min(setup.num_sequences, slots)),
        step_s=lambda sequences: uncached_step(job.machine, job.shape, layout, sequences),
        cache_token_s=cache_seconds(job.machine, job.shape, layout),
        prompt_tokens=setup.prompt_tokens,
        start_s=ROLLOUT_S,
        prompt_s=PROMPT_S + prefill,
        sequence_s=SEQUENCE_S,
    )


def _fastest_trainer(job: Job, ranks: int) -> tuple[Layout, MemoryPlan, float] | None:
    """Ranks that only train; with servers, `tp_size` must be 1."""
    best: tuple[Layout, MemoryPlan, float] | None = None
    for layout in layouts(job, ranks, (1,)):
        setup = _setup(job, layout, samples_here=False)
        memory = memory_plan(job.shape, setup, job.capacity)
        if memory.fits:
            seconds = _update_seconds(job, setup, memory)
            if best is None or seconds < best[2]:
                best = layout, memory, seconds
    return best


def _splits(job: Job, gpus: int) -> Iterator[tuple[int, int]]:
    """(servers, GPUs of each), such that a server holds the model and the longest completion."""
    for tp in TP_SIZES:
        if job.shape.heads % tp or _server_room(job, tp) < _cache_of(job, tp, job.setup.completion_tokens):
            continue
        numbers = {round(gpus * share / SHARES / tp) for share in range(1, SHARES)}
        numbers |= {2**power for power in range(gpus.bit_length())}
        yield from ((number, tp) for number in sorted(numbers) if 0 < number * tp < gpus)


def _setup(job: Job, layout: Layout, *, samples_here: bool) -> Setup:
    own = -(-job.plan.prompts_per_batch // layout.data) * job.plan.num_generations
    return replace(
        job.setup,
        gpus=layout.gpus,
        tp=layout.tp,
        replicas=layout.replicas,
        num_sequences=min(own, job.config.rollout.max_num_seqs or SLOTS),
        samples_here=samples_here,
    )


def _update_seconds(job: Job, setup: Setup, memory: MemoryPlan) -> float:
    return batch_update_seconds(job.shape, setup, memory, job.machine, job.config, job.plan, job.tokens)


def _server_room(job: Job, tp: int) -> float:
    """Bytes of each GPU for keys and values."""
    share = job.config.engines.server_gpu_memory_utilization or SERVER_MEMORY
    return share * job.capacity - SERVER_RESERVED - 2.0 * job.shape.parameters / tp


def _cache_of(job: Job, tp: int, tokens: float) -> float:
    """Bytes of one sequence on each GPU of a server."""
    return (job.setup.prompt_tokens + tokens) * job.shape.kv_bytes / tp


def _fills_hosts(ranks: int, per_host: int) -> bool:
    return ranks % per_host == 0 or per_host % ranks == 0


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def paying_counts(rows: Sequence[Row]) -> list[int]:
    """Numbers of GPUs at which one step off pays."""
    return [row.gpus for row in rows if row.is_one_step_off]


def most_useful_count(rows: Sequence[Row]) -> int | None:
    """From this number on, all larger ones save less than `MIN_GAIN` of a step."""
    seconds = {row.gpus: row.best.result.step_s for row in rows if row.best is not None}
    for gpus, own in seconds.items():
        if all(later > (1 - MIN_GAIN) * own for other, later in seconds.items() if other > gpus):
            return gpus
    return None
