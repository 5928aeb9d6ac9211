"""Rows of any usual shape -> prompt, answer, solution, tools. Nothing else looks at columns.

docs/data.md has the shapes. A column may be nested (`reward_model.ground_truth`), and the setting `prompt` is
a template over columns.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter, ascii_uppercase
from typing import Any

from whetstone.errors import UserError
from whetstone.rewards.answers import final_answer
from whetstone.rewards.matching import OPTION_LINE, letter_of
from whetstone.tasks.prompts import Messages, check_template, without_solution
from whetstone.tasks.row_files import Row, parse_plain, short_repr
from whetstone.types import normal_form

CHAT_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "question", "problem", *CHAT_COLUMNS, "query", "instruction", "input")
ANSWER_COLUMNS = (
    *("ground_truth", "answer", "solution", "target", "label", "final_answer", "answerKey"),
    *("correct_answer", "reward_model.ground_truth"),
)
COMPLETION_COLUMNS = ("completion", "response", "output")
SOLUTION_COLUMNS = ("completion", "solution", "response", "output", "chosen")
_OPTION_COLUMN = re.compile(r"(?i:(?:(?:option|choice)_?)?[a-j]|op[a-d])")
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_KEPT_FIELDS = ("tool_call_id", "name", "reasoning_content", "thinking")
_FIELDS = {"role", "content", "from", "value", "tool_calls", *_KEPT_FIELDS}
_CHAT_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](?:role|from|content|value)['\"]")
_FORMS = ("letter", "text", "number from 0", "number from 1")  # how an answer names one of several options


@dataclass(frozen=True, kw_only=True)
class Example:
    """What one row says."""

    number: int  # of the row, from 1
    columns: Row
    messages: Messages
    options: Mapping[str, str]  # label in the row -> text; the prompt shows the texts with letters
    answer: str | None  # of several options the letter; None: it has none
    solution: Mapping[str, Any] | None  # the assistant's message that supervised training imitates
    tools: tuple[Mapping[str, Any], ...]


class Reader:
    """Finds the columns of a source, by the settings of a task or by their usual names."""

    def __init__(self, rows: Sequence[Row], settings: Mapping[str, Any], where: str) -> None:
        self.rows, self.settings, self.where = rows, settings, where
        self.columns = list(dict.fromkeys(str(name) for row in rows for name in row))
        self.roles: dict[str, tuple[str, ...]] = {}  # what was read -> from which columns
        self.also_used: tuple[str, ...] = ()
        self._by_case = {name.strip().casefold(): name for name in reversed(self.columns)}
        self._form_of_answers = ""

    def find(self, setting: str, usual: Iterable[str], *, alias: str = "", is_needed: bool = False) -> str:
        """The column of a setting (or its alias), or the first usual one that a row fills; empty: none."""
        wanted = self.settings.get(setting) or self.settings.get(alias)
        column = self._first((wanted,) if wanted else usual)
        if column:
            self.roles[setting.removesuffix("_column")] = (column,)
        elif wanted or is_needed:
            remedy = f"set {setting} to one of its columns ({list_columns(self.columns)})"
            remedy = remedy if self.columns else "write one object with named columns per row"
            if {"nums", "target"} <= {*self.columns} and setting == "prompt_column":
                remedy += "; the task countdown writes prompts for such rows, datasets={countdown: {}}"
            name = f"'{wanted}'" if wanted else " or ".join(dict.fromkeys(usual))
            raise UserError(f"{self.where} has no filled column {name}: {remedy}.")
        return column

    def _first(self, names: Iterable[str]) -> str:
        return next(filter(None, map(self._filled, names)), "")

    def _filled(self, name: str) -> str:
        """The column of that name, in any case or nested, if any row fills it; otherwise empty."""
        is_nested = name.partition(".")[0] in self.columns
        column = name if name in self.columns or is_nested else self._by_case.get(name.casefold(), "")
        return column if any(not is_missing(cell(row, column)) for row in self.rows) else ""

    def describe(self, answer_kind: str = "") -> str:
        """`prompt from question, answer from answer (numbers); not used: id`"""
        kinds = {"answer": f" ({answer_kind}{self._form_of_answers})" if answer_kind else ""}
        roles = self.roles.items()
        parts = [f"{role} from {list_columns(names, ' + ')}{kinds.get(role, '')}" for role, names in roles]
        used = {*self.also_used}.union(*self.roles.values())
        used |= {name.partition(".")[0] for name in used}
        unused = [name for name in self.columns if name not in used]
        turns = [turn for row in self.rows for name in used for turn in _chat_objects(row.get(name))]
        fields = {str(key) for turn in turns for key, value in turn.items() if value}
        unused += sorted(f"message field {field}" for field in fields - _FIELDS)
        return ", ".join(parts) + (f"; not used: {list_columns(unused)}" if unused else "")

    def read(self, *, imitates: bool, compares_completions: bool) -> list[Example]:
        """All rows that have a prompt, with solutions to imitate, or with completions as answers."""
        self._imitates, self._template = imitates, self.settings.get("prompt")
        self._prompt = self._choose_prompt()
        self._system = self.find("system_column", ("system", "system_prompt"))
        self._choices = self._choose_options()
        self._tools = self.find("tools_column", ("tools",))
        usual = (*ANSWER_COLUMNS, *(COMPLETION_COLUMNS if compares_completions else ()))
        if all(isinstance(row.get("label"), bool) for row in self.rows) and self._first(COMPLETION_COLUMNS):
            self.roles["rating"], usual = ("label",), ()  # KTO's, of the completion: it is no answer
        used, self._answer = set().union(*self.roles.values()), ""
        if self.settings.get("match") != "none":
            self._answer = self.find("answer_column", [name for name in usual if name not in used])
        solution = self.find("solution_column", ()) if imitates else ""
        self._solutions = (solution,) if solution else tuple(map(self._filled, SOLUTION_COLUMNS))
        examples = [self._example(number, row) for number, row in enumerate(self.rows, 1)]
        return self._with_letters([example for example in examples if example.messages])

    def _choose_prompt(self) -> str:
        """The column of prompts; empty for a template over columns."""
        if self._template is not None:
            if self.settings.get("prompt_column") or self.settings.get("question_column"):
                raise UserError(f"{self.where} has both prompt and prompt_column set: leave one of them out.")
            nested = re.findall(r"\{([^{}]+\.[^{}]+)\}", str(self._template))
            known = [*self.columns, *filter(self._filled, nested)]
            names = check_template(self._template, known, "The setting `prompt`")
            self.roles["prompt"] = tuple(dict.fromkeys(names))
            return ""
        usual = (*CHAT_COLUMNS, *PROMPT_COLUMNS) if self._imitates else PROMPT_COLUMNS
        if any(_chat_objects(row.get("chosen")) for row in self.rows):
            usual = (*usual, "chosen")  # preferences of which both answers begin with the prompt
        column = self.find("prompt_column", usual, alias="question_column", is_needed=True)
        if column == "instruction" and (more := self._first(("input", "context"))):  # Alpaca's, Dolly's
            self.roles["prompt"] = (column, more)
        return column

    def _choose_options(self) -> tuple[str, ...]:
        """The column that holds all options of a question, or the columns that hold one each."""
        column = self.find("choices_column", ("choices", "options"))
        names = sorted(filter(_OPTION_COLUMN.fullmatch, self.columns), key=lambda name: name[-1].upper())
        answer = self.settings.get("answer_column") or self._first(ANSWER_COLUMNS)
        if "a" in names and not all(letter_of(str(cell(row, answer) or "a")) for row in self.rows):
            names = []  # quantities
        letters = "".join(name[-1].upper() for name in names)
        is_complete = letters[:2] == "AB" and ascii_uppercase.startswith(letters)
        options = (column,) if column else tuple(names if is_complete else ())
        shown = {name.partition(".")[0] for name in self.roles["prompt"]}
        options = options if self._template is None or shown & {*options} else ()
        self.roles.pop("choices", None)
        self.roles |= {"options": options} if options else {}
        return options

    def _example(self, number: int, row: Row) -> Example:
        where = f"{self.where}, row {number}"
        options = self._options(row, where)
        turns = self._prompt_turns(row, options, where)
        messages, solution = self._solution(row, turns, where)
        messages = messages if any(turn["content"] for turn in messages) else ()
        system = cell(row, self._system)
        if messages and messages[0]["role"] != "system" and not is_missing(system):
            messages = ({"role": "system", "content": str(system)}, *messages)
        content = messages[-1]["content"] if messages else ""
        if messages and self._template is None and len(OPTION_LINE.findall(content)) < len(options):
            messages = (*messages[:-1], {**messages[-1], "content": f"{content}\n{_lines(options)}"})
        return Example(
            number=number,
            columns=row,
            messages=messages,
            options=options,
            answer=self._answer_text(row, where),
            solution=solution,
            tools=tuple(_functions(cell(row, self._tools), where)),
        )

    def _prompt_turns(self, row: Row, options: Mapping[str, str], where: str) -> list[dict[str, Any]]:
        cells = {name: cell(row, name) for name in self.roles["prompt"]}
        filled = {name: value for name, value in cells.items() if not is_missing(value)}
        if self._prompt:
            both = "\n\n".join(map(str, filled.values()))
            return read_turns(both if len(filled) > 1 else cells[self._prompt], self._prompt, where)
        texts = {name: str(value) for name, value in filled.items()}
        texts |= {name: _lines(options) for name in self._choices if len(self._choices) == 1}
        parts = Formatter().parse(str(self._template))
        text = "".join(text + texts.get(name or "", "") for text, name, *_ in parts)
        return [{"role": "user", "content": text}] if filled else []

    def _solution(self, row: Row, turns: list[dict[str, Any]], where: str) -> tuple[Messages, Any]:
        """The prompt and the assistant's message: its last one, a column's, or an answer with its working."""
        messages = without_solution(turns)
        if not self._imitates or ("rating" in self.roles and not row["label"]):
            return messages, None
        if len(messages) < len(turns) and not self.settings.get("solution_column"):
            self.roles.setdefault("solution", self.roles["prompt"])
            return messages, turns[-1]
        for column in (*self._solutions, self._answer):
            value = cell(row, column)
            has_working = isinstance(value, str) and final_answer(value) != value.strip()
            if column == self._answer and not has_working:
                continue
            said = read_turns(value, column, where, role="assistant")
            if said and said[-1]["role"] == "assistant":
                self.roles.setdefault("solution", (column,))
                is_whole = said[0]["role"] != "assistant"  # from its first question on
                return tuple(said[:-1] if is_whole else (*messages, *said[:-1])), said[-1]
        return messages, None

    def _answer_text(self, row: Row, where: str) -> str | None:
        """The answer of a row: of a worked solution what stands behind `####` or in the box."""
        value = cell(row, self._answer)
        if isinstance(value, list) and len(value) == 1:
            value = value[0].get("content", value[0]) if isinstance(value[0], dict) else value[0]
        if not isinstance(value, dict | list | bytes):
            return None if is_missing(value) else final_answer(str(value).strip()) or None
        if self._imitates:
            return None
        field = "0" if isinstance(value, list) else "FIELD"
        remedy = f"name a field (answer_column={self._answer}.{field}), or set match=none and reward_funcs"
        raise _bad_cell(where, value, self._answer, remedy)

    def _options(self, row: Row, where: str) -> dict[str, str]:
        """Label -> text, of columns of one each, a list, {"text": [...], "label": [...]} or {"A": ...}."""
        value: Any = {name[-1].upper(): cell(row, name) for name in self._choices}
        if len(self._choices) == 1:
            value = parse_plain(cell(row, self._choices[0])) or {}
            texts = value.get("text") if isinstance(value, dict) else value
            if isinstance(texts, list):
                labels = value.get("label") if isinstance(value, dict) else None
                value = dict(zip(labels or ascii_uppercase, texts, strict=False))
        if not isinstance(value, dict) or any(isinstance(text, dict | list) for text in value.values()):
            remedy = 'give a list of texts (in CSV as JSON), {"text": [...], "label": [...]} or {"A": ...}'
            raise _bad_cell(where, value, self._choices[0], remedy)
        return {str(label): str(text).strip() for label, text in value.items() if not is_missing(text)}

    def _with_letters(self, examples: list[Example]) -> list[Example]:
        """The answer of several options as the letter that the prompt shows, however the rows name it."""
        answered = [example for example in examples if example.options and example.answer is not None]
        if not answered:
            return examples
        is_number = isinstance(cell(answered[0].columns, self._answer), int | float)
        forms = sorted(_FORMS, key=lambda form: form == "text" and is_number)  # 1 is a position among numbers
        wrong = {form: [example for example in answered if _letter(example, form) is None] for form in forms}
        form = min(forms, key=lambda form: len(wrong[form]))
        for example in wrong[form]:
            remedy = f"none of {len(example.options)} options; give its letter, its number from 0 or its text"
            raise _bad_cell(f"{self.where}, row {example.number}", example.answer, self._answer, remedy)
        self._form_of_answers = "" if form == "letter" else f", each the {form} of an option"
        return [replace(e, answer=_letter(e, form)) if e.options else e for e in examples]


def _letter(example: Example, form: str) -> str | None:
    """The letter of the option that the answer of a row names in that form; None where it names none."""
    options = example.options
    names = options.values() if form == "text" else options
    if form.startswith("number"):
        names = range(int(form[-1]), int(form[-1]) + len(options))
    names = [normal_form(str(name)) for name in names]
    answer = normal_form(example.answer or "")
    for spelling in (answer, answer.removesuffix(".0"), normal_form(letter_of(answer) or "")):
        if spelling in names[:26]:
            return ascii_uppercase[names.index(spelling)]
    return None


def _lines(options: Mapping[str, str]) -> str:
    pairs = zip(ascii_uppercase, options.values(), strict=False)
    return "\n".join(f"{letter}) {text}" for letter, text in pairs)


def list_columns(names: Sequence[str], separator: str = ", ") -> str:
    """Column names for a sentence: not too many, none that breaks the line."""
    shorter = [name if len(name) <= 60 and name.isprintable() else short_repr(name) for name in names]
    return separator.join(shorter[:30]) + (", ..." if len(shorter) > 30 else "")


def cell(row: Row, column: str) -> Any:
    """The value of a column; `a.b` is the field b of an object or JSON text a, `a.0` the first of a list."""
    if column in row or "." not in column:
        return row.get(column) if column else None
    name, *fields = column.split(".")
    value = row.get(name)
    for field in fields:
        value = parse_plain(value)
        value = {str(key): entry for key, entry in enumerate(value)} if isinstance(value, list) else value
        value = value.get(field) if isinstance(value, dict) else None
    return value


def is_missing(value: Any) -> bool:
    """Whether a cell is empty; pandas writes NaN where nothing is."""
    return value in (None, "", [], {}) or value != value


def _bad_cell(where: str, value: Any, column: str, remedy: str) -> UserError:
    return UserError(f"{where} has {short_repr(value)} as {column}: {remedy}.")


def read_messages(value: Any, column: str, where: str) -> Messages:
    """A cell as the messages of a prompt, without an assistant's at its end; none where it is empty."""
    messages = without_solution(read_turns(value, column, where))
    return messages if any(turn["content"] for turn in messages) else ()


