"""`whet chat` and `whet sample`: in a pseudo-terminal, in a pipe, and with wrong input."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pseudo_terminal import PseudoTerminal
from whetstone.__main__ import run
from whetstone.commands.chat.reader import Reader
from whetstone.commands.chat.session import Session, example_question
from whetstone.config import build, dump
from whetstone.inference.answers import Answer, Piece
from whetstone.inference.conversation import Conversation
from whetstone.inference.problems import find_problem
from whetstone.inference.sampler import Sampler
from whetstone.model.policy import load_policy
from whetstone.model.sharded import model_writer
from whetstone.run.checkpoint import save_model
from whetstone.types import Finish

QUESTION = "State the final answer to the following arithmetic problem: 5 + 8 - 7 ="
SUMS = {"chain_sum": {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model differs from pebble, by the functions that write one."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"datasets": SUMS, "max_completion_length": 64, "reward_funcs": ["accuracy"]}
    config = build(settings)
    (folder / "config.yaml").write_text(dump(config))
    policy = load_policy(config.model)
    policy.lm.get_output_embeddings().weight.data *= 1.5
    save_model(model_writer(policy), folder / "final_model", 1)
    return folder


@pytest.fixture(scope="module")
def sampler(run_folder: Path) -> Sampler:
    return Sampler.open(run_folder)


@pytest.fixture
def opened(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """Commands in this process use the model that is loaded already."""
    monkeypatch.setattr(Sampler, "open", lambda source, device: sampler)
    return sampler


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.slow  # two processes with torch, and waits for what a terminal shows
def test_a_conversation_in_the_terminal(run_folder: Path, tmp_path: Path) -> None:
    with PseudoTerminal("chat", str(run_folder), XDG_STATE_HOME=str(tmp_path)) as terminal:
        assert "million parameters" in " ".join(terminal.wait_for("\n> ").split())  # a long path wraps
        terminal.type("/temperature 0\n")
        terminal.wait_for("\n> ")
        terminal.type(f"{QUESTION}\n")
        first = terminal.wait_for("\n> ").split("\n", 1)[1]
        terminal.type("/again\n")
        assert terminal.wait_for("\n> ").split("\n", 1)[1] == first and "<answer>" in first
        terminal.type("/compare\n")
        shown = terminal.wait_for("\n> ")
        assert "before: pebble" in shown and "final_model" in shown and shown.count("<answer>") == 2
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.type("\x03")  # Ctrl-C discards it
        terminal.wait_for("\n> ")
        terminal.type("two \\\n")
        terminal.wait_for("... ")
        terminal.type("lines\n")
        terminal.wait_for("\n> ")
        terminal.type(f"/save {tmp_path / 'talk.json'}\n")
        terminal.wait_for("\n> ")
        for command in ("/temperature 5", "/max-tokens 8000"):  # junk without an end
            terminal.type(f"{command}\n")
            terminal.wait_for("\n> ")
        terminal.type("Hello\n")
        terminal.wait_for("Hello\r\n")
        while len(terminal.screen) < 20:
            terminal.read()
        terminal.type("\x03")  # Ctrl-C stops the answer, not the program
        terminal.wait_for("\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=20) == 0
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == QUESTION and messages[2]["content"] == "two \nlines"
    history = (tmp_path / "whetstone/chat_history").read_text()
    assert QUESTION in history and "half a line" not in history


READ = """
from whetstone.commands.chat.reader import Reader
with Reader() as reader:
    while (line := reader.read()) != "/quit":
        print("read", repr(line), flush=True)
