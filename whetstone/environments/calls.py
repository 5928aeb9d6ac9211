"""The calls of tools in what a model wrote, in the formats of chat templates, outside of thoughts.

`SECTIONS` says how calls begin and end, `_FORMS` how they are written in between. What a model wrote is
parsed, never evaluated; every pattern takes linear time.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from whetstone.files import json_safe, num_levels, valid_text

MAX_CALLS = 32  # of one turn that are executed
MAX_LEVELS = 64  # of lists and objects in each other, in the arguments of a call
MAX_PYTHON = 10_000  # characters of a list of calls in Python: its parser takes a stack
Call = dict[str, Any]  # {"name", "arguments"}, or {"error"} where it can't be read
Tools = Sequence[Mapping[str, Any]]
Kinds = Mapping[str, Mapping[str, Any]]  # of the arguments of each tool
_Pairs = Iterator[tuple[Any, Any]]  # names and arguments
SECTIONS = {
    "<tool_call>": "</tool_call>", "<tool_calls>": "</tool_calls>", "<TOOLCALL>": "</TOOLCALL>",
    "<seed:tool_call>": "</seed:tool_call>", "<minimax:tool_call>": "</minimax:tool_call>",
    "<|tool_call|>": "<|/tool_call|>", "<|tool_call>": "<tool_call|>",  # Granite 3, Gemma 4
    "<|tool_call_start|>": "<|tool_call_end|>", "<|tool_call_begin|>": "<|tool_call_end|>",  # LFM2, Kimi
    "<|START_ACTION|>": "<|END_ACTION|>", "<|tools_prefix|>": "<|tools_suffix|>",  # Cohere, Apertus
    "<\uff5ctool\u2581call\u2581begin\uff5c>": "<\uff5ctool\u2581call\u2581end\uff5c>",  # DeepSeek
    "<\uff5cDSML\uff5cfunction_calls>": "</\uff5cDSML\uff5cfunction_calls>",
    "[TOOL_CALLS]": "[TOOL_CALLS]", "<|python_tag|>": "<|eo",  # Mistral: the next one; Llama 3
}  # fmt: skip
_AROUND = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<|tool_calls_section_begin|>", "to=functions.")
CALL_MARKERS = (*SECTIONS, *_AROUND)
THOUGHTS = {
    "<think>": "</think>", "[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>",
    "<seed:think>": "</seed:think>", "<|channel>thought": "<channel|>",
}  # fmt: skip
_BEGIN = re.compile("|".join(map(re.escape, SECTIONS)))
_TAG = re.compile("|".join(map(re.escape, (*THOUGHTS, *THOUGHTS.values(), *CALL_MARKERS, "```"))))
_END_OF_BODY = re.compile(r"<\|(?:call|end|return|start|channel)\|>|\Z")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_BLOCK = re.compile(r"^[ \t]*+```(\w++)[ \t]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE)
_BARE = re.compile(r'\[?\{(?=.*"name")(?=.*"(?:arguments|parameters)")|\[([A-Za-z_][\w.]*+)\(', re.DOTALL)
_BETWEEN = re.compile(r"[\s;,]*+")
_FUNCTION = re.compile(
    r'<(?:function=|[^<>\s=]{0,20}invoke name=)"?([^<>"]++)"?[^<>]*+>|^([\w.-]++)\s*+(?=<arg_key>)'
)
_PARAMETER = re.compile(
    r'<(?:[^<>\s=/]{0,20}parameter(?:=| name=)"?|arg_key>)([^<>"]++)'
    r'(?:"?[^<>]*+>|</arg_key>\s*+<arg_value>)'
)
_END_OF_PARAMETER = re.compile(r"</(?:[^<>\s]{0,20}parameter|function|arg_value)>")
_NAMED = re.compile(
    r"(?:functions\.|function<\uff5ctool\u2581sep\uff5c>)?([\w.-]++)[^{]*+(\{.*\})", re.DOTALL
)
_GEMMA = re.compile(r"call:([\w.-]++)\{")
_GEMMA_KEY = re.compile(r"([{,]\s*+)([\w.-]++)\s*+:")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def answer_start(text: str) -> int | None:
    """Where the answer begins behind the thoughts, the first of which the prompt may have opened; None where
    a thought has no end. A tag behind a call or in it opens nothing: it may be an argument.
    """
    start, is_thought, is_thinking, is_called = 0, False, False, False
    for match in _TAG.finditer(text):
        if match[0] in THOUGHTS:
            if not is_called:
                is_thought = is_thinking = True
        elif match[0] in THOUGHTS.values():
            if is_thinking or not is_thought:
                start, is_thought, is_thinking, is_called = match.end(), True, False, False
        elif not is_thinking:
            if is_thought:
                break
            is_called = True
    return None if is_thinking else start


def _answer(text: str) -> str:
    start = answer_start(text)
    return "" if start is None else text[start:]


def parse_calls(text: str, tools: Tools = ()) -> list[Call]:
    """The calls in a turn. `tools` say of which type an argument is, where the format does not."""
    if "<|channel|>" in text and "<|message|>" in text:  # its thoughts have a channel
        return [_call(name, arguments) for name, arguments in _channel_calls(text)]
    text, kinds = _answer(text), {tool["function"]["name"]: _kinds(tool) for tool in tools}
    bodies = list(_sections(text))
    if not bodies:
        bare = text.strip()
        match = _BARE.match(bare)
        bodies = [bare] if match is not None and (match[1] is None or match[1] in kinds) else []
    return [call for body in bodies for call in _read(body, kinds)]


def _kinds(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a tool with their types, as a client or `tool_schema` describes them."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _sections(text: str) -> Iterator[str]:
    begin = _BEGIN.search(text)
    while begin is not None:
        end = text.find(SECTIONS[begin[0]], begin.end())
        end = len(text) if end < 0 else end
        yield text[begin.end() : end].strip()
        begin = _BEGIN.search(text, end)


def _read(body: str, kinds: Kinds) -> list[Call]:
    if body in kinds:
        return [_call(body, {})]  # GLM, without arguments
    for pattern, read, what in _FORMS:
        if pattern.match(body):
            try:
                return [_call(name, arguments) for name, arguments in list(read(body, kinds))]
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return [{"error": f"the tool call is no {what}"}]
    return [{"error": "the tool call is no JSON object"}]


def _json(body: str, kinds: Kinds) -> _Pairs:
    """Objects or lists of them, one after another; special tokens may follow."""
    at = 0
    while body.startswith(("{", "["), at):
        value, at = json.JSONDecoder().raw_decode(body, at)
        for call in value if isinstance(value, list) and value else [value]:
            if not isinstance(call, dict):
                raise ValueError
            name = call.get("name", call.get("tool_name"))
            arguments = call.get("arguments", call.get("parameters", {}))
            # Apertus: {"add": {"x": 41}}
            yield next(iter(call.items())) if name is None and len(call) == 1 else (name, arguments)
        between = _BETWEEN.match(body, at)
        at = between.end() if between else at
    if at < len(body) and body[at] != "<":
        raise ValueError


def _xml(body: str, kinds: Kinds) -> _Pairs:
    """Qwen 3.5, Qwen3-Coder, Nemotron 3, Seed; MiniMax M2, DeepSeek V3.2; GLM."""
    matches = list(_FUNCTION.finditer(body))
    for match, behind in zip(matches, [*matches[1:], None], strict=True):
        name = (match[1] or match[2]).strip()
        pairs = _PARAMETER.split(body[match.end() : behind.start() if behind else None])[1:]
        values = [_END_OF_PARAMETER.split(value, maxsplit=1)[0] for value in pairs[1::2]]
        own = kinds.get(name, {})
        yield name, {key: _typed(own.get(key), value) for key, value in zip(pairs[::2], values, strict=True)}


def _typed(kind: Any, value: str) -> Any:
    """Of a format that writes every value as a text: a text stays one, all else is JSON."""
    value = value.removeprefix("\n").removesuffix("\n")
    if isinstance(kind, Mapping) and kind.get("type") == "string":
        return value
    try:
        return _PYTHON_WORDS[value] if value in _PYTHON_WORDS else json.loads(value)
    except (ValueError, RecursionError):
        return value


def _gemma(body: str, kinds: Kinds) -> _Pairs:
    """Objects without quotation marks around keys; texts stand between `<|"|>`."""
    name, brace, rest = body.removeprefix("call:").partition("{")
    parts = (brace + rest).split('<|"|>')
    parts[::2] = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    yield name, "".join(parts)


def _python(body: str, kinds: Kinds) -> _Pairs:
    """`[add(x=41)]`: LFM2, Llama 3.2 and 4."""
    if len(body) > MAX_PYTHON:
        raise ValueError
    tree = ast.parse(body[: body.rfind("]") + 1], mode="eval").body  # a special token may follow
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError
        name = ast.unparse(call.func)
        values = dict(zip(kinds.get(name, {}), call.args, strict=False))
        values |= {keyword.arg: keyword.value for keyword in call.keywords}
        if None in values or len(values) < len(call.args) + len(call.keywords):
            raise ValueError
        yield name, {key: ast.literal_eval(value) for key, value in values.items()}


def _named(body: str, kinds: Kinds) -> _Pairs:
    """A name, a mark, and JSON: Mistral, DeepSeek, Kimi."""
    match = _NAMED.match(body)
    assert match is not None
    yield match[1], match[2]


_FORMS: tuple[tuple[re.Pattern[str], Callable[[str, Kinds], _Pairs], str], ...] = (
    (re.compile(r"\{|\[\s*+[{\[\]]"), _json, "JSON object"),
    (_FUNCTION, _xml, "call of a function"),
    (_GEMMA, _gemma, "JSON object"),
    (re.compile(r"\[\s*+[A-Za-z_][\w.]*+\("), _python, "list of Python calls with literal arguments"),
    (_NAMED, _named, "JSON object"),
)


def executed_calls(calls: list[Call]) -> list[Call]:
    """The first `MAX_CALLS`; an {"error"} tells the model of the others."""
    left = len(calls) - MAX_CALLS
    error = f"{left} more calls were not executed: write at most {MAX_CALLS} in one turn"
    return calls if left <= 0 else [*calls[:MAX_CALLS], {"error": error}]


def fenced_calls(text: str, tools: Iterable[Mapping[str, Any]], call_hint: str) -> list[Call]:
    """An {"error"} for each call in a code fence: models that write programs put them there, but no chat
    template asks for it, so a server would not find the call. `call_hint` says how to write it.
    """
    named = {tool["function"]["name"] for tool in tools}
    blocks = [block.removeprefix("json").strip() for block in _answer(text).split("```")[1::2]]
    calls = [
        call for block in blocks if block.startswith("{") and '"name"' in block for call in _read(block, {})
    ]
    names = [call["name"] for call in calls if call.get("name") in named]
    return [{"error": f"the call of {name} is in a code fence: {call_hint}"} for name in names]


def block_calls(text: str, arguments: Mapping[str, str]) -> list[Call]:
    """A call for each block of code whose language is a tool; `arguments`: tool -> what gets the code."""
    blocks = ((tool.lower(), code) for tool, code in _BLOCK.findall(_answer(text)))
    return [_call(name, {arguments[name]: code}) for name, code in blocks if name in arguments]


def _channel_calls(text: str) -> _Pairs:
    """gpt-oss: of messages whose header names a function, outside the analysis channel."""
    header, *parts = text.split("<|message|>")
    for part in parts:
        header = header.rpartition("<|start|>")[2]
        end = _END_OF_BODY.search(part)
        assert end is not None
        recipient = _RECIPIENT.search(header)
        if recipient is not None and "<|channel|>analysis" not in header:
            yield recipient[1], part[: end.start()]
        header = part[end.start() :]


def _call(name: Any, arguments: Any) -> Call:
    """The door for what a model wrote: behind it files, templates and tokenizers can hold it."""
    if not isinstance(name, str):
        return {"error": "the tool call has no name"}
    name = valid_text(name)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"error": f"the arguments of {name} are no JSON"}
    if not isinstance(arguments, Mapping):
        return {"error": f"the arguments of {name} are no JSON object"}
    if num_levels(arguments) > MAX_LEVELS:
        return {"error": f"the arguments of {name} are nested deeper than {MAX_LEVELS} levels"}
    return {"name": name, "arguments": json_safe(arguments)}
