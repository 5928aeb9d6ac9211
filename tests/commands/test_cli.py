"""The command line: what each verb prints, how fast help answers, and how every kind of end looks from
outside. The real programs are run where the exit code, the streams or the imports matter.
"""

import argparse
import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from whetstone import __version__
from whetstone.__main__ import run
from whetstone.commands import COMMANDS
from whetstone.commands import train as train_command
from whetstone.commands.config import markdown
from whetstone.commands.eval import recipe_of_checkpoint
from whetstone.commands.parser import CommandParser, source_and_settings
from whetstone.commands.tasks import config_for_task
from whetstone.config import Config, flatten
from whetstone.errors import UserError
from whetstone.terminal.environment import is_full_disk

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402


def whet(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore::SyntaxWarning", "-m", "whetstone", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


@pytest.fixture
def train_raises(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    def replace(error: BaseException) -> None:
        def fail(args: argparse.Namespace) -> None:
            raise error

        monkeypatch.setattr(train_command, "run", fail)

    return replace


def split(*argv: str) -> tuple[str | None, list[str]]:
    return source_and_settings(CommandParser("train", train_command).parse(list(argv)))


# --- help ---


def test_version_and_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"whetstone {__version__}\n"
    assert run([]) == 0
    overview = capsys.readouterr().out
    assert [line.split()[0] for line in overview.splitlines() if line.startswith("  ")] == list(COMMANDS)


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["eval", "--help"]])
def test_help_takes_less_than_300_ms_of_cpu_time(argv: list[str]) -> None:
    code = (
        f"import sys; from whetstone.__main__ import run; run({argv}); "
        "heavy = {'torch', 'pydantic', 'transformers', 'rich'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_help_with_examples_that_name_it(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: whet {verb}")
    assert re.search(rf"^  whet {verb}\b", text, re.MULTILINE)
    assert run(["help", verb]) == 0
    assert capsys.readouterr().out == text


