"""Slots and pages of the native engine: who is seated, who shares a prompt, who is sent back."""

from whetstone.engines.base import Request, Sampling
from whetstone.engines.native.scheduler import Seats
from whetstone.engines.native.slot_state import PAGE


def seats_for(prompts, samples=2, *, slots=4, pages=20, limit=200, limits=None):
    requests = [
        Request(prompt_ids=tuple(range(length)), seeds=tuple(range(samples)), max_tokens=limits)
        for length in prompts
    ]
    return Seats(requests, Sampling(max_tokens=limit), num_slots=slots, total_pages=pages)


def reserved(seats, steps=4):
    found = seats.reserve(steps)
    assert found is not None
    return found


def test_a_prompt_is_stored_once_for_its_group():
    seats = seats_for([2 * PAGE + 1], samples=3)  # its last token is fed, not stored: exactly two pages
    slots, new = seats.admit(token_budget=10_000)
    assert len(slots) == 3 and new == [0]
    assert len(seats.prompt_pages(0)) == 2
    assert len(seats.free_pages) == 20 - 2 - 3  # and one page of its own for each
    for slot in slots:
        seats.leave(slot)
    assert sorted(seats.free_pages) == list(range(20)) and not seats.is_busy


def test_whoever_comes_later_finds_the_prompt_there():
    seats = seats_for([100], samples=3, slots=2)
    first, new = seats.admit(10_000)
    assert new == [0] and len(first) == 2
    seats.leave(first[0])
    later, new = seats.admit(10_000)
    assert len(later) == 1 and new == []


def test_own_pages_grow_just_ahead_of_the_tokens():
    seats = seats_for([10], samples=1)
    (slot,), _ = seats.admit(10_000)
    grown = []
    for _ in range(40):  # 160 tokens in steps of 4
        steps, slots, new = reserved(seats)
        assert (steps, slots) == (4, [slot])
        grown += [number for _, number, _ in new]
        assert len(seats.seated[slot].pages) == -(-seats.seated[slot].drawn // PAGE)
    assert grown == [1, 2]  # the first page was there from the start
    for _ in range(10):
        seats.reserve(4)
    assert reserved(seats)[:2] == (0, [])  # 200 drawn: nobody takes part any more


def test_limits_of_their_own():
    seats = seats_for([10], samples=2, limits=(3, 9))
    seats.admit(10_000)
    assert reserved(seats)[0] == 4  # the first stops by itself after 3
    steps, slots, _ = reserved(seats)
    assert steps == 4 and len(slots) == 1
    assert reserved(seats)[0] == 1


def test_the_youngest_goes_back_with_what_it_has_and_comes_first_again():
    seats = seats_for([1, 1], samples=1, slots=2, pages=4, limit=4 * PAGE)
    slots, _ = seats.admit(10_000)
    while (reserved := seats.reserve(PAGE)) is not None:
        assert len(reserved[1]) == 2
    young = seats.youngest()
    assert young == slots[1] and seats.seated[young].request == 1
    seats.send_back(young, [5, 6, 7], [-1.0, -2.0, -3.0])
    assert seats.reserve(PAGE) is not None  # the elder goes on with the pages that came free
    assert seats.waiting[0].tokens == [5, 6, 7]
    assert seats.admit(10_000) == ([], [])  # no page for it yet
    seats.leave(slots[0])
    (slot,), _ = seats.admit(10_000)
    assert seats.seated[slot].drawn == 3 and seats.seated[slot].waiting.logprobs == [-1.0, -2.0, -3.0]


def test_prefill_goes_by_a_budget_of_tokens():
    seats = seats_for([101, 101, 101], samples=1)
    assert len(seats.admit(token_budget=250)[0]) == 2
    assert len(seats.admit(token_budget=250)[0]) == 1
    seats = seats_for([1001], samples=1, pages=30)
    assert len(seats.admit(token_budget=250)[0]) == 1  # one that is longer than the budget goes alone
