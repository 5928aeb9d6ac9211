"""Files of rows of every usual shape, right and broken: the prompt that a reader expects, or one sentence.

`RIGHT` and `BROKEN` are the table. The real reader reads every file; `whet train` and `whet sft` train a step
of the embedded model on some of them, and on all with `-m slow`.
"""

import csv
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest

from whetstone import __main__ as cli
from whetstone.config import load
from whetstone.tasks.mixture import build_tasks, check_gold
from whetstone.tasks.own_rows import RowsTask

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}
TOOL_TURN = said("", tool_calls=[call("Oslo")])
SUM, OTHER = "What is 2 + 3?", "What is 2 + 4?"
CHOICES = f"{SUM}\nA) 4\nB) 5\nC) 6"
TEXTS = ["4", "5", "6"]
FOUR = {"A": "4", "B": "5", "C": "6"}
SHAREGPT = [{"from": "human", "value": SUM}, {"from": "gpt", "value": "It is 5."}]
# A second row, so that the reader decides by more than one.
ROWS = [{"question": SUM, "answer": "5"}, {"question": OTHER, "answer": "6"}]


class Right(NamedTuple):
    """A file, and what its first row has to be."""

    name: str  # of the file
    rows: list[dict[str, Any]] | str | bytes
    prompt: tuple[dict[str, Any], ...]
    answer: str | None = None
    match: str = "numeric"
    settings: str = ""
    solution: Any = None  # where it is for `whet sft`
    tools: tuple[Any, ...] = ()
    note: str = ""  # in the sentence about the rows


def right(name: str, rows: Any, prompt: Any, *rest: Any, **fields: Any) -> Right:
    return Right(name, rows, (user(prompt),) if isinstance(prompt, str) else tuple(prompt), *rest, **fields)


def text(rows: list[dict[str, Any]], separator: str = ",") -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def with_choices(**columns: Any) -> list[dict[str, Any]]:
    other = {key: value for key, value in columns.items() if key != "answer"}
    return [{"question": SUM, **columns}, {"question": OTHER, **other, "answer": columns["answer"]}]


