"""A player in the place of a model: the engine asks it for a turn, everything else is that of training."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.environments.games import GAMES
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.tasks.base import Task
from whetstone.types import Completion, Finish, Message, Problem

# Number of the episode, what is new as text, and as messages (None: the opening) -> a turn.
Ask = Callable[[int, str, Sequence[Message] | None], str]
PLAYERS = ("random", "gold")


class RecordingChat(Chat):
    """Remembers which messages an observation's tokens stand for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.observations: dict[tuple[int, ...], tuple[Message, ...]] = {}

    def encode_observation(self, messages: Sequence[Message], max_tokens: int) -> tuple[int, ...]:
        ids = super().encode_observation(messages, max_tokens)
        self.observations[ids] = tuple(messages)
        return ids

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """The tokens of a turn that a player says, with the token that ends it."""
        return (*self.tokenizer(text, add_special_tokens=False)["input_ids"], *self._end_of_turn)


class PlayerEngine:
    """Samples nothing: `ask` says each turn (`engines.base.Engine`)."""

    def __init__(self, chat: RecordingChat, ask: Ask) -> None:
        self.chat, self.ask = chat, ask
        self.episodes: dict[int, int] = {}  # seed of a request -> number of its episode
        self._histories: dict[int, tuple[int, ...]] = {}  # of episodes: tokens up to the last turn

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        for number, request in enumerate(requests):
            prompt, episode = tuple(request.prompt_ids), self.episodes[request.seeds[0]]
            new = prompt[len(self._histories.get(episode, ())) :]
            messages = self.chat.observations[new] if episode in self._histories else None
            text = self.ask(episode, self.chat.decode(new, keep_special=True), messages)
            ids = self.chat.encode_turn(text)
            limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens[0]
            finish = Finish.STOP if len(ids) <= limit else Finish.LENGTH
            ids = ids[:limit]
            self._histories[episode] = prompt + ids
            logprobs = (0.0,) * len(ids)
            completion = Completion(token_ids=ids, logprobs=logprobs, finish=finish, policy_version=0)
            yield GenerationOutput(request=number, sample=0, completion=completion)

    def update_weights(self, policy_version: int) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def make_player(task: Task, problem: Problem, kind: str, seed: int) -> Callable[[str], str]:
    """A player of one problem: observation -> turn. Without a player of its own, gold is the gold answer and
    random is that of another problem.
    """
    game: Any = GAMES.get(problem.environment or "") or getattr(type(task), "factory", None)
    make: Any = getattr(game, f"{kind}_player", None)
    if make is not None:
        return make(**task.settings) if kind == "gold" else make(seed, **task.settings)
    answer = task.gold(problem if kind == "gold" else _other(task, problem, seed))
    if answer is None:
        raise UserError(
            f"The task {task.name} has no {kind} player: give the environment a static method {kind}_player, "
            "or play it yourself."
        )
    return lambda observation: answer


def _other(task: Task, problem: Problem, seed: int) -> Problem:
    """Another problem of the task."""
    for step in range(1, min(len(task), 50)):
        other = task.problem((seed + step) % len(task))
        if other.identity != problem.identity:
            return other
    raise UserError(f"The task {task.name} has one problem only, so there is no random answer to it.")
