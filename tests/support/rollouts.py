"""A codec of characters, and batches of rollouts."""

from tests.conftest import Characters


class Codec:
    """Characters of the question as tokens."""

    call_hint = ""

    def encode(self, problem):
        return tuple(3 + ord(c) % 90 for c in problem.question[-20:])

    def encode_solution(self, problem, solution):
        return tuple(ord(character) - 30 for character in solution)

    def encode_observation(self, messages, max_tokens):
        return tuple(ord(character) - 30 for message in messages for character in message["content"])

    def close_turn(self):
        return ()

    special_ids = frozenset({1})

    def turn(self, prompt, token_ids, *, keep_special=False):
        return self.decode(token_ids)

    def decode(self, token_ids, *, keep_special=False):
        return Characters().decode(token_ids)


def batch_of(source, step=1):
    source.sync_weights(step)
    return source.next_batch(step)
