"""The native engine on a GPU: prefill into pages, decode by captured graphs, a few tokens at a time.

A round is a handful of graph replays; while it runs, the host reads how the round before it ended, hands out
what is finished and seats who waits. So the host waits for the device at most once a round, and the device
hardly ever for the host. Who sits where is pages.py, one step of the model is fused.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.engines.base import Request, Sampled, Sampling
from whetstone.engines.native import slot_state
from whetstone.engines.native.cuda_graphs import Graphs
from whetstone.engines.native.decode_step import Step, make_step
from whetstone.engines.native.prefill import PagedPrefill, Sequence
from whetstone.engines.native.scheduler import Seats, num_pages
from whetstone.engines.native.slot_state import MAX_STOPS, PAGE, CacheShape, PagedState
from whetstone.errors import UserError
from whetstone.model.memory import free_memory, upload
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish

ROUND = 4  # tokens between two looks at the device
READ_AHEAD = 64  # tokens that are read together, before their sample is finished
PREFILL_TOKENS = 32768
MEMORY_SHARE = 0.85  # of what is free that the pages may take
REHEARSAL_PAGES = 4
KEPT_FREE = 1 << 30  # bytes for graphs and products, beside the logits


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """A round on its way: what the fields will be after it."""

    fields: Tensor  # pinned: those up to DRAWN
    landed: torch.cuda.Event
    admitted: int  # samples seated by then: whoever came later is not in it


class PagedEngine:
    def __init__(self, policy: Policy, shape: CacheShape, max_slots: int, *, eight_bits: bool = False):
        self.policy, self.shape, self.max_slots, self.eight_bits = policy, shape, max_slots, eight_bits
        self.policy_version = 0
        self.state: PagedState | None = None
        self.step: Step | None = None
        self.graphs: Graphs | None = None
        self.is_stale = False  # whether the policy moved on since copies of its weights were made
        self.side = torch.cuda.Stream(shape.device)  # reads results while the next round runs

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Sampled]:
        if self.policy.model.training:  # asking takes no time, telling every module two milliseconds
            self.policy.model.eval()
        seats = self._prepare(requests, sampling)
        stops = set() if sampling.ignore_stop else set(self.policy.stop_token_ids)
        flight: _Flight | None = None
        while seats.is_busy:
            self._admit(seats)
            launched = self._launch(seats, sampling)
            if flight is not None:
                yield from self._land(seats, flight, stops)
            elif launched is None and not seats.drop_idle_prompts():
                self._send_back(seats, seats.youngest())
            flight = launched

    # ---- one round ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _admit(self, seats: Seats) -> None:
        """Fill free slots; prompts that are new, and what a sample had drawn before, are prefilled."""
        assert self.state is not None and self.step is not None
        slots, new_prompts = seats.admit(PREFILL_TOKENS)
        if not slots:
            return
        sequences = [
            Sequence(seats.requests[request].prompt_ids[:-1], seats.prompt_pages(request), [], [])
            for request in new_prompts
        ]
        for slot in slots:
            one = seats.seated[slot]
            if one.waiting.tokens:
                prompt = seats.requests[one.request].prompt_ids
                fed = [prompt[-1], *one.waiting.tokens[:-1]]
                sequences.append(Sequence(prompt[:-1], [], fed, one.pages))
        self._prefill(self.step, [sequence for sequence in sequences if len(sequence)])
        # The rest is written while that runs. Lists, and one tensor of each: a tensor that is filled entry by
        # entry takes milliseconds.
        columns: list[list[int]] = []
        tables: list[list[int]] = []
        seeds: list[int] = []
        width = self.state.table.shape[1]
        for slot in slots:
            one = seats.seated[slot]
            request, drawn = seats.requests[one.request], one.waiting.tokens
            pages = [*seats.prompt_pages(one.request), *one.pages]
            tables.append([*pages, *[0] * (width - len(pages))])
            seeds.append(request.seeds[one.waiting.sample])
            column = [0] * slot_state.NUM_FIELDS
            column[slot_state.ACTIVE] = 1
            column[slot_state.PREFIX] = len(request.prompt_ids) - 1
            column[slot_state.OWN] = column[slot_state.DRAWN] = len(drawn)
            column[slot_state.LIMIT] = one.waiting.limit
            column[slot_state.TOKEN] = drawn[-1] if drawn else request.prompt_ids[-1]
            columns.append(column)
        where = self._upload(torch.tensor(slots))
        self.state.fields[:, where] = self._upload(torch.tensor(columns, dtype=torch.int32).t().contiguous())
        self.state.table[where] = self._upload(torch.tensor(tables, dtype=torch.int32))
        self.state.seeds[where] = self._upload(torch.tensor(seeds))

    def _prefill(self, step: Step, sequences: list[Sequence]) -> None:
        assert self.state is not None
        batch: list[Sequence] = []
        for sequence in [*sequences, None]:
            full = batch and (sequence is None or sum(map(len, [*batch, sequence])) > PREFILL_TOKENS)
            if full:
                step.prefill(PagedPrefill(self.state, batch))
                batch = []
            if sequence is not None:
                batch.append(sequence)

    @torch.no_grad()
    def _launch(self, seats: Seats, sampling: Sampling) -> _Flight | None:
        """Start a round for everyone who may still draw; None if there are not enough pages for it."""
        assert self.state is not None and self.graphs is not None
        reserved = seats.reserve(ROUND)
        if reserved is None:
            return None
        steps, slots, grown = reserved
        if grown:
            slot, number, page = self._upload(torch.tensor(grown)).unbind(1)
            prompts = (self.state.fields[slot_state.PREFIX][slot] + PAGE - 1) // PAGE
            self.state.table[slot, prompts + number] = page.int()
        if slots:
            mode = (sampling.temperature == 0, _is_filtered(sampling))
            graph, bucket = self.graphs.of(len(slots), mode)
            rows = torch.full((bucket,), -1, dtype=torch.int32)
            rows[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
            self.state.rows[:bucket] = self._upload(rows)
            for _ in range(steps):
                graph.replay()
        fields = torch.empty(slot_state.DRAWN + 1, self.state.num_slots, dtype=torch.int32, pin_memory=True)
        fields.copy_(self.state.fields[: slot_state.DRAWN + 1], non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return _Flight(fields=fields, landed=landed, admitted=seats.admitted)

    def _land(self, seats: Seats, flight: _Flight, stops: set[int]) -> Iterator[Sampled]:
        """Hand out the samples that were finished when this round ended."""
        flight.landed.synchronize()
        active, drawn = (flight.fields[number].tolist() for number in (slot_state.ACTIVE, slot_state.DRAWN))
        done = [
            slot for slot, one in seats.seated.items() if one.order < flight.admitted and not active[slot]
        ]
        if not done:
            return self._read_ahead(seats, drawn, flight.admitted)
        first = min(len(seats.seated[slot].waiting.tokens) for slot in done)
        tokens, logprobs = self._read(done, first, max(drawn[slot] for slot in done))
        for place, slot in enumerate(done):
            one = seats.leave(slot)
            ids, known_logprobs = one.waiting.tokens, one.waiting.logprobs
            new = slice(len(ids) - first, drawn[slot] - first)
            ids += tokens[place][new]
            known_logprobs += logprobs[place][new]
            completion = Completion(
                token_ids=tuple(ids),
                logprobs=tuple(known_logprobs),
                finish=Finish.STOP if ids[-1] in stops else Finish.LENGTH,
                policy_version=self.policy_version,
            )
            yield Sampled(request=one.request, sample=one.waiting.sample, completion=completion)

    def _read_ahead(self, seats: Seats, drawn: list[int], admitted: int) -> None:
        """What samples have drawn so far, while nobody is finished: they often end all at once, and everybody
        would wait for the host to read everything. When the last round runs, all there is.
        """
        is_last = not seats.waiting and not any(one.remaining for one in seats.seated.values())
        behind: dict[tuple[int, int], list[int]] = {}  # by how many tokens of a slot are known, and will be
        for slot, one in seats.seated.items():
            known = len(one.waiting.tokens)
            new = drawn[slot] - known
            if one.order < admitted and (new >= READ_AHEAD or (is_last and new)):
                upto = drawn[slot] if is_last else known + READ_AHEAD
                behind.setdefault((known, upto), []).append(slot)
        for (known, upto), slots in behind.items():
            tokens, logprobs = self._read(slots, known, upto)
            for place, slot in enumerate(slots):
                seats.seated[slot].waiting.tokens += tokens[place]
                seats.seated[slot].waiting.logprobs += logprobs[place]

    def _read(self, slots: list[int], start: int, stop: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens `start` to `stop` of these slots, read beside the running round (which no longer writes
        there).
        """
        assert self.state is not None
        with torch.cuda.stream(self.side), torch.no_grad():
            where = torch.tensor(slots, device=self.shape.device)
            tokens = self.state.out_tokens[where, start:stop].cpu()
            logprobs = self.state.out_logprobs[0][where, start:stop].cpu()
        return tokens.numpy().tolist(), logprobs.numpy().tolist()  # numpy's is the faster one

    def _send_back(self, seats: Seats, slot: int) -> None:
        """Free the pages of a sample that is not finished. Nothing is in flight when this is called."""
        assert self.state is not None
        torch.cuda.synchronize(self.shape.device)
        one = seats.seated[slot]
        known = len(one.waiting.tokens)
        count = int(self.state.fields[slot_state.DRAWN, slot])
        tokens, logprobs = self._read([slot], known, count)
        seats.send_back(slot, [*one.waiting.tokens, *tokens[0]], [*one.waiting.logprobs, *logprobs[0]])

    # ---- preparation --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _prepare(self, requests: list[Request], sampling: Sampling) -> Seats:
        """State, pages, the model's step and settings for these requests."""
        longest = max(len(request.prompt_ids) for request in requests)
        samples = sum(len(request.seeds) for request in requests)
        num_slots = min(self.max_slots, samples)
        width = num_pages(longest) + num_pages(sampling.max_tokens) + 1
        state = self.state
        if (
            state is None
            or state.num_slots < num_slots
            or state.table.shape[1] < width
            or state.max_tokens < sampling.max_tokens
        ):
            self.close()
            state = self.state = PagedState(self.shape, num_slots, width, sampling.max_tokens)
        own = num_pages(sampling.max_tokens)
        prompts = sum(num_pages(len(request.prompt_ids) - 1) for request in requests)
        self._prepare_pages(wanted=prompts + num_slots * own, least=num_pages(longest) + own)
        if self.step is not None and not self.step.is_current():
            self.step = self.graphs = None
        if self.step is None:
            self.step = make_step(self.policy, state, self._rehearse, eight_bits=self.eight_bits)
            self.graphs = Graphs(self.step, state)
        elif self.is_stale:
            self.step.refresh()
        self.is_stale = False
        self._settings(sampling)
        return Seats(requests, sampling, num_slots=num_slots, total_pages=state.num_pages)

    def _prepare_pages(self, *, wanted: int, least: int) -> None:
        """As many pages as the work could use and the memory allows."""
        state, device = self.state, self.shape.device
        assert state is not None
        if state.num_pages >= wanted:
            return
        state.release_pages()
        size = self.shape.bytes_per_token() * PAGE
        free = free_memory(device)
        logits = 8 * self.policy.config.vocab_size * state.num_slots
        copies = 0
        if self.eight_bits and self.step is None:  # made after the pages, and no more than this
            copies = sum(parameter.numel() for parameter in self.policy.trunk.layers.parameters())
        fitting = int(max(0, free - KEPT_FREE - logits - copies) * MEMORY_SHARE) // size
        if fitting < least:
            raise UserError(
                f"Not even one sequence of {least * PAGE} tokens fits into the {free / 1e9:.1f} GB of GPU "
                "memory that are free: lower max_completion_length, or choose a smaller model."
            )
        state.allocate_pages(max(least, REHEARSAL_PAGES, min(wanted, fitting)))

    def _rehearse(self, step: Step) -> Tensor:
        """Logits of one token after two short sequences, to compare ways of running the model by."""
        state = self.state
        assert state is not None
        ids = tuple(range(3, 3 + 9))
        lengths = (9, 5)[: state.num_slots]
        for slot, length in enumerate(lengths):
            state.fields[:, slot] = torch.tensor([1, length, 0, 0, 1, 7], dtype=torch.int32)
            state.table[slot, :2] = torch.tensor([2 * slot, 2 * slot + 1], dtype=torch.int32)
        self._prefill(step, [Sequence(ids[:n], [2 * slot], [], []) for slot, n in enumerate(lengths)])
        return step(state, torch.arange(len(lengths), dtype=torch.int32, device=self.shape.device))

    def _settings(self, sampling: Sampling) -> None:
        state = self.state
        assert state is not None
        numbers = torch.zeros(4)
        numbers[slot_state.TEMPERATURE] = sampling.temperature
        numbers[slot_state.TOP_P], numbers[slot_state.MIN_P] = sampling.top_p, sampling.min_p
        numbers[slot_state.TOP_K] = sampling.top_k
        stops = [] if sampling.ignore_stop else list(self.policy.stop_token_ids)
        assert len(stops) <= MAX_STOPS
        state.settings.copy_(numbers)
        state.stops.copy_(torch.tensor([*stops, *[-1] * (MAX_STOPS - len(stops))]))
        state.fields.zero_()

    def _upload(self, values: Tensor) -> Tensor:
        return upload(values, self.shape.device)

    # ---- the engine's other verbs -------------------------------------------------------------------------

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self.is_stale = True

    def sleep(self) -> None:
        if self.state is not None:
            self.state.release_pages()

    def wake(self) -> None: ...

    def close(self) -> None:
        self.state = self.step = self.graphs = None


def _is_filtered(sampling: Sampling) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0
