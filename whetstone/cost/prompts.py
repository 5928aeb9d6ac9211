"""How long prompts are: some problems of the tasks, and the model's tokenizer where this machine has it."""

from dataclasses import dataclass
from statistics import fmean

from whetstone.config.sections import Config
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.hub import load_tokenizer
from whetstone.model.shared_prefixes import shared_length
from whetstone.tasks.mixture import Mixture, build_tasks

NUM_PROBLEMS = 16
CHARACTERS_PER_TOKEN = 3.5  # of English text and numbers, where there is no tokenizer
DEFAULT_TOKENS = 200
DEFAULT_PROBLEMS = 10_000


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Mean tokens of a prompt, the number of training problems, and how they were found out."""

    tokens: int
    num_problems: int
    source: str
    shared: int = 0  # tokens with which all prompts begin, where the update runs them once


def look_at_prompts(config: Config) -> Prompts:
    """Never fails: a plan is wanted before the data is there."""
    try:
        tasks = build_tasks(config, "train", [])
        problems = [tasks.problem(index) for index in range(min(NUM_PROBLEMS, len(tasks)))]
    except (UserError, OSError) as error:
        tokens, reason = DEFAULT_TOKENS, f"assumed, since the problems can't be made here: {error}"
        return Prompts(tokens=tokens, num_problems=DEFAULT_PROBLEMS, source=reason)
    characters = fmean(sum(len(m["content"]) for m in problem.messages) for problem in problems)
    tokens, source = round(characters / CHARACTERS_PER_TOKEN) + 20, "by their letters"
    chat = _local_chat(config)
    if chat is not None:
        return count_prompts(config, tasks, chat)
    limit = config.rollout.max_prompt_length or tokens
    return Prompts(tokens=min(tokens, limit), num_problems=len(tasks), source=source)


def count_prompts(config: Config, tasks: Mixture, chat: Chat) -> Prompts:
    """By the tokens of some problems."""
    problems = [tasks.problem(index) for index in range(min(NUM_PROBLEMS, len(tasks)))]
    encoded = [tuple(chat.encode(problem)) for problem in problems]
    mean = round(fmean(map(len, encoded)))
    tokens = min(mean, config.rollout.max_prompt_length or mean)
    shared = min(tokens - 1, *(shared_length(encoded[0], ids) for ids in encoded))
    source = f"the mean of {len(problems)} problems"
    return Prompts(tokens=tokens, num_problems=len(tasks), source=source, shared=shared)


def _local_chat(config: Config) -> Chat | None:
    try:
        tokenizer = load_tokenizer(config.model.model_name_or_path, local_files_only=True)
        return Chat(tokenizer, config.model)
    except UserError:  # not on this machine, or broken, which the run itself will say
        return None