RIGHT = [
    # question and answer
    right("qa.jsonl", ROWS, SUM, "5", note="prompt from question, answer from answer (numbers)"),
    right("qa.json", ROWS, SUM, "5"),
    right("qa.csv", text(ROWS), SUM, "5"),
    right("qa.parquet", ROWS, SUM, "5"),
    right("data.json", json.dumps({"data": ROWS}), SUM, "5"),
    right("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS), SUM, "5"),
    right("columns.json", json.dumps({"question": [SUM, OTHER], "answer": [5, 6]}), SUM, "5"),
    right("semicolons.csv", text(ROWS, ";"), SUM, "5"),
    right("tabs.csv", text(ROWS, "\t"), SUM, "5"),
    right("tabs.tsv", text(ROWS, "\t"), SUM, "5"),
    right("excel.csv", ("\ufeff" + text(ROWS, ";")).encode(), SUM, "5"),
    right("capitals.csv", f"Question,Answer\n{SUM},5\n{OTHER},6\n", SUM, "5", note="prompt from Question"),
    right("spaces.csv", f"question, answer\n{SUM},5\n{OTHER},6\n", SUM, "5"),
    right("index.csv", f",question,answer\n0,{SUM},5\n1,{OTHER},6\n", SUM, "5"),
    right(
        "words.jsonl",
        [{"question": "Capital of France?", "answer": "Paris"}],
        "Capital of France?",
        "Paris",
        "normalized",
    ),
    right("gsm8k.jsonl", [{"question": SUM, "answer": "2+3=<<2+3=5>>5\n#### 5"}], SUM, "5"),
    right(
        "boxed.jsonl",
        [{"problem": SUM, "solution": r"So \boxed{\frac{10}{2}}."}],
        SUM,
        r"\frac{10}{2}",
        "math",
    ),
    right("unused.jsonl", [{"id": 7, **ROWS[0], "level": "easy"}], SUM, "5", note="not used: id, level"),
    right("named.csv", f"q,a\n{SUM},5\n{OTHER},6\n", SUM, "5", settings="prompt_column=q answer_column=a"),
    # chat messages
    right(
        "chat.jsonl",
        [{"messages": [system("Be brief."), user(SUM), said("5")], "answer": 5}],
        [system("Be brief."), user(SUM)],
        "5",
    ),
    right("chat_text.csv", text([{"messages": json.dumps([user(SUM)]), "answer": 5}]), SUM, "5"),
    right("chat.parquet", [{"prompt": [user(SUM)], "answer": "5"}], SUM, "5"),
    right(
        "parts.json",
        [{"prompt": [{"role": "user", "content": [{"type": "text", "text": SUM}]}], "answer": 5}],
        SUM,
        "5",
    ),
    right(
        "tool_history.jsonl",
        [
            {
                "messages": [
                    user("Snow in Oslo?"),
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "snow"},
                ],
                "tools": json.dumps([WEATHER]),
                "answer": "yes",
            }
        ],
        [
            user("Snow in Oslo?"),
            said("", tool_calls=[{"id": "a", **call("Oslo")}]),
            {"role": "tool", "content": "snow", "tool_call_id": "a", "name": "weather"},
        ],
        "yes",
        "normalized",
        tools=(TOOL,),
        note="tools from tools",
    ),
    right(
        "tools.parquet",
        [{"messages": [user("Snow in Oslo?")], "tools": [TOOL], "answer": "yes"}],
        "Snow in Oslo?",
        "yes",
        "normalized",
        tools=(TOOL,),
    ),
    right("sharegpt.json", [{"conversations": SHAREGPT[:1], "answer": "5"}], SUM, "5"),
    # prompt and completion
    right("completion.jsonl", [{"prompt": SUM, "completion": "5"}], SUM, "5", note="answer from completion"),
    right("chat_completion.parquet", [{"prompt": [user(SUM)], "completion": [said("5")]}], SUM, "5"),
    # Alpaca
    right(
        "alpaca.json",
        [{"instruction": "Add.", "input": "2 and 3", "output": "5"}],
        "Add.\n\n2 and 3",
        "5",
        note="prompt from instruction + input, answer from output",
    ),
    right(
        "dolly.jsonl",
        [{"instruction": "Add.", "context": "2 and 3", "response": "5", "category": "qa"}],
        "Add.\n\n2 and 3",
        "5",
        note="prompt from instruction + context, answer from response (numbers); not used: category",
    ),
    right("alpaca_without_input.csv", text([{"instruction": SUM, "input": "", "output": "5"}]), SUM, "5"),
    right(
        "system.jsonl",
        [{"system_prompt": "Be brief.", "question": SUM, "response": "5"}],
        [system("Be brief."), user(SUM)],
        "5",
    ),
    # multiple choice
    right(
        "mmlu.jsonl",
        with_choices(choices=TEXTS, answer=1),
        CHOICES,
        "B",
        "letter",
        note="options from choices, answer from answer (letters of options, each the number from 0",
    ),
    right("verbatim.jsonl", [{"question": f"{SUM}\nAnswer:\n", "answer": "5"}], f"{SUM}\nAnswer:\n", "5"),
    right("mmlu.parquet", with_choices(choices=TEXTS, answer=1), CHOICES, "B", "letter"),
    right(
        "own_letters.jsonl", with_choices(options=["A)4", "B)5", "C)6"], answer="B"), CHOICES, "B", "letter"
    ),
    right("letters.json", with_choices(options=TEXTS, answer="B"), CHOICES, "B", "letter"),
    right("option_text.jsonl", with_choices(options=TEXTS, answer="5"), CHOICES, "B", "letter"),
    right(
        "from_one.jsonl",
        [
            {"question": SUM, "options": TEXTS, "answer": 2},
            {"question": OTHER, "options": TEXTS, "answer": 3},
        ],
        CHOICES,
        "B",
        "letter",
    ),
    right(
        "arc.parquet",
        [{"question": SUM, "choices": {"text": TEXTS, "label": ["1", "2", "3"]}, "answerKey": "2"}],
        CHOICES,
        "B",
        "letter",
    ),
    right("mapping.jsonl", with_choices(options=FOUR, answer="B"), CHOICES, "B", "letter"),
    right(
        "columns.csv",
        text([{"question": SUM, **FOUR, "answer": "B"}]),
        CHOICES,
        "B",
        "letter",
        note="options from A + B + C",
    ),
    right(
        "lower.csv",
        text([{"question": SUM, **{key.lower(): value for key, value in FOUR.items()}, "answer": "b"}]),
        CHOICES,
        "B",
        "letter",
        note="options from a + b + c",
    ),
    right("quantities.csv", text([{"question": SUM, "a": 2, "b": 3, "answer": 5}]), SUM, "5"),
    right(
        "option_columns.csv",
        text([{"question": SUM, "opa": 4, "opb": 5, "opc": 6, "answer": "1"}]),
        CHOICES,
        "B",
        "letter",
    ),
    right(
        "choices_text.csv",
        text([{"question": SUM, "choices": json.dumps(TEXTS), "answer": "B"}]),
        CHOICES,
        "B",
        "letter",
    ),
    right("in_the_text.jsonl", [{"question": CHOICES, "answer": "(B)"}], CHOICES, "(B)", "letter"),
    right(
        "shown_already.jsonl",
        [{"question": CHOICES, "choices": TEXTS, "answer": "B"}],
        CHOICES,
        "B",
        "letter",
    ),
    # verl, nested columns, templates
    right(
        "verl.parquet",
        [
            {
                "data_source": "sums",
                "prompt": [user(SUM)],
                "ability": "math",
                "extra_info": {"index": 0},
                "reward_model": {"style": "rule", "ground_truth": "5"},
            }
        ],
        SUM,
        "5",
        note="answer from reward_model.ground_truth (numbers); not used: data_source, ability, extra_info",
    ),
    right(
        "nested.jsonl",
        [{"row": {"q": SUM, "a": ["5"]}}],
        SUM,
        "5",
        settings="prompt_column=row.q answer_column=row.a.0",
    ),
    right(
        "template.csv",
        text([{"a": 2, "b": 3, "answer": 5}]),
        "What is 2 + 3? {No words}",
        "5",
        settings="'prompt=What is {a} + {b}? {{No words}}'",
    ),
    right(
        "nested_template.jsonl",
        [{"row": {"a": 2}, "answer": 5}],
        "2 + 3 = ?",
        "5",
        settings="'prompt={row.a} + 3 = ?'",
    ),
    right(
        "choice_template.jsonl",
        with_choices(choices=TEXTS, answer=1),
        f"Choose.\n{CHOICES}",
        "B",
        "letter",
        settings="""'prompt="Choose.\\n{question}\\n{choices}"'""",
    ),
    right(
        "unclear.jsonl",
        with_choices(choices=["4", "5", "6"], answer=1),
        f"{SUM}\nA) 4\nB) 5\nC) 6",
        "B",
        "letter",
        note="each the number from 0 of an option; from 1 would be possible, too: give letters",
    ),
    right(
        "gap.parquet",
        with_choices(choices=["5", None, "6", "7"], answer=2),
        f"{SUM}\nA) 5\nB) 6\nC) 7",
        "B",
        "letter",
    ),
    # supervised
    right(
        "sft_chat.jsonl",
        [{"messages": [user(SUM), said("It is 5.")]}],
        SUM,
        None,
        "none",
        solution="It is 5.",
    ),
    right(
        "sft_chat_text.csv",
        text([{"messages": json.dumps([user(SUM), said("It is 5.")])}]),
        SUM,
        None,
        "none",
        solution="It is 5.",
    ),
    right(
        "sft_completion.parquet",
        [{"prompt": SUM, "completion": " It is 5.\n#### 5"}],
        SUM,
        None,
        "none",
        solution=" It is 5.\n#### 5",
    ),
    right(
        "sft_continued.jsonl",
        [
            {
                "prompt": [user(SUM)],
                "completion": [
                    said("", tool_calls=[call("Oslo")]),
                    {"role": "tool", "content": "snow"},
                    said("It is 5."),
                ],
            }
        ],
        [user(SUM), said("", tool_calls=[call("Oslo")]), {"role": "tool", "content": "snow"}],
        None,
        "none",
        solution="It is 5.",
    ),
    right(
        "sft_call.jsonl",
        [{"messages": [user("Snow in Oslo?"), {**TOOL_TURN, "content": None}], "tools": [TOOL]}],
        "Snow in Oslo?",
        None,
        "none",
        solution=TOOL_TURN,
        tools=(TOOL,),
    ),
    right(
        "sft_sharegpt.json",
        [
            {
                "conversations": [
                    {"from": "human", "value": "Snow in Oslo?"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                    {"from": "observation", "value": "snow"},
                    {"from": "gpt", "value": "Yes."},
                ],
                "tools": json.dumps([WEATHER]),
            }
        ],
        [user("Snow in Oslo?"), said("", tool_calls=[call("Oslo")]), {"role": "tool", "content": "snow"}],
        None,
        "none",
        solution="Yes.",
        tools=(TOOL,),
    ),
    right(
        "sft_alpaca.json",
        [{"instruction": "Add.", "input": "2 and 3", "output": "It is 5."}],
        "Add.\n\n2 and 3",
        None,
        "none",
        solution="It is 5.",
    ),
    right(
        "sft_chosen.jsonl",
        [{"prompt": SUM, "chosen": "It is 5.", "rejected": "4"}],
        SUM,
        None,
        "none",
        solution="It is 5.",
        note="not used: rejected",
    ),
    right(
        "sft_chosen_chat.jsonl",
        [{"chosen": [user(SUM), said("5")], "rejected": [user(SUM), said("4")]}],
        SUM,
        None,
        "none",
        solution="5",
    ),
    right(
        "sft_kto.jsonl",
        [
            {"prompt": SUM, "completion": "It is 5.", "label": True},
            {"prompt": OTHER, "completion": "Who knows.", "label": False},
        ],
        SUM,
        None,
        "none",
        solution="It is 5.",
        note="1 to train on, 1 left out (rated bad, or empty); prompt from prompt, rating from label",
    ),
    right(
        "sft_gsm8k.jsonl",
        [{"question": SUM, "answer": "2+3=<<2+3=5>>5\n#### 5"}],
        SUM,
        "5",
        "numeric",
        solution="2+3=<<2+3=5>>5\n#### 5",
    ),
    right("sft_answer.jsonl", ROWS, SUM, "5", "numeric", solution="<answer>5</answer>"),
    right("sft_answer_as_written.jsonl", ROWS, SUM, "5", settings="solution_column=answer", solution="5"),
    right(
        "sft_solution.jsonl",
        [{"question": SUM, "solution": "Two and three."}],
        SUM,
        "Two and three.",
        "normalized",
        solution="Two and three.",
    ),
    right(
        "sft_two_turns.jsonl",
        [{"messages": [user(SUM), said("I add."), said("It is 5.")]}],
        [user(SUM), said("I add.")],
        None,
        "none",
        solution="It is 5.",
    ),
]
BROKEN = [  # name of the file, rows, settings, what the sentence says
    (
        "cp1252.csv",
        "question,answer\nZürich?,5\n".encode("cp1252"),
        "",
        r"byte 18 is not UTF-8.*iconv -f cp1252",
    ),
    ("utf16.csv", text(ROWS).encode("utf-16"), "", r"not UTF-8 text.*utf-16"),
    ("quote.csv", 'question,answer\n"2+3?,5\n', "", r"line 2|unexpected end"),
    (
        "lost.jsonl",
        [{"text": SUM, "label": "5"}],
        "",
        r"no filled column prompt or question.*set prompt_column",
    ),
    ("misspelt.jsonl", ROWS, "prompt_column=qestion", r"no filled column 'qestion'.*question, answer"),
    ("empty.jsonl", [{"question": SUM, "answer": ""}], "", r"no answers to compare.*answer_column"),
    ("object.jsonl", [{"question": SUM, "answer": {"value": 5}}], "", r"row 1 .*answer_column=answer\.FIELD"),
    ("template.jsonl", ROWS, """'prompt="{qestion}"'""", r"placeholder \{qestion\}: did you mean 'question'"),
    ("attribute.jsonl", ROWS, """'prompt="{question.__class__}"'""", r"placeholder \{question.__class__\}"),
    ("no_quotes.jsonl", ROWS, "'prompt={question}'", r"prompt.* is a dict: write it in quotes"),
    ("both.jsonl", ROWS, """'prompt="{question}"' prompt_column=question""", "leave one of them out"),
    ("python_text.csv", text([{"messages": str([user(SUM)]), "answer": 5}]), "", r"row 1 .*json\.dumps"),
    (
        "tool.jsonl",
        [{"messages": [user(SUM)], "tools": [{"title": "f"}], "answer": 5}],
        "",
        r"row 1 .*a tool",
    ),
    ("seventh.jsonl", with_choices(choices=TEXTS, answer=7), "", r"row 1 .*none of 3 options"),
    (
        "words.csv",
        text([{"question": SUM, "choices": "4 or 5", "answer": "B"}]),
        "",
        r"row 1 .*list of texts",
    ),
    ("kto.jsonl", [{"prompt": SUM, "completion": "4", "label": False}], "", r"preferences.*whet sft"),
    ("accepted.jsonl", [{"question": SUM, "answer": ["5", "five"]}], "", r"row 1 .*answer_column=answer\.0"),
    ("pandas.json", json.dumps({"question": {"0": SUM}}), "", r"one object.*orient='records'"),
    ("indented.jsonl", json.dumps(ROWS[0], indent=2), "", r"line 1: .*write one object per line"),
    ("preferences.jsonl", [{"prompt": SUM, "chosen": "5", "rejected": "4"}], "", r"preferences.*whet sft"),
    (
        "picture.jsonl",
        [{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 5}],
        "",
        r"row 1 .*a message is",
    ),
]


def write(folder: Path, name: str, rows: Any) -> Path:
    path = folder / name
    if not isinstance(rows, list):
        path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(path: Path, case: Right) -> list[str]:
    words = [f"data_path={path}", "model_name_or_path=pebble", "developer_prompt=null", "eval_num_samples=0"]
    return [*words, *(["loss_type=sft"] if case.solution else []), *shlex.split(case.settings)]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.name)
