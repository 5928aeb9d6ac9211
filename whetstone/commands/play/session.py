"""The episodes of `whet play`: what the player sees and says, and the score at the end.

Observations and results of tools are hostile text: everything passes `escape_controls`.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence

from whetstone.commands.chat.reader import Reader
from whetstone.commands.play.players import PlayerEngine, RecordingChat, make_player
from whetstone.config import Config
from whetstone.config.sections import ModelConfig
from whetstone.environments.toolbox import TOOLBOX, tool_schemas
from whetstone.errors import UserError
from whetstone.evaluation.statistics import accuracy, mean_interval
from whetstone.model.hub import PEBBLE, load_tokenizer
from whetstone.rollout.collector import Collector, EpisodeSettings, sampling_params
from whetstone.run.setup import make_pool, make_scorer
from whetstone.seeds import seed
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.registry import environments_of
from whetstone.terminal.text import counted, escape_controls
from whetstone.types import Group, Message, Problem

BATCH = 64  # episodes that a player of ours plays at once


class Session:
    def __init__(
        self,
        config: Config,
        chat: RecordingChat,
        reader: Reader | None,
        *,
        player: str | None,
        raw: bool,
        is_shown: bool,
    ) -> None:
        self.config, self.chat, self.reader = config, chat, reader
        self.player, self.raw, self.is_shown = player, raw, is_shown
        self.mixture = build_tasks(config, "train")
        self.engine = PlayerEngine(chat, self._ask)
        self.collector: Collector | None = None
        self._problems: list[Problem] = []
        self._players: dict[int, Callable[[str], str]] = {}
        self._first = 0  # number of the batch's first episode
        limits = config.environments
        self._max_turns = max(limits.max_turns, (limits.max_tool_calling_iterations or 0) + 1)

    def play(self, num_episodes: int) -> None:
        groups: list[Group] = []
        while len(groups) < num_episodes:
            size = min(BATCH if self.player else 1, num_episodes - len(groups))
            try:
                groups += self._play_batch(len(groups), size)
            except EOFError:
                self._say("The input has ended; the episode is not scored.")
                break
        if len(groups) > 1:
            self._say(_summary(groups))

    def _play_batch(self, first: int, size: int) -> list[Group]:
        assert self.collector is not None
        problems: dict[str, Problem] = {}  # a problem that comes again begins the next batch
        for number in range(first, first + size):
            problem = self.mixture.problem(number)
            if problem.id in problems:
                break
            problems[problem.id] = problem
        self._first, self._problems = first, list(problems.values())
        seed_parts = (self.config.tasks.dataset_seed, "play")
        self.engine.episodes = _episode_numbers(self._problems, seed_parts, first, self._max_turns)
        if self.player is not None:
            for number, problem in enumerate(self._problems):
                task = self.mixture.tasks[problem.task]
                self._players[first + number] = make_player(
                    task, problem, self.player, seed(*seed_parts, number)
                )
        groups = self.collector.collect(
            self._problems,
            num_samples=1,
            sampling=sampling_params(self.config, 1.0),
            seed_parts=seed_parts,
        )
        if self.is_shown:
            for group in groups:
                self._show_end(group)
        return groups

    def _ask(self, episode: int, new: str, messages: Sequence[Message] | None) -> str:
        problem = self._problems[episode - self._first]
        shown = list(problem.messages if messages is None else messages)
        if self.is_shown and self.raw:
            self._say(new)
        elif self.is_shown:
            self._show_messages(shown)
            if messages is None and problem.environment is None and self.config.environments.tools:
                self._say(f"[tools: {', '.join(self.config.environments.tools)}]")
            if messages is None and problem.tools:
                self._say(f"[tools: {', '.join(tool['function']['name'] for tool in problem.tools)}]")
        if self.player is None:
            assert self.reader is not None
            turn = self.reader.read().strip()
            if not sys.stdin.isatty():  # a terminal has echoed it
                self._say(turn)
            return turn
        text = self._players[episode]("\n".join(str(message["content"]) for message in shown))
        if self.is_shown:
            self._say("\n".join(f"> {line}" for line in text.splitlines()))
        return text

    def _show_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            name = f" {message['name']}" if message.get("name") else ""
            label = "" if message["role"] == "user" else f"[{message['role']}{name}] "
            self._say(f"{label}{message['content']}")

    def _show_end(self, group: Group) -> None:
        [rollout] = group.rollouts
        episode, score = rollout.episode, rollout.score
        if episode is not None and episode.messages and episode.messages[-1]["role"] != "assistant":
            self._show_messages(episode.messages[-1:])
        parts = [f"{name} {value:g}" for name, value in score.parts.items()]
        lines = [f"reward {score.reward:g}" + (f" ({', '.join(parts)})" if parts else "")]
        if episode is not None:
            lines.append(f"finish: {episode.finish.value}")
            if len(episode.rewards) > 1:
                lines.append(f"rewards of the turns: {', '.join(f'{value:g}' for value in episode.rewards)}")
            if episode.num_tool_calls:
                lines.append(
                    f"{counted(episode.num_tool_calls, 'call')} of tools, {episode.num_tool_errors} failed"
                )
            if episode.error is not None:
                lines.append(f"the environment failed: {episode.error}")
        if score.failure:
            lines.append(f"scoring failed: {score.failure}")
        self._say("-- " + "; ".join(lines))

    def _say(self, text: str) -> None:
        sys.stdout.write(escape_controls(text) + "\n")
        sys.stdout.flush()


def open_session(
    config: Config, stack: contextlib.ExitStack, *, player: str | None, raw: bool, is_shown: bool
) -> Session:
    """With scoring processes and the processes of environments, all ended by `stack`."""
    if not config.tasks.datasets:
        raise UserError("The configuration has no task to play: set datasets, or name a task.")
    chat = _chat(config.model, raw=raw)
    reader = None if player else stack.enter_context(Reader("play_history"))
    session = Session(config, chat, reader, player=player, raw=raw, is_shown=is_shown)
    scorer = stack.enter_context(make_scorer(config))
    names, tools = environments_of(config), tool_schemas(config.environments.tools)
    episodes = None
    if names or tools:
        pool = stack.enter_context(make_pool(config, [*names, *([TOOLBOX] if tools else [])]))
        episodes = EpisodeSettings(pool=pool, config=config.environments, tools=tools)
    session.collector = Collector(
        session.engine, scorer, chat, max_prompt_length=None, max_length=None, episodes=episodes
    )
    return session


def _chat(config: ModelConfig, *, raw: bool) -> RecordingChat:
    """Of the configured model; where its tokenizer can't be loaded, of the embedded one."""
    try:
        return RecordingChat(load_tokenizer(config.model_name_or_path), config)
    except UserError as error:
        if raw:
            raise
        sys.stderr.write(f"{error} Lengths are counted by the embedded model's tokenizer.\n")
    return RecordingChat(load_tokenizer(PEBBLE), ModelConfig(model_name_or_path=PEBBLE))


def _episode_numbers(
    problems: Sequence[Problem], seed_parts: tuple[int | str, ...], first: int, max_turns: int
) -> dict[int, int]:
    """Seed of a request -> number of its episode: a request names nothing else."""
    numbers = {}
    for number, problem in enumerate(problems, first):
        numbers[seed(*seed_parts, problem.id, 0)] = number
        for turn in range(1, max_turns):
            numbers[seed(*seed_parts, problem.id, 0, turn)] = number
    return numbers


def _summary(groups: Sequence[Group]) -> str:
    scores = [group.rollouts[0].score for group in groups]
    mean = mean_interval([[score.reward] for score in scores])
    text = f"{counted(len(groups), 'episode')}: reward {mean.mean:.3f} ({mean.low:.3f} to {mean.high:.3f})"
    if all("correct" in score.parts for score in scores):
        won = accuracy([[score.parts["correct"] == 1.0] for score in scores])
        text += f", won {won.mean:.1%} ({won.low:.1%} to {won.high:.1%})"
    return f"{text}; 95 % intervals."
