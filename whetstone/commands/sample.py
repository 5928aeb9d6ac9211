"""`whet sample`: answers of a model to prompts, for scripts."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from whetstone.commands.parser import CommandParser, number
from whetstone.commands.sampling import add_sampling, open_sampler, read_input, sampling_settings
from whetstone.errors import UserError
from whetstone.files import json_safe
from whetstone.inference.prompts import check_messages
from whetstone.terminal.text import counted, escape_controls

if TYPE_CHECKING:
    from whetstone.inference.answers import Answer
    from whetstone.inference.sampler import Sampler
    from whetstone.types import Problem, Score

DESCRIPTION = """
Sample answers to prompts. FILE is a text, a JSON list of messages, or .jsonl with a prompt in each line: a
text, a list of messages, or an object with `prompt` or `messages`. - is standard input.
--problem takes a problem of the run's own tasks by its id, with the score of each answer.
With --json each answer is a line: prompt, sample, text, finish, token_ids, logprobs.
"""
EXAMPLES = """
whet sample outputs/quickstart --prompt question.txt -n 8
whet sample outputs/quickstart --text 'What is 4 + 73 - 12?' --temperature 0
whet sample outputs/quickstart --prompt prompts.jsonl --json > answers.jsonl
whet sample outputs/quickstart --problem chain_sum/eval/000003 -n 8
"""


def add_arguments(parser: CommandParser) -> None:
    add_sampling(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="FILE", help="a file of prompts; - for standard input")
    source.add_argument("--text", help="the prompt itself")
    source.add_argument("--problem", metavar="ID", help="a problem of the run by its id")
    parser.add_argument("-n", type=number(int, 1), metavar="N", default=1, help="answers per prompt (1)")
    parser.add_argument("--json", action="store_true", help="JSON, an answer a line")


def run(args: argparse.Namespace) -> None:
    if args.text is not None:
        prompts = [args.text]
    else:
        prompts = [] if args.prompt is None else read_prompts(args.prompt)
    sampler = open_sampler(args)
    problem = scores = None
    if args.problem is not None:
        problem = _problem(sampler, args.problem)
        prompts = [problem.messages]
    settings = {"system": args.system, "seed": args.seed, **sampling_settings(args)}
    answers = sampler.sample_batch(prompts, args.n, **settings)
    if problem is not None:
        from whetstone.inference.problems import score_answers

        scores = score_answers(sampler.source.config, sampler.chat, problem, answers[0])
    if args.json:
        _print_json(answers, problem, scores)
    else:
        _print_text(answers, problem, scores)


def read_prompts(name: str) -> list[Any]:
    """The prompts of a file, or of standard input."""
    try:
        text = read_input(name).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--prompt: {name} can't be read ({error.strerror}): give another file.") from None
    except UnicodeDecodeError:
        raise UserError(f"--prompt: {name} is not UTF-8 text: convert it to UTF-8.") from None
    if not text.strip():
        raise UserError(f"--prompt: {name} is empty: write a prompt into it.")
    if name.endswith(".jsonl"):
        lines = [(f"line {index} of {name}", line) for index, line in enumerate(text.split("\n"), 1)]
        return [_parse_prompt(line, where) for where, line in lines if line.strip()]
    is_conversation = name.endswith(".json") or (name == "-" and text.lstrip().startswith("[{"))
    return [_parse_prompt(text, name) if is_conversation else text.strip()]


def _parse_prompt(text: str, where: str) -> Any:
    """JSON: a text, a list of messages, or an object with one of them under `prompt` or `messages`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"--prompt: {where} is not JSON: give a text or a list of messages.") from None
    if isinstance(value, dict):
        value = value.get("prompt", value.get("messages"))
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list):
        raise UserError(
            f"--prompt: {where} has no prompt: give a text, a list of messages, or an object with one of "
            "them as `prompt` or `messages`."
        )
    return check_messages(value)


def _problem(sampler: "Sampler", name: str) -> "Problem":
    from whetstone.inference.problems import find_problem

    if sampler.source.run is None:
        raise UserError(f"--problem: {sampler.source.name} belongs to no run: give a run, or use --prompt.")
    return find_problem(sampler.source.config, name)


def _print_json(
    answers: "list[list[Answer]]", problem: "Problem | None", scores: "list[Score] | None"
) -> None:
    for index, own in enumerate(answers):
        for sample, answer in enumerate(own):
            row: dict[str, Any] = {"prompt": index, "sample": sample, "text": answer.text}
            row |= {"finish": answer.finish, "token_ids": answer.token_ids, "logprobs": answer.logprobs}
            if problem is not None and scores is not None:
                score = scores[sample]
                row |= {"problem": problem.id, "reward": score.reward, "parts": dict(score.parts)}
            print(json.dumps(json_safe(row)))


def _print_text(
    answers: "list[list[Answer]]", problem: "Problem | None", scores: "list[Score] | None"
) -> None:
    """The answers; with a line before each where there are several."""
    if problem is not None:
        print(f"--- {problem.id}\n{escape_controls(problem.question)}")
    for index, own in enumerate(answers):
        for sample, answer in enumerate(own):
            title = f"prompt {index + 1}, " * (len(answers) > 1) + f"answer {sample + 1}"
            title += f" ({counted(len(answer.token_ids), 'token')}, {answer.finish})"
            if scores is not None:
                parts = ", ".join(f"{part} {value:g}" for part, value in scores[sample].parts.items())
                title += f": reward {scores[sample].reward:g} ({parts})"
            if len(answers) * len(own) > 1 or scores is not None:
                print(f"--- {title}")
            print(escape_controls(answer.text))