def test_rows_become_the_prompt_that_a_reader_expects(tmp_path: Path, case: Right):
    config = load("rows", settings(write(tmp_path, case.name, case.rows), case)).config
    mixture = build_tasks(config, "train")
    check_gold(mixture)
    task = mixture.tasks["rows"]
    assert isinstance(task, RowsTask)
    problem = task.problem(0)
    assert (problem.messages, problem.answer["answer"], task.match) == (case.prompt, case.answer, case.match)
    assert problem.tools == case.tools
    assert case.solution is None or task.solution(problem) == case.solution
    assert case.note in task.notes()[0]
    is_tagged = str(case.solution).startswith("<answer>")
    assert any("bare answers are trained between <answer>" in note for note in task.notes()) == is_tagged


@pytest.mark.parametrize(("name", "rows", "extra", "sentence"), BROKEN, ids=[case[0] for case in BROKEN])
def test_broken_rows_end_in_one_sentence(
    tmp_path: Path, name: str, rows: Any, extra: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    path = write(tmp_path, name, rows)
    words = ["model_name_or_path=pebble", "eval_num_samples=0", f"output_dir={tmp_path}", *shlex.split(extra)]
    assert cli.run(["train", "rows", f"data_path={path}", *words]) == 2
    told = capsys.readouterr().err
    assert re.search(sentence, told) and told.count("\n") == 1 and len(told) < 700, told


FAST = ("mmlu.parquet", "tool_history.jsonl", "sft_sharegpt.json", "sft_call.jsonl", "sft_completion.parquet")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in FAST else pytest.mark.slow) for case in RIGHT],
    ids=lambda case: case.name,
)
def test_a_step_is_trained(tmp_path: Path, case: Right):
    path = write(tmp_path, case.name, case.rows)
    small = (
        "max_steps=1 prompts_per_step=2 num_generations=2 max_completion_length=8 preflight=off "
        f"save_strategy=no reward_workers=1 report_to=none output_dir={tmp_path}/out run_name=run"
    )
    verb = "sft" if case.solution else "train"
    words = [word for word in settings(path, case) if not word.startswith("loss_type")]
    assert cli.run([verb, "rows", *words, *small.split()]) == 0
    row = json.loads((tmp_path / "out/run/metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 1 and row["kind"] == "train"