"""


def test_ctrl_c_discards_the_line_at_any_moment(tmp_path: Path) -> None:
    """As soon as a key is on the screen, and behind the prompt: none is lost, and none hits the next line."""
    with PseudoTerminal(code=READ, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for("> ")
        for number in range(60):
            terminal.type("half")
            terminal.wait_for("half")
            terminal.type("\x03")
            terminal.wait_for("\n> ")
            terminal.type("\x03" * (number % 3) + f"line {number} \\\nmore\x03whole {number}\n")
            terminal.wait_for(f"read 'whole {number}'")
            terminal.wait_for("\n> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(timeout=60) == 0
    history = (tmp_path / "whetstone/chat_history").read_text().splitlines()
    assert history[-3:] == ["line 59 \\", "whole 59", "/quit"]


@pytest.mark.parametrize(
    ("conversations", "expected"),
    [
        ([[{"content": "a\nb"}], [{"content": " 1 + 2 = "}]], "1 + 2 ="),
        ([[{"content": "x" * 161}], [{"content": None}]], None),
        ([[]], None),
        ([3], None),
        (None, None),
    ],
)
def test_the_example_is_a_short_question_of_the_evaluation(
    conversations: Any, expected: str | None, tmp_path: Path
) -> None:
    if conversations is not None:
        content = {"completions": [{"messages": messages} for messages in conversations]}
        (tmp_path / "eval_results").mkdir()
        (tmp_path / "eval_results" / "eval_step_0.json").write_text(json.dumps(content))
    assert example_question(tmp_path) == expected


def test_piped_input_is_answered_once(
    opened: Sampler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, f"{QUESTION}\n".encode())
    assert run(["chat", "x", "--temperature", "0"]) == 0
    (expected,) = opened.sample(QUESTION, temperature=0)
    assert capsys.readouterr().out == f"{expected.text}\n"
    pipe(monkeypatch, b"/help \xff\n")  # a question like any other, whatever its bytes
    assert run(["chat", "x", "--temperature", "0", "--max-tokens", "4"]) == 0
    assert "/again" not in capsys.readouterr().out
    pipe(monkeypatch, b" \n")
    assert run(["chat", "x"]) == 2
    monkeypatch.setattr("sys.stdin", None)  # closed
    assert run(["chat", "x"]) == 2 and run(["sample", "x", "--prompt", "-"]) == 2


def pieces(*texts: str):
    for number, text in enumerate(texts, 1):
        answer = None
        if number == len(texts):
            whole = "".join(texts)
            answer = Answer(text=whole, token_ids=(1,), logprobs=(0.0,), finish=Finish.STOP, prompt_ids=(1,))
        yield Piece(sample=0, text=text, token_ids=(1,), logprobs=(0.0,), answer=answer)


def test_hostile_text_is_escaped_while_it_streams(
    sampler: Sampler, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(Conversation(sampler))
    session.answer(pieces("a\x1b", "]0;title\x07", "\r\x1b[2Kgone", "\u202e[bold]x[/]\x9b", "1m"))
    shown = capsys.readouterr().out
    assert shown == "a\\x1b]0;title\\x07\\r\\x1b[2Kgone\\u202e[bold]x[/]\\x9b1m\n"


def test_commands_of_the_conversation(
    sampler: Sampler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Conversation(sampler, temperature=0.0, max_tokens=8)
    session = Session(chat)
    for line in (
        "/again",
        "/compare",
        "/temperature hot",
        "/temperature -1",
        "/max-tokens 0",
        "/agian",
        "/save",
    ):
        assert session.handle(line)
    assert "did you mean '/again'" in capsys.readouterr().out
    assert chat.messages == [] and chat.settings == {"temperature": 0.0, "max_tokens": 8}
    session.handle("/system Be brief.")
    session.handle("/max-tokens 5")
    session.handle(" /system is a command")  # the space sends it
    assert chat.system == "Be brief." and chat.messages[0]["content"] == "/system is a command"
    session.handle(f"/save {tmp_path / 'a.json'}")
    session.handle(f"/save {tmp_path / 'a.json'}")  # refused
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    session.handle("/clear")
    session.handle("/system none")
    assert chat.messages == [] and chat.system == ""
    assert not session.handle("/quit")


def test_questions_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["", 'a "quoted" word', "one\\", "two\\", "three", '"""/help', "", 'end"""', '"""x"""'])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    reader = Reader()
    read = [reader.read() for _ in range(4)]
    assert read == ['a "quoted" word', "one\ntwo\nthree", " /help\n\nend", " x"]


def test_sample_prints_answers_for_scripts(
    opened: Sampler, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "question.txt").write_text(QUESTION + "\n")
    assert run(["sample", "x", "--prompt", str(tmp_path / "question.txt"), "-n", "3", "--seed", "5"]) == 0
    expected = opened.sample(QUESTION, 3, seed=5)
    shown = capsys.readouterr().out
    assert shown.count("--- answer") == 3 and all(answer.text in shown for answer in expected)

    talk = [{"role": "user", "content": QUESTION}]
    rows = [QUESTION, talk, {"prompt": QUESTION}, {"messages": talk, "other": 1}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    assert run(["sample", "x", "--prompt", str(tmp_path / "prompts.jsonl"), "--json", "--seed", "5"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["text"] == expected[0].text and line["token_ids"] == list(expected[0].token_ids)
        assert line["logprobs"] == pytest.approx(expected[0].logprobs, abs=1e-4)
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    pipe(monkeypatch, json.dumps(talk).encode())
    for name in (str(tmp_path / "talk.json"), "-"):
        assert run(["sample", "x", "--prompt", name, "--seed", "5"]) == 0
        assert capsys.readouterr().out == f"{expected[0].text}\n"


def test_a_problem_of_the_run_is_scored(opened: Sampler, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sample", "x", "--problem", "chain_sum/eval/000003", "-n", "6", "--json"]
    assert run(arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    problem = find_problem(opened.source.config, "chain_sum/eval/000003")
    assert {line["problem"] for line in lines} == {problem.id}
    for line in lines:
        is_right = f"<answer>{problem.answer['answer']}</answer>" in line["text"]
        assert line["parts"]["correct"] == is_right and (line["reward"] == 1) == is_right
    for name in ("chain_sum/train/000002@1", "chain_sum/eval/000000"):
        assert find_problem(opened.source.config, name).id == name
    assert find_problem(opened.source.config, "chain_sum").id == "chain_sum/eval/000000"


def test_wrong_input_gets_a_sentence(
    opened: Sampler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"a.jsonl": "{\n", "b.jsonl": "[]\n", "c.json": "5", "d.txt": " "}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe")
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.json", "d.txt", "e.txt", "none.txt")]
    for name in names:
        assert run(["sample", "x", "--prompt", name]) == 2, name
    for arguments in (["x"], ["x", "--text", "a", "--prompt", "b"], ["x", "--text", "a", "-n", "0"]):
        assert run(["sample", *arguments]) == 2
    assert run(["sample", "x", "--problem", "chain_sm"]) == 2
    assert "did you mean 'chain_sum'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./nothing", "nothing/here/at/all"])
def test_a_model_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"Hello")
    assert run(["chat", name]) == 2
    assert run(["sample", name, "--text", "Hello"]) == 2
