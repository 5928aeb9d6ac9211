"""The scheduler of the native engine on a GPU: waiting and running sequences, slots and KV-cache pages.

A prompt's pages are shared by all samples of its group; a sample's own pages grow with it. Where a later
request may continue a finished sample (the next turn of a conversation), its pages are kept until that comes,
or until they are needed. When pages run out, the newest sequence is preempted: it waits with its tokens and
resumes later. Its random numbers depend only on its seed and its number of tokens, so preemption does not
change them. No tensors here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native.slot_state import PAGE


def num_pages(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass
class WaitingSequence:
    request: int
    sample: int
    max_new: int  # tokens it may generate
    tokens: list[int] = field(default_factory=list)  # those that the host has read so far
    logprobs: list[float] = field(default_factory=list)


@dataclass
class RunningSequence:
    """A sequence in a slot. The last token of its prompt is fed to the first step, not prefilled."""

    waiting: WaitingSequence
    order: int  # of admission
    num_generated: int  # tokens after all launched steps, unless it stops before
    pages: list[int]  # its own

    @property
    def request(self) -> int:
        return self.waiting.request

    @property
    def remaining(self) -> int:
        return self.waiting.max_new - self.num_generated


@dataclass
class _Prompt:
    pages: list[int]
    num_users: int


@dataclass(frozen=True)
class History:
    """Keys and values of a finished sequence: of its prompt, but for the last token, and of the tokens that
    were fed after that.
    """

    prompt_pages: list[int]
    prompt_length: int
    pages: list[int]
    length: int

    def __len__(self) -> int:
        return self.prompt_length + self.length


@dataclass(frozen=True)
class Admission:
    slots: list[int]
    new_prompts: list[int]  # requests with prompts to prefill
    histories: dict[int, History]  # what is cached of these prompts, elsewhere


class Scheduler:
    def __init__(
        self, requests: list[Request], sampling: SamplingParams, *, num_slots: int, total_pages: int
    ):
        self.requests: dict[int, Request] = {}  # by number, while a sample of it waits or runs
        self.num_requests = 0
        self.waiting: deque[WaitingSequence] = deque()
        self.sampling = sampling
        self.has_own_params = False  # whether a request has sampling parameters of its own
        self.add(requests)
        self.running: dict[int, RunningSequence] = {}
        self.free_slots = list(range(num_slots))[::-1]
        self.free_pages = list(range(total_pages))[::-1]
        self.prompts: dict[int, _Prompt] = {}
        self.histories: dict[tuple[int, int], History] = {}  # (request, sample), the oldest first
        self._unread: list[int] = []  # pages of histories that the last admission copies
        self.num_admitted = 0

    def add(self, requests: list[Request]) -> None:
        """Put the samples of further requests at the end of the queue."""
        for request in requests:
            limits = [request.limit(sample, self.sampling) for sample in range(len(request.seeds))]
            number = self.num_requests
            self.waiting.extend(WaitingSequence(number, s, limit) for s, limit in enumerate(limits))
            self.requests[number] = request
            self.has_own_params |= request.sampling is not None
            self.num_requests += 1

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def distinct_params(self, slots: list[int]) -> set[SamplingParams]:
        """The sampling parameters of the sequences in `slots`."""
        return {self.params(slot) for slot in slots} if self.has_own_params else {self.sampling}

    def params(self, slot: int) -> SamplingParams:
        return self.requests[self.running[slot].request].params(self.sampling)

    def prompt_pages(self, request: int) -> list[int]:
        return self.prompts[request].pages

    def admit(self, token_budget: int) -> Admission:
        """Move waiting sequences into free slots."""
        admission = Admission([], [], {})
        tokens = 0
        while self.waiting and self.free_slots:
            sequence = self.waiting[0]
            request = self.requests[sequence.request]
            prompt_len = len(request.prompt_ids) - 1
            is_cached = sequence.request in self.prompts
            own_pages = num_pages(len(sequence.tokens) + 1)
            # One page in reserve for every running sequence, or the newest would soon be preempted again.
            reserve = len(self.running)
            needed = own_pages + (0 if is_cached else num_pages(prompt_len))
            if self._unread and needed + reserve > len(self.free_pages):
                break  # for the next round: pages become free before it
            if not self._make_room(needed + reserve, keep=request.continues):
                if self.running:
                    break
                # One sample always fits: the pages were counted for it.
                self._make_room(needed)
                self.drop_idle_prompts()
                is_cached = sequence.request in self.prompts
            history = None if is_cached else self._history(request)
            num_known = 0 if history is None else len(history)
            cost = (0 if is_cached else prompt_len - num_known) + len(sequence.tokens)
            if admission.slots and tokens + cost > token_budget:
                break
            tokens += cost
            self.waiting.popleft()
            if not is_cached:
                self.prompts[sequence.request] = _Prompt(self._allocate(num_pages(prompt_len)), 0)
                admission.new_prompts.append(sequence.request)
            if history is not None and request.continues is not None:
                admission.histories[sequence.request] = history
                self._drop_history(request.continues, is_read=True)
            self.prompts[sequence.request].num_users += 1
            slot = self.free_slots.pop()
            self.running[slot] = RunningSequence(
                sequence, self.num_admitted, len(sequence.tokens), self._allocate(own_pages)
            )
            self.num_admitted += 1
            admission.slots.append(slot)
        return admission

    def copied(self) -> None:
        """The device has been told to copy the histories of the last admission: their pages are free."""
        self.free_pages.extend(self._unread)
        self._unread = []

    def _history(self, request: Request) -> History | None:
        history = None if request.continues is None else self.histories.get(request.continues)
        return history if history is not None and len(history) < len(request.prompt_ids) - 1 else None

    def _make_room(self, count: int, *, keep: tuple[int, int] | None = None) -> bool:
        """Whether `count` pages are free, after giving up histories, the oldest first."""
        for key in [key for key in self.histories if key != keep]:
            if len(self.free_pages) >= count:
                break
            self._drop_history(key)
        return len(self.free_pages) >= count

    def _drop_history(self, key: tuple[int, int], *, is_read: bool = False) -> None:
        """`is_read`: the device will copy it, so its pages are free only after that."""
        history = self.histories.pop(key)
        free = self._unread if is_read else self.free_pages
        free.extend(history.pages)
        self.prompts[key[0]].num_users -= 1
        self._forget(key[0], free)

    def reserve(self, steps: int) -> tuple[int, list[int], list[tuple[int, int, int]]] | None:
        """Allocate pages for up to `steps` more tokens of every sequence; None if pages run out.

        Returns the steps, the slots, and new pages as (slot, number of the page in its slot, page).
        """
        slots = [slot for slot, sequence in self.running.items() if sequence.remaining]
        steps = min(steps, max((self.running[slot].remaining for slot in slots), default=0))
        missing = {}
        for slot in slots:
            sequence = self.running[slot]
            num_tokens = sequence.num_generated + min(steps, sequence.remaining)
            missing[slot] = max(0, num_pages(num_tokens) - len(sequence.pages))
        if not self._make_room(sum(missing.values())):
            return None
        new_pages = []
        for slot in slots:
            sequence = self.running[slot]
            for page in self._allocate(missing[slot]):
                new_pages.append((slot, len(sequence.pages), page))
                sequence.pages.append(page)
            sequence.num_generated += min(steps, sequence.remaining)
        return steps, sorted(slots, key=lambda slot: self.running[slot].order), new_pages

    def newest(self) -> int:
        return max(self.running, key=lambda slot: self.running[slot].order)

    def preempt(self, slot: int, tokens: list[int], logprobs: list[float]) -> None:
        """Free the slot of an unfinished sequence and put it first in the queue."""
        self.waiting.appendleft(replace(self.free(slot).waiting, tokens=tokens, logprobs=logprobs))

    def finish(self, slot: int, length: int | None = None) -> RunningSequence:
        """Free the slot of a sequence that does not return. `length`: its tokens, all but the last of which
        were fed; where a request may continue it, it becomes a history.
        """
        request = self.running[slot].request
        if length is not None and self.requests[request].may_continue:
            return self._keep(slot, length)
        sequence = self.free(slot)
        self._forget(request, self.free_pages)
        return sequence

    def _keep(self, slot: int, length: int) -> RunningSequence:
        sequence = self.running.pop(slot)
        self.free_slots.append(slot)
        used = num_pages(length)
        self.free_pages.extend(sequence.pages[used:])
        prompt_length = len(self.requests[sequence.request].prompt_ids) - 1
        pages = self.prompts[sequence.request].pages
        key = sequence.request, sequence.waiting.sample
        self.histories[key] = History(pages, prompt_length, sequence.pages[:used], length)
        return sequence

    def cancel(self, samples: Sequence[tuple[int, int]]) -> None:
        """End these (request, sample). A round in flight may still write their pages: the device does what
        uses the pages next after it.
        """
        if not samples:
            return
        unwanted = set(samples)
        remaining = [entry for entry in self.waiting if (entry.request, entry.sample) not in unwanted]
        self.waiting = deque(remaining)
        for slot, sequence in list(self.running.items()):
            if (sequence.request, sequence.waiting.sample) in unwanted:
                self.finish(slot)
        for key in unwanted & self.histories.keys():
            self._drop_history(key)
        for request in {request for request, _ in unwanted}:
            self._forget(request, self.free_pages)

    def _forget(self, request: int, free: list[int]) -> None:
        """Drop a request and its prompt, unless one of its samples waits, runs or is kept; its pages to
        `free`.
        """
        prompt = self.prompts.get(request)
        is_used = prompt is not None and prompt.num_users > 0
        if is_used or any(entry.request == request for entry in self.waiting):
            return
        self.requests.pop(request, None)
        if prompt is not None:
            free.extend(self.prompts.pop(request).pages)

    def free(self, slot: int) -> RunningSequence:
        sequence = self.running.pop(slot)
        self.free_slots.append(slot)
        self.free_pages.extend(sequence.pages)
        prompt = self.prompts[sequence.request]
        prompt.num_users -= 1
        still_wanted = any(other.request == sequence.request for other in self.waiting)
        if prompt.num_users == 0 and not still_wanted:
            self.free_pages.extend(self.prompts.pop(sequence.request).pages)
        return sequence

    def drop_idle_prompts(self) -> bool:
        """Free prompts that no running sequence uses; waiting ones prefill them again."""
        idle = [request for request, prompt in self.prompts.items() if prompt.num_users == 0]
        for request in idle:
            self.free_pages.extend(self.prompts.pop(request).pages)
        return bool(idle)

    def _allocate(self, count: int) -> list[int]:
        assert count <= len(self.free_pages)
        return [self.free_pages.pop() for _ in range(count)]
