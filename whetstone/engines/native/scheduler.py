"""Who sits in which slot and holds which pages: the native engine's bookkeeping, without a tensor in it.

Prompts are stored once for all samples of a group; a sample's own pages grow with it. When pages run out, the
youngest sample is sent back to wait with the tokens it has: it goes on later where it was, since its random
numbers depend only on its seed and on how many it has used.
"""

from collections import deque
from dataclasses import dataclass, field

from whetstone.engines.base import Request, Sampling
from whetstone.engines.native.slot_state import PAGE


def num_pages(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass
class Waiting:
    request: int
    sample: int
    limit: int  # tokens it may draw
    tokens: list[int] = field(default_factory=list)  # drawn, as far as the host knows them
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Seated:
    """A sample in a slot. The last token of its prompt counts as its own: it is fed, not prefilled."""

    waiting: Waiting
    order: int  # of admission
    drawn: int  # tokens drawn once every launched step is done, unless it stops before
    pages: list[int]  # its own

    @property
    def request(self) -> int:
        return self.waiting.request

    @property
    def remaining(self) -> int:
        return self.waiting.limit - self.drawn


@dataclass
class _Prompt:
    pages: list[int]
    users: int


class Seats:
    """Slots and pages."""

    def __init__(self, requests: list[Request], sampling: Sampling, *, num_slots: int, total_pages: int):
        self.requests = requests
        self.waiting = deque(
            Waiting(r, s, one.limit(s, sampling))
            for r, one in enumerate(requests)
            for s in range(len(one.seeds))
        )
        self.seated: dict[int, Seated] = {}
        self.free_slots = list(range(num_slots))[::-1]
        self.free_pages = list(range(total_pages))[::-1]
        self.prompts: dict[int, _Prompt] = {}
        self.admitted = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.seated)

    def prompt_pages(self, request: int) -> list[int]:
        return self.prompts[request].pages

    def admit(self, token_budget: int) -> tuple[list[int], list[int]]:
        """Seat those who wait while slots, pages and the budget of prompt tokens last.

        Returns the slots that were filled, and the requests whose prompts are not in the cache yet.
        """
        slots: list[int] = []
        new_prompts: list[int] = []
        tokens = 0
        while self.waiting and self.free_slots:
            one = self.waiting[0]
            prompt = len(self.requests[one.request].prompt_ids) - 1
            known = one.request in self.prompts
            own = num_pages(len(one.tokens) + 1)
            # A page in hand for everyone who is seated: else the newest would soon be sent back again.
            reserve = len(self.seated)
            needed = own + (0 if known else num_pages(prompt))
            if needed + reserve > len(self.free_pages):
                if self.seated:
                    break
                self.drop_idle_prompts()  # one sample always fits: the pages were counted for it
                known = one.request in self.prompts
            cost = (0 if known else prompt) + len(one.tokens)
            if slots and tokens + cost > token_budget:
                break
            tokens += cost
            self.waiting.popleft()
            if not known:
                self.prompts[one.request] = _Prompt(self._take(num_pages(prompt)), 0)
                new_prompts.append(one.request)
            self.prompts[one.request].users += 1
            slot = self.free_slots.pop()
            self.seated[slot] = Seated(one, self.admitted, len(one.tokens), self._take(own))
            self.admitted += 1
            slots.append(slot)
        return slots, new_prompts

    def reserve(self, steps: int) -> tuple[int, list[int], list[tuple[int, int, int]]] | None:
        """Make room for up to `steps` more tokens of everyone: (steps, slots that take part, new pages as
        (slot, number of the page in its slot, page)); None if pages run out.
        """
        slots = [slot for slot, one in self.seated.items() if one.remaining]
        steps = min(steps, max((self.seated[slot].remaining for slot in slots), default=0))
        wanted = {slot: self._missing(slot, steps) for slot in slots}
        if sum(wanted.values()) > len(self.free_pages):
            return None
        grown = []
        for slot in slots:
            one = self.seated[slot]
            for page in self._take(wanted[slot]):
                grown.append((slot, len(one.pages), page))
                one.pages.append(page)
            one.drawn += min(steps, one.remaining)
        return steps, sorted(slots, key=lambda slot: self.seated[slot].order), grown

    def youngest(self) -> int:
        return max(self.seated, key=lambda slot: self.seated[slot].order)

    def send_back(self, slot: int, tokens: list[int], logprobs: list[float]) -> None:
        """Free a slot whose sample is not finished; it waits first in the queue."""
        one = self.leave(slot)
        self.waiting.appendleft(Waiting(one.request, one.waiting.sample, one.waiting.limit, tokens, logprobs))

    def leave(self, slot: int) -> Seated:
        one = self.seated.pop(slot)
        self.free_slots.append(slot)
        self.free_pages.extend(one.pages)
        prompt = self.prompts[one.request]
        prompt.users -= 1
        still_wanted = any(other.request == one.request for other in self.waiting)
        if prompt.users == 0 and not still_wanted:
            self.free_pages.extend(self.prompts.pop(one.request).pages)
        return one

    def drop_idle_prompts(self) -> bool:
        """Free prompts that nobody seated uses; whoever waits for one prefills it again."""
        idle = [request for request, prompt in self.prompts.items() if prompt.users == 0]
        for request in idle:
            self.free_pages.extend(self.prompts.pop(request).pages)
        return bool(idle)

    def _missing(self, slot: int, steps: int) -> int:
        one = self.seated[slot]
        return max(0, num_pages(one.drawn + min(steps, one.remaining)) - len(one.pages))

    def _take(self, count: int) -> list[int]:
        assert count <= len(self.free_pages)
        return [self.free_pages.pop() for _ in range(count)]
