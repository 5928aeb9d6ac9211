"""Work is dealt out by tokens, every rank gets equally many micro-batches, and nothing is lost or done
twice.
"""

import pytest

from tests.conftest import make_policy
from tests.support.update import make_samples
from whetstone.config import build
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn
from whetstone.update.packing import Sample, balance, bin_pack, pack_minibatches


def group(number: int, lengths: list[int]) -> Group:
    rollouts = tuple(
        Rollout(
            prompt_ids=(1, 2, 3, number + 10),
            turns=(
                Turn(
                    completion=Completion(
                        token_ids=(7,) * length,
                        logprobs=(-1.0,) * length,
                        finish=Finish.STOP,
                        policy_version=0,
                    )
                ),
            ),
            text="",
            score=Score(reward=float(length), parts={"correct": 0.0}, answer=None),
        )
        for length in lengths
    )
    return Group(problem=Problem(id=str(number), task="t", messages=(), answer=None), rollouts=rollouts)


def sample(prompt: int, length: int, place: int) -> Sample:
    return Sample(rollout=group(prompt, [length]).rollouts[0], index=place, keep=True)


def tokens(share: list[Sample]) -> int:
    prompts = {s.rollout.prompt_ids for s in share}
    return sum(map(len, prompts)) + sum(len(s.rollout.completion.token_ids) for s in share)


def test_equal_groups_stay_whole():
    samples = [sample(p, 10, 4 * p + i) for p in range(4) for i in range(4)]
    shares = balance(samples, 2)
    assert [len({s.rollout.prompt_ids for s in share}) for share in shares] == [2, 2]
    assert [tokens(share) for share in shares] == [88, 88]


def test_one_long_group_is_cut_where_that_is_fairer():
    samples = [sample(0, 100, i) for i in range(4)]  # one group, two ranks: 4 + 200 tokens each
    assert [tokens(share) for share in balance(samples, 2)] == [204, 204]


def test_every_sample_is_somewhere_once():
    samples = make_samples(make_policy())
    for num_ranks in (1, 2, 3, 5, 9):
        shares = balance(samples, num_ranks)
        assert sorted(s.index for share in shares for s in share) == [0, 1, 2, 3, 4, 5]
        assert len(shares) == num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_have_equally_many_micro_batches(num_ranks):
    config = build({"num_generations": 3})
    groups = [group(0, [9, 2, 5]), group(1, [14, 14, 1])]
    parts = [
        pack_minibatches(groups, config, 1, 0, max_tokens=20, rank=rank, num_ranks=num_ranks)[0]
        for rank in range(num_ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    places = sorted(place for part in parts for batch in part for place in batch.batch_index.tolist())
    assert places == list(range(6))
    idle = [batch for part in parts for batch in part if batch.num_sequences == 0]
    assert all(
        len(batch.token_ids) == 2 and len(batch.logit_positions) == len(batch.targets) == 0 for batch in idle
    )
    assert idle or num_ranks < 7


def test_micro_batches_are_few_and_of_similar_size() -> None:
    lengths = [40 + 7 * (number % 31) for number in range(200)]
    samples = [sample(number // 8, length, number) for number, length in enumerate(lengths)]
    bins = bin_pack(samples, 2_000)
    assert sorted(entry.index for share in bins for entry in share) == list(range(200))
    total = tokens(samples)
    assert len(bins) <= -(-total // 2_000) + 1
    sizes = [tokens(share) for share in bins]
    assert max(sizes) <= 2_000
    # One after another, the last would have what is left: here 1,283.
    assert min(sizes) >= 0.85 * max(sizes)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 64, 65])
def test_packing_into_small_micro_batches_ends(max_tokens: int) -> None:
    samples = [sample(number // 2, 1 + number % 5, number) for number in range(12)]
    bins = bin_pack(samples, max_tokens)
    assert sorted(entry.index for share in bins for entry in share) == list(range(12))
    assert all(len(share) == 1 or tokens(share) <= max_tokens for share in bins)
    assert bin_pack([], max_tokens) == []
