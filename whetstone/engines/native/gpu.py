"""The native engine on a GPU: prefill into a paged KV cache, decode with CUDA graphs.

A round is a few graph replays. While it runs, the host reads the results of the round before, yields finished
samples and admits waiting ones. The host waits for the GPU at most once a round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.engines.base import (
    GenerationOutput,
    PartialOutput,
    Request,
    RequestStream,
    SamplingParams,
    measure_room,
)
from whetstone.engines.native import slot_state
from whetstone.engines.native.cuda_graphs import CudaGraphs
from whetstone.engines.native.decode_step import Step, make_step
from whetstone.engines.native.prefill import PagedPrefill, PrefillSequence
from whetstone.engines.native.sampling import SamplingEngine
from whetstone.engines.native.scheduler import Scheduler, num_pages
from whetstone.engines.native.slot_state import NUM_GENERATED, PAGE, PROMPT_LEN, CacheShape, PagedState
from whetstone.errors import UserError
from whetstone.model.memory import free_memory, unreserved_memory, upload
from whetstone.model.policy import Policy
from whetstone.model.verification import text_tokens
from whetstone.types import Finish

STEPS_PER_ROUND = 4  # tokens between two reads of the results
READ_AHEAD = 64  # tokens that are read together before their sequence is finished
PREFILL_TOKENS = 32768
MEMORY_FRACTION = 0.85  # of the free memory, for the pages
DRY_RUN_TOKENS = (10, 6)  # of two texts
DRY_RUN_PAGES = 4
RESERVED_BYTES = 1 << 30  # for graphs and workspaces, beside the logits


@dataclass(frozen=True, kw_only=True)
class _InFlightRound:
    """A launched round, and the state of the slots after it."""

    slots: Tensor  # pinned copy of the rows up to NUM_GENERATED
    finished: torch.cuda.Event
    num_admitted: int  # sequences admitted before it was launched


class PagedEngine(SamplingEngine):
    def __init__(self, policy: Policy, shape: CacheShape, max_slots: int, *, fp8: bool = False):
        super().__init__(policy, shape, max_slots)
        self.fp8 = fp8
        self._state: PagedState | None = None
        self.step: Step | None = None
        self.graphs: CudaGraphs | None = None
        self.weights_changed = False  # since copies of them were made
        self.read_stream = torch.cuda.Stream(shape.device)  # reads results while the next round runs

    @property
    def state(self) -> PagedState:
        assert self._state is not None, "allocated by `generate`"
        return self._state

    def _outputs(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        stream: RequestStream | None = None,
        *,
        with_partial: bool = False,
    ) -> Iterator[GenerationOutput | PartialOutput]:
        if self.policy.model.training:
            self.policy.modes.train(False)
        scheduler = self._prepare(requests, sampling, stream)
        in_flight: _InFlightRound | None = None
        while scheduler.has_work or stream is not None:
            if stream is not None:
                scheduler.cancel(stream.cancelled())
                scheduler.add(stream.take(wait=not scheduler.has_work))
                if not scheduler.has_work:
                    return
            self._admit(scheduler)
            launched = self._launch(scheduler)
            if in_flight is not None:
                yield from self._collect_finished(scheduler, in_flight)
                if with_partial:
                    yield from self._partial_outputs(scheduler, in_flight)
            elif launched is None and not scheduler.drop_idle_prompts():
                self._preempt(scheduler, scheduler.newest())
            in_flight = launched

    @torch.no_grad()
    def _admit(self, scheduler: Scheduler) -> None:
        """Fill free slots; prefill new prompts and the tokens of preempted sequences."""
        assert self.step is not None
        admission = scheduler.admit(PREFILL_TOKENS)
        slots, histories = admission.slots, admission.histories
        if not slots:
            return
        requests, prompt_pages = scheduler.requests, scheduler.prompt_pages
        sequences = [
            PrefillSequence(
                requests[r].prompt_ids[:-1], prompt_pages(r), [], [], requests[r].adapter, histories.get(r)
            )
            for r in admission.new_prompts
        ]
        for slot in slots:
            sequence = scheduler.running[slot]
            if sequence.waiting.tokens:
                request = requests[sequence.request]
                prompt = request.prompt_ids
                fed_tokens = [prompt[-1], *sequence.waiting.tokens[:-1]]
                sequences.append(
                    PrefillSequence(prompt[:-1], [], fed_tokens, sequence.pages, request.adapter)
                )
        self._prefill(self.step, [sequence for sequence in sequences if len(sequence)])
        scheduler.copied()
        # The rest is written while that runs: lists first, since filling a tensor entry by entry takes
        # milliseconds.
        columns, tables, seeds, settings, adapters = [], [], [], [], []
        width = self.state.table.shape[1]
        for slot in slots:
            sequence = scheduler.running[slot]
            request, tokens = requests[sequence.request], sequence.waiting.tokens
            pages = [*prompt_pages(sequence.request), *sequence.pages]
            tables.append([*pages, *[0] * (width - len(pages))])
            seeds.append(request.seeds[sequence.waiting.sample])
            newest = tokens[-1] if tokens else request.prompt_ids[-1]
            prompt_len, max_new = len(request.prompt_ids) - 1, sequence.waiting.max_new
            columns.append(slot_state.active_slot(prompt_len, len(tokens), max_new, newest))
            settings.append(slot_state.slot_settings(scheduler.params(slot)))
            adapters.append(request.adapter)
        slot_index = self._upload(torch.tensor(slots))
        fields = torch.tensor(columns, dtype=torch.int32).t().contiguous()
        self.state.slots[:, slot_index] = self._upload(fields)
        self.state.table[slot_index] = self._upload(torch.tensor(tables, dtype=torch.int32))
        self.state.seeds[slot_index] = self._upload(torch.tensor(seeds))
        self.state.settings[:, slot_index] = self._upload(torch.tensor(settings).t().contiguous())
        if any(adapters) or self.adapters is not None:
            self.state.adapters[slot_index] = self._upload(torch.tensor(adapters, dtype=torch.int32))

    def _prefill(self, step: Step, sequences: list[PrefillSequence]) -> None:
        batches: list[list[PrefillSequence]] = []
        for sequence in sequences:
            if not batches or sum(map(len, [*batches[-1], sequence])) > PREFILL_TOKENS:
                batches.append([])
            batches[-1].append(sequence)
        for batch in batches:
            step.prefill(PagedPrefill(self.state, batch))

    @torch.no_grad()
    def _launch(self, scheduler: Scheduler) -> _InFlightRound | None:
        """Launch a round for all unfinished sequences; None if there are not enough pages."""
        assert self.graphs is not None
        reserved = scheduler.reserve(STEPS_PER_ROUND)
        if reserved is None:
            return None
        steps, slots, new_pages = reserved
        if new_pages:
            slot, number, page = self._upload(torch.tensor(new_pages)).unbind(1)
            prompts = (self.state.slots[PROMPT_LEN][slot] + PAGE - 1) // PAGE
            self.state.table[slot, prompts + number] = page.int()
        if slots:
            params = scheduler.distinct_params(slots)
            greedy, filtered = any(p.is_greedy for p in params), any(p.is_filtered for p in params)
            graph, bucket = self.graphs.get(len(slots), greedy=greedy, filtered=filtered)
            rows = torch.full((bucket,), -1, dtype=torch.int32)
            rows[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
            self.state.rows[:bucket] = self._upload(rows)
            for _ in range(steps):
                graph.replay()
        slot_rows = torch.empty(NUM_GENERATED + 1, self.state.num_slots, dtype=torch.int32, pin_memory=True)
        slot_rows.copy_(self.state.slots[: NUM_GENERATED + 1], non_blocking=True)
        finished = torch.cuda.Event()
        finished.record()
        return _InFlightRound(slots=slot_rows, finished=finished, num_admitted=scheduler.num_admitted)

    def _collect_finished(
        self, scheduler: Scheduler, in_flight: _InFlightRound
    ) -> Iterator[GenerationOutput]:
        """Yield the sequences that were finished when this round ended."""
        in_flight.finished.synchronize()
        active, num_generated = (
            in_flight.slots[number].tolist() for number in (slot_state.ACTIVE, NUM_GENERATED)
        )
        finished_slots = [
            slot
            for slot, sequence in scheduler.running.items()
            if sequence.order < in_flight.num_admitted and not active[slot]
        ]
        if not finished_slots:
            return self._read_ahead(scheduler, num_generated, in_flight.num_admitted)
        first = min(len(scheduler.running[slot].waiting.tokens) for slot in finished_slots)
        last = max(num_generated[slot] for slot in finished_slots)
        tokens, logprobs = self._read(finished_slots, first, last)
        for index, slot in enumerate(finished_slots):
            stops = scheduler.params(slot).stop_ids(self.policy.stop_token_ids)
            sequence = scheduler.finish(slot, num_generated[slot])
            ids, known_logprobs = sequence.waiting.tokens, sequence.waiting.logprobs
            new = slice(len(ids) - first, num_generated[slot] - first)
            ids += tokens[index][new]
            known_logprobs += logprobs[index][new]
            finish = Finish.STOP if ids[-1] in stops else Finish.LENGTH
            yield self.output(sequence.request, sequence.waiting.sample, ids, known_logprobs, finish)

    def _partial_outputs(self, scheduler: Scheduler, in_flight: _InFlightRound) -> Iterator[PartialOutput]:
        """The sequences that were unfinished when this round ended, with all of their tokens."""
        self._read_new(scheduler, in_flight.slots[NUM_GENERATED].tolist(), in_flight.num_admitted)
        for waiting in [sequence.waiting for sequence in scheduler.running.values()]:
            if waiting.tokens:
                yield PartialOutput(
                    request=waiting.request,
                    sample=waiting.sample,
                    token_ids=waiting.tokens,
                    logprobs=waiting.logprobs,
                )

    def _read_ahead(
        self,
        scheduler: Scheduler,
        num_generated: list[int],
        num_admitted: int,
    ) -> None:
        """Read tokens ahead: sequences often finish all at once, and reading then would stall the GPU."""
        running = scheduler.running
        is_last = not (scheduler.waiting or any(sequence.remaining for sequence in running.values()))
        unread: dict[tuple[int, int], list[int]] = {}  # (tokens read, tokens to read) -> slots
        for slot, sequence in running.items():
            num_known = len(sequence.waiting.tokens)
            new = num_generated[slot] - num_known
            if sequence.order < num_admitted and (new >= READ_AHEAD or (is_last and new)):
                stop = num_generated[slot] if is_last else num_known + READ_AHEAD
                unread.setdefault((num_known, stop), []).append(slot)
        for (num_known, stop), slots in unread.items():
            tokens, logprobs = self._read(slots, num_known, stop)
            for index, slot in enumerate(slots):
                running[slot].waiting.tokens += tokens[index]
                running[slot].waiting.logprobs += logprobs[index]

    def _read_new(self, scheduler: Scheduler, num_generated: list[int], num_admitted: int) -> None:
        """Read every token that the host has not read yet, of all sequences in one transfer."""
        new = {
            slot: (len(sequence.waiting.tokens), num_generated[slot])
            for slot, sequence in scheduler.running.items()
            if sequence.order < num_admitted and num_generated[slot] > len(sequence.waiting.tokens)
        }
        if not new:
            return
        width = max(stop - start for start, stop in new.values())
        starts = torch.tensor([start for start, _ in new.values()])
        columns = (starts[:, None] + torch.arange(width)).clamp(max=self.state.max_tokens - 1)
        with torch.cuda.stream(self.read_stream), torch.no_grad():
            slot_index = torch.tensor(list(new), device=self.shape.device)[:, None]
            columns = columns.to(self.shape.device)
            tokens = self.state.out_tokens[slot_index, columns].cpu().numpy().tolist()
            logprobs = self.state.out_logprobs[slot_index, columns].cpu().numpy().tolist()
        for row, (slot, (start, stop)) in enumerate(new.items()):
            waiting = scheduler.running[slot].waiting
            waiting.tokens += tokens[row][: stop - start]
            waiting.logprobs += logprobs[row][: stop - start]

    def _read(self, slots: list[int], start: int, stop: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens `start` to `stop` of these slots; the running round no longer writes there."""
        with torch.cuda.stream(self.read_stream), torch.no_grad():
            slot_index = torch.tensor(slots, device=self.shape.device)
            tokens = self.state.out_tokens[slot_index, start:stop].cpu()
            logprobs = self.state.out_logprobs[slot_index, start:stop].cpu()
        return tokens.numpy().tolist(), logprobs.numpy().tolist()  # numpy's is the faster one

    def _preempt(self, scheduler: Scheduler, slot: int) -> None:
        """Free the pages of an unfinished sequence. Nothing is in flight when this is called."""
        torch.cuda.synchronize(self.shape.device)
        waiting = scheduler.running[slot].waiting
        count = int(self.state.slots[NUM_GENERATED, slot])
        tokens, logprobs = self._read([slot], len(waiting.tokens), count)
        scheduler.preempt(slot, [*waiting.tokens, *tokens[0]], [*waiting.logprobs, *logprobs[0]])

    @torch.no_grad()
    def _prepare(
        self, requests: list[Request], sampling: SamplingParams, stream: RequestStream | None
    ) -> Scheduler:
        """Allocate state and pages, build the decode step and write the stop tokens."""
        room = measure_room(requests, sampling, stream)
        num_slots = min(self.max_slots, room.sequences)
        # A prompt and its completion begin a page each.
        least = min(num_pages(room.prompt) + num_pages(sampling.max_tokens), num_pages(room.total) + 1)
        width = least + 1
        state = self._state
        if (
            state is None
            or state.num_slots < num_slots
            or state.table.shape[1] < width
            or state.max_tokens < sampling.max_tokens
        ):
            self.close()
            state = self._state = PagedState(self.shape, num_slots, width, sampling.max_tokens)
        if stream is not None:  # every sequence has a prompt of its own from the second turn on
            preferred = num_slots * least
        else:
            prompts = sum(num_pages(len(request.prompt_ids) - 1) for request in requests)
            preferred = prompts + num_slots * num_pages(sampling.max_tokens)
        self._prepare_pages(preferred=preferred, least=least)
        if self.step is not None and not self.step.is_current():
            self.step = self.graphs = None
        if self.step is None:
            self.step = make_step(self.policy, self._dry_run, fp8=self.fp8)
            self.graphs = CudaGraphs(self.step, state)
        elif self.weights_changed:
            self.step.refresh()
        self.weights_changed = False
        stops = self.policy.stop_token_ids  # those that ignore them say so in their settings
        assert len(stops) <= slot_state.MAX_STOPS
        state.stops.copy_(torch.tensor([*stops, *[-1] * (slot_state.MAX_STOPS - len(stops))]))
        state.slots.zero_()
        return Scheduler(requests, sampling, num_slots=num_slots, total_pages=state.num_pages)

    def _prepare_pages(self, *, preferred: int, least: int) -> None:
        """Allocate as many pages as the requests can use and the memory allows."""
        state = self.state
        least = max(least, DRY_RUN_PAGES)
        preferred = max(preferred, least)
        if state.num_pages >= preferred:
            return
        state.release_pages()
        free = free_memory(self.shape.device)
        try:
            state.allocate_pages(min(preferred, self._num_fitting(free, least)))
        except torch.OutOfMemoryError:  # what torch holds is in pieces
            free = unreserved_memory(self.shape.device)
            state.allocate_pages(min(preferred, self._num_fitting(free, least)))

    def _num_fitting(self, free: int, least: int) -> int:
        """How many pages fit into `free` bytes beside what else sampling needs."""
        logits = 8 * self.policy.config.vocab_size * self.state.num_slots
        copies = 0
        if self.fp8 and self.step is None:  # made after the pages, and no more than this
            copies = sum(parameter.numel() for parameter in self.policy.trunk.layers.parameters())
        size = self.shape.bytes_per_token() * PAGE
        count = int(max(0, free - RESERVED_BYTES - logits - copies) * MEMORY_FRACTION) // size
        if count < least:
            raise UserError(
                f"Not even one sequence of {least * PAGE} tokens fits into the {free / 1e9:.1f} GB of GPU "
                "memory that are free: lower max_completion_length, or choose a smaller model."
            )
        return count

    def _dry_run(self, step: Step) -> Tensor:
        """Logits after the beginnings of two texts, to compare two steps."""
        policy, state = self.policy, self.state
        texts = text_tokens(policy.tokenizer, policy.config.vocab_size, policy.max_length)
        lengths = DRY_RUN_TOKENS[: state.num_slots]
        adapter = 0 if self.adapters is None else len(self.adapters.numbers)  # the last one
        state.adapters.fill_(adapter)
        sequences = []
        for slot, (text, length) in enumerate(zip(texts, lengths, strict=False)):
            *ids, newest = text[:length].tolist()
            active = slot_state.active_slot(len(ids), 0, 1, newest)
            state.slots[:, slot] = torch.tensor(active, dtype=torch.int32)
            state.table[slot, :2] = torch.tensor([2 * slot, 2 * slot + 1], dtype=torch.int32)
            sequences.append(PrefillSequence(tuple(ids), [2 * slot], [], [], adapter))
        self._prefill(step, sequences)
        return step(state, torch.arange(len(lengths), dtype=torch.int32, device=self.shape.device))

    def _upload(self, values: Tensor) -> Tensor:
        return upload(values, self.shape.device)

    def update_weights(self, policy_version: int) -> None:
        super().update_weights(policy_version)
        self.weights_changed = True

    def sleep(self) -> None:
        if self._state is not None:
            self._state.release_pages()
            if self.policy_version == 0:  # the optimizer's state is allocated next, and stays
                torch.cuda.empty_cache()  # or it would lie in the middle of the memory of the pages

    def close(self) -> None:
        self._state = self.step = self.graphs = None