def read_turns(value: Any, column: str, where: str, role: str = "user") -> list[dict[str, Any]]:
    """A cell as chat messages, a text as one of that role; none where the cell is empty."""
    if isinstance(value, str) and _CHAT_TEXT.match(value):
        value = parse_plain(value)
        if isinstance(value, str):
            raise _bad_cell(where, value, column, "messages as text have to be JSON, written by json.dumps")
    if isinstance(value, dict | bytes):
        remedy = "give a text or a list of chat messages, or name another column (prompt_column)"
        raise _bad_cell(where, value, column, remedy)
    if isinstance(value, list):
        return [_turn(turn, column, where) for turn in value]
    text = "" if is_missing(value) else str(value).strip() if role == "user" else str(value)
    return [{"role": role, "content": text}] if text.strip() else []


def _turn(turn: Any, column: str, where: str) -> dict[str, Any]:
    """A message in the words of chat templates; ShareGPT has `from` and `value`."""
    fields = turn if isinstance(turn, dict) else {}
    role = fields.get("role") or fields.get("from", "user")
    content, calls = fields.get("content", fields.get("value")), fields.get("tool_calls")
    if role == "function_call":
        calls, content = content, None
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
    content = "" if content is None and calls else content
    if not isinstance(content, str) or not isinstance(role, str):
        raise _bad_cell(where, turn, column, 'a message is {"role": "user", "content": "text"}')
    message: dict[str, Any] = {"role": _ROLES.get(role, role), "content": content}
    message |= {key: fields[key] for key in _KEPT_FIELDS if fields.get(key)}
    return message | ({"tool_calls": _functions(calls, where, {"arguments": {}})} if calls else {})


def _functions(value: Any, where: str, defaults: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Tools, or calls of tools, as chat templates take them."""
    value = _without_none(parse_plain(value))
    functions = []
    for entry in map(parse_plain, value if isinstance(value, list) else [value] if value else []):
        whole = entry if isinstance(entry, dict) and "function" in entry else {"function": entry}
        function = parse_plain(whole["function"])
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            remedy = 'write {"type": "function", "function": {"name": ..., ...}}'
            raise _bad_cell(where, entry, "a tool or a call of one", remedy)
        function = {**(defaults or {}), **{key: parse_plain(entry) for key, entry in function.items()}}
        functions.append({**whole, "type": "function", "function": function})
    return functions


def _without_none(value: Any) -> Any:
    """Without the fields that parquet writes into every object because another row has them."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def _chat_objects(value: Any) -> list[dict[str, Any]]:
    """The messages of a cell, as they are written."""
    value = parse_plain(value) if isinstance(value, str) and _CHAT_TEXT.match(value) else value
    entries = value if isinstance(value, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and {"role", "from"} & entry.keys()]