def test_config_imports_no_torch() -> None:
    code = (
        "import sys; from whetstone.__main__ import run; run(['config', 'quickstart']); "
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# --- how things end ---


def test_an_unknown_verb_names_the_nearest() -> None:
    done = whet("trian")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("whet: There is no command 'trian': did you mean 'train'?")
    assert "Traceback" not in done.stderr
    assert "explain" not in done.stderr  # the whole list is for a name that is like none
    assert "explain" in whet("xyz").stderr
    assert whet("train", "quickstrat").stderr.endswith("did you mean 'quickstart'?\n")
    assert whet("train", "--max_step", "3").stdout == f"whetstone {__version__}: train quickstart\n"


def test_a_refused_plan_comes_before_the_keys() -> None:
    done = whet("config", "grpo", "num_generations=7")
    assert (done.returncode, done.stdout) == (2, "") and "num_generations (7)" in done.stderr
    text = whet("config", "use_vllm=true", "lora_r=8", "max_steps=1", "datasets={chain_sum: {}}").stdout
    assert "No effect here: lora_r (" in text
    (line,) = [line for line in text.splitlines() if line.startswith("  rollout_engine ")]
    assert line.split()[1:4] == ["vllm", "[command", "line]"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "max_step=3"], "max_steps"),
        (["config", "temperature=-1"], "temperature"),
        (["tasks", "no_such_key=1"], "chain_sum"),
        (["tasks", "--no-such-flag"], "chain_sum"),
        (["tasks", "chain_sums"], "chain_sum"),
        (["tasks", "chain_sum", "max_term=3"], "max_term"),
        (["report"], "whet report outputs/quickstart"),
        (["report", "no/such/run"], "no/such/run"),
    ],
)
def test_what_the_user_can_put_right_is_one_sentence_and_code_2(words: list[str], named: str) -> None:
    done = whet(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("whet: ") and named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_user_error_is_a_sentence(train_raises: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    train_raises(UserError("The moon is not cheese: eat something else."))
    assert run(["train"]) == 2
    assert capsys.readouterr().err == "whet: The moon is not cheese: eat something else.\n"


def test_ctrl_c_is_130_and_a_word(train_raises: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    train_raises(KeyboardInterrupt())
    assert run(["train"]) == 130
    assert capsys.readouterr().err == "whet: stopped.\n"


def test_a_bug_keeps_its_traceback(train_raises: Callable) -> None:
    train_raises(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        run(["train"])


def test_a_full_disk_is_a_sentence_that_names_the_file(
    train_raises: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "outputs/x/metrics.jsonl")
    train_raises(full)
    assert run(["train"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("whet: The disk is full while writing outputs/x/metrics.jsonl: ")
    assert "auto_resume=true" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_disk_that_is_really_full_is_recognized() -> None:
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as file:
        file.write("x" * 10_000)
    assert is_full_disk(caught.value)
    assert not is_full_disk(FileNotFoundError(errno.ENOENT, "no such file"))


@pytest.mark.parametrize(
    "words",  # what safetensors 0.8 and torch 2.13 say on a file system of 200 kB
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
    ],
)
def test_full_disk_is_recognized_by_words_of_the_error(words: str) -> None:
    assert is_full_disk(RuntimeError(words))
    assert not is_full_disk(RuntimeError("CUDA out of memory"))


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m whetstone config | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


# --- config ---


def test_config_shows_every_key_with_default_bounds_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line.split()[0] for line in lines if line.startswith("  ")]
    assert keys == list(flatten(Config()))
    (line,) = [line for line in lines if line.startswith("  lora_r ")]
    assert line.split() == ["lora_r", "16", "(1", "to", "4096)", "Rank", "of", "the", "adapter."]
    (line,) = [line for line in lines if line.startswith("  top_p ")]
    assert "(1e-06 to 1)" in line
    (line,) = [line for line in lines if line.startswith("  scale_rewards ")]
    assert "(group | batch | none)" in line
    assert "plan:" not in lines


def test_config_of_a_file_shows_where_values_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("kl_coef: 0.05\nper_device_train_batch_size: 16\nmax_steps: 7\n")
    assert run(["config", str(file), "num_generations=4", "--changed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: line for line in lines if line.startswith("  ") and "[" in line}
    given = {"beta", "per_device_train_batch_size", "max_steps", "num_generations"}
    assert set(shown) == {*given, "run_name"}  # named like the file
    assert shown["beta"].split()[:3] == ["beta", "0.05", "[mine.yaml]"]
    assert "[command line]" in shown["num_generations"]
    assert "note: kl_coef (mine.yaml) is taken for beta." in lines
    assert any("7 batches of 4 prompts x 4 completions = 16 completions" in line for line in lines)


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == markdown(), "run `whet config --markdown > docs/config.md`"
    assert all(f"- `{key}`:" in page for key in flatten(Config()))


# --- tasks ---


def test_tasks_lists_ours_and_every_one_of_reasoning_gym(capsys: pytest.CaptureFixture[str]) -> None:
    import reasoning_gym.factory

    assert run(["tasks"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert {"math", "countdown", "reasoning_gym/countdown", "chain_sum", "syllogism"} <= names
    missing = set(reasoning_gym.factory.DATASETS) - {name.removeprefix("reasoning_gym/") for name in names}
    assert missing <= {"composite"}


def test_tasks_shows_prompt_and_gold_answer_with_score(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run(["tasks", "chain_sum", "min_terms=2", "max_terms=2", "max_digits=1", "developer_prompt=simple"])
        == 0
    )
    text = capsys.readouterr().out
    problems = re.findall(r"chain_sum/train/(\d{6})", text)
    assert problems == ["000000", "000001", "000002"]
    assert "as pebble sees them" in text and "<|user|>" in text and "<|system|>" in text
    assert text.count("correct 1") == 3
    for a, sign, b, gold in re.findall(
        r"(\d+) ([+-]) (\d+) =.*?<answer>\s*(-?\d+)\s*</answer>", text, re.DOTALL
    ):
        assert int(gold) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_words_for_a_task_are_its_settings_or_our_keys() -> None:
    config = config_for_task("chain_sum", {"max_terms": 3, "developer_prompt": "a: b", "lr": 1e-5})
    assert config.tasks.datasets["chain_sum"].config == {"max_terms": 3}
    assert config.tasks.developer_prompt == "a: b"
    assert config.update.learning_rate == 1e-5


# --- which configuration ---


def test_first_word_is_the_configuration_unless_a_setting() -> None:
    assert split("grpo", "max_steps=3") == ("grpo", ["max_steps=3"])
    assert split("max_steps=3", "beta=0") == (None, ["max_steps=3", "beta=0"])
    assert split("--use_wandb") == (None, ["use_wandb=true"])
    assert split() == (None, [])
    assert split("--config", "a.yaml", "x=1") == ("a.yaml", ["x=1"])
    assert split("x=1", "--config=a.yaml") == ("a.yaml", ["x=1"])


def test_options_in_the_style_of_trl_are_settings() -> None:
    assert split("grpo", "--max-steps", "3", "--beta=0.1", "--use_vllm", "--epsilon", "-1", "seed=1") == (
        "grpo",
        ["max_steps=3", "beta=0.1", "use_vllm=true", "epsilon=-1", "seed=1"],
    )
    assert split("--max_steps", "3", "seed=1", "grpo") == (None, ["max_steps=3", "seed=1", "grpo"])


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["config", "--chnaged"], "'--changed'"),
        (["profile", "--step", "4"], "'--steps'"),
        (["report", "a_run", "--hlep"], "'--help'"),
        (["launch", "--ray", "--rank", "2", "train"], "'--ranks'"),
        (["train", "--max_step", "4"], "'max_steps'"),
        (["doctor", "now"], "'now'"),
        (["completion"], "shell"),
        (["completion", "tcsh"], "tcsh"),
        (["profile", "--steps", "many"], "--steps"),
        (["tasks", "chain_sum", "--answer"], "--answer"),
        (["train", "--"], "'--'"),
        (["train", "-x"], "'-x'"),
    ],
)
def test_what_argparse_rejects_is_one_sentence(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("whet: ") and named in message
    assert message.count("\n") == 1


# --- train_grpo.py, and eval of a checkpoint ---


def test_eval_takes_the_configuration_of_the_checkpoints_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("max_steps: 3\n")
    (tmp_path / "checkpoint-3").mkdir()
    found = recipe_of_checkpoint([f"checkpoint_path={tmp_path / 'checkpoint-3'}"])
    assert found == str(tmp_path / "config.yaml")
    assert recipe_of_checkpoint([f"checkpoint_path={tmp_path}"]) is None
    assert recipe_of_checkpoint(["beta=0"]) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--config", "config/multi_tasks.yaml", "max_steps=100"],
            ["config/multi_tasks.yaml", "max_steps=100"],
        ),
        (["--config=config/x.yaml"], ["config/x.yaml"]),
        (["--config-path", "config", "--config-name", "grpo", "beta=0"], ["config/grpo.yaml", "beta=0"]),
        (["--config_path=here", "--config_name=a.yaml"], ["here/a.yaml"]),
        (["--config-name", "math"], ["math"]),
        (["--model", "m", "--use_wandb"], ["grpo", "--model", "m", "--use_wandb"]),
    ],
)
def test_the_forms_people_know(words: list[str], expected: list[str]) -> None:
    assert train_grpo.to_whet(words) == ["train", *expected]


def test_train_grpo_runs_and_refuses_like_whet() -> None:
    command = [
        sys.executable,
        "train_grpo.py",
        "--config-path",
        "config",
        "--config-name",
        "grpo",
        "max_step=3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("whet: ") and "'max_step'" in done.stderr
    done = subprocess.run(
        [sys.executable, "train_grpo.py", "--config"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode != 0 and "--config" in done.stderr.splitlines()[-1]
