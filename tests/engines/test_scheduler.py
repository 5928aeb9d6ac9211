"""Slots and pages of the native engine: who is seated, who shares a prompt, who is sent back."""

from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native.scheduler import Scheduler
from whetstone.engines.native.slot_state import PAGE


def scheduler_for(prompts, samples=2, *, slots=4, pages=20, limit=200, limits=None):
    requests = [
        Request(prompt_ids=tuple(range(length)), seeds=tuple(range(samples)), max_tokens=limits)
        for length in prompts
    ]
    return Scheduler(requests, SamplingParams(max_tokens=limit), num_slots=slots, total_pages=pages)


def reserved(scheduler, steps=4):
    found = scheduler.reserve(steps)
    assert found is not None
    return found


def test_a_prompt_is_stored_once_for_its_group():
    scheduler = scheduler_for(
        [2 * PAGE + 1], samples=3
    )  # its last token is fed, not stored: exactly two pages
    admission = scheduler.admit(token_budget=10_000)
    slots = admission.slots
    assert len(slots) == 3 and admission.new_prompts == [0]
    assert len(scheduler.prompt_pages(0)) == 2
    assert len(scheduler.free_pages) == 20 - 2 - 3  # and one page of its own for each
    for slot in slots:
        scheduler.free(slot)
    assert sorted(scheduler.free_pages) == list(range(20)) and not scheduler.has_work


def test_whoever_comes_later_finds_the_prompt_there():
    scheduler = scheduler_for([100], samples=3, slots=2)
    first = scheduler.admit(10_000)
    assert first.new_prompts == [0] and len(first.slots) == 2
    scheduler.free(first.slots[0])
    later = scheduler.admit(10_000)
    assert len(later.slots) == 1 and later.new_prompts == []


def test_own_pages_grow_just_ahead_of_the_tokens():
    scheduler = scheduler_for([10], samples=1)
    (slot,) = scheduler.admit(10_000).slots
    new_pages = []
    for _ in range(40):  # 160 tokens in steps of 4
        steps, slots, new = reserved(scheduler)
        assert (steps, slots) == (4, [slot])
        new_pages += [number for _, number, _ in new]
        assert len(scheduler.running[slot].pages) == -(-scheduler.running[slot].num_generated // PAGE)
    assert new_pages == [1, 2]  # the first page was there from the start
    for _ in range(10):
        scheduler.reserve(4)
    assert reserved(scheduler)[:2] == (0, [])  # 200 drawn: nobody takes part any more


def test_limits_of_their_own():
    scheduler = scheduler_for([10], samples=2, limits=(3, 9))
    scheduler.admit(10_000)
    assert reserved(scheduler)[0] == 4  # the first stops by itself after 3
    steps, slots, _ = reserved(scheduler)
    assert steps == 4 and len(slots) == 1
    assert reserved(scheduler)[0] == 1


def test_preempted_sequence_keeps_tokens_and_resumes_first():
    scheduler = scheduler_for([1, 1], samples=1, slots=2, pages=4, limit=4 * PAGE)
    slots = scheduler.admit(10_000).slots
    while (reserved := scheduler.reserve(PAGE)) is not None:
        assert len(reserved[1]) == 2
    young = scheduler.newest()
    assert young == slots[1] and scheduler.running[young].request == 1
    scheduler.preempt(young, [5, 6, 7], [-1.0, -2.0, -3.0])
    assert scheduler.reserve(PAGE) is not None  # the elder goes on with the pages that came free
    assert scheduler.waiting[0].tokens == [5, 6, 7]
    assert scheduler.admit(10_000).slots == []  # no page for it yet
    scheduler.free(slots[0])
    (slot,) = scheduler.admit(10_000).slots
    assert scheduler.running[slot].num_generated == 3 and scheduler.running[slot].waiting.logprobs == [
        -1.0,
        -2.0,
        -3.0,
    ]


def test_prefill_goes_by_a_budget_of_tokens():
    scheduler = scheduler_for([101, 101, 101], samples=1)
    assert len(scheduler.admit(token_budget=250).slots) == 2
    assert len(scheduler.admit(token_budget=250).slots) == 1
    scheduler = scheduler_for([1001], samples=1, pages=30)
    assert len(scheduler.admit(token_budget=250).slots) == 1  # one that is longer than the budget goes alone


def test_cancelled_samples_leave_nothing():
    scheduler = scheduler_for([2 * PAGE + 1, 10], samples=3, slots=4)
    slots = scheduler.admit(10_000).slots
    assert len(slots) == 4 and len(scheduler.waiting) == 2
    scheduler.cancel([(0, 0), (1, 2), (9, 9)])  # running, waiting, unknown
    assert [(entry.request, entry.sample) for entry in scheduler.waiting] == [(1, 1)]
    assert len(scheduler.running) == 3 and set(scheduler.requests) == {0, 1}
    scheduler.cancel([(0, 1), (0, 2)])
    assert set(scheduler.requests) == set(scheduler.prompts) == {1}
    scheduler.admit(10_000)
    for slot in list(scheduler.running):
        scheduler.finish(slot)
    assert not scheduler.requests and not scheduler.prompts and not scheduler.has_work
    assert sorted(scheduler.free_pages) == list(range(20)) and len(scheduler.free_slots) == 4


def test_numbers_of_later_requests_continue():
    scheduler = scheduler_for([10], samples=1)
    (slot,) = scheduler.admit(10_000).slots
    scheduler.finish(slot)
    scheduler.add([Request(prompt_ids=(1, 2), seeds=(0,))])
    assert [entry.request for entry in scheduler.waiting] == [1]


def next_turn(scheduler, slot, *, said, heard=5):
    """Finish the sequence in `slot` after `said` tokens, and ask for its next turn."""
    sequence = scheduler.running[slot]
    prompt = scheduler.requests[sequence.request].prompt_ids
    key = sequence.request, sequence.waiting.sample
    scheduler.finish(slot, said)
    longer = (*prompt, *range(said + heard))
    scheduler.add([Request(prompt_ids=longer, seeds=(0,), may_continue=True, continues=key)])
    return key, len(longer) - 1


def turns_scheduler(*, pages=20, prompt=PAGE + 1, samples=2, slots=4):
    request = Request(prompt_ids=tuple(range(prompt)), seeds=tuple(range(samples)), may_continue=True)
    return Scheduler([request], SamplingParams(max_tokens=200), num_slots=slots, total_pages=pages)


def test_the_next_turn_computes_only_what_is_new():
    scheduler = turns_scheduler()
    slots = scheduler.admit(10_000).slots
    scheduler.reserve(70)
    key, length = next_turn(scheduler, slots[0], said=66)
    history = scheduler.histories[key]
    assert len(history) == PAGE + 66 and len(history.pages) == 2
    assert history.prompt_pages == scheduler.prompt_pages(0)  # shared with the other sample
    admission = scheduler.admit(token_budget=length - len(history))  # a budget for these alone
    assert len(admission.slots) == 1 and admission.histories == {1: history} and not scheduler.histories
    new_pages = {*scheduler.prompt_pages(1), *scheduler.running[admission.slots[0]].pages}
    assert not new_pages & {*history.pages, *history.prompt_pages}  # they are being copied
    assert not {*history.pages} & {*scheduler.free_pages}
    scheduler.copied()
    assert {*history.pages} <= {*scheduler.free_pages}
    for slot in list(scheduler.running):
        scheduler.finish(slot)
    assert sorted(scheduler.free_pages) == list(range(20)) and not scheduler.requests


def test_histories_are_given_up_when_pages_are_needed():
    scheduler = turns_scheduler(pages=7, samples=1, slots=2)
    (slot,) = scheduler.admit(10_000).slots
    scheduler.reserve(66)
    next_turn(scheduler, slot, said=66)  # three pages are kept
    assert len(scheduler.histories) == 1 and len(scheduler.free_pages) == 4
    other = Request(prompt_ids=tuple(range(4 * PAGE + 1)), seeds=(0,))
    scheduler.waiting.clear()
    scheduler.add([other])
    admission = scheduler.admit(10_000)  # five pages
    assert len(admission.slots) == 1 and not scheduler.histories and not admission.histories
    scheduler.finish(admission.slots[0])
    assert sorted(scheduler.free_pages) == list(range(7))


def test_turn_that_fits_only_without_kept_cache():
    scheduler = turns_scheduler(pages=6, samples=1, slots=1)
    (slot,) = scheduler.admit(10_000).slots
    scheduler.reserve(130)
    next_turn(scheduler, slot, said=130)  # four pages are kept; the turn needs four and one
    admission = scheduler.admit(10_000)
    assert len(admission.slots) == 1 and admission.new_prompts == [1] and not admission.histories
    scheduler.copied()
    scheduler.finish(admission.slots[0])
    assert sorted(scheduler.free_pages) == list(range(6)) and not scheduler.requests


def test_an_ended_conversation_leaves_no_history():
    scheduler = turns_scheduler()
    slots = scheduler.admit(10_000).slots
    for slot in slots:
        scheduler.finish(slot, 3)
    assert len(scheduler.histories) == 2 and not scheduler.has_work
    scheduler.cancel([(0, 0), (0, 1)])
    assert not scheduler.histories and not scheduler.requests and not scheduler.prompts
    assert sorted(scheduler.free_pages) == list(range(20))
