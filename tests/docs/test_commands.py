"""Every command in README.md and docs/ runs on the embedded model, or is of a kind that nothing here can run.
A new placeholder needs a line in WORDS or COMMANDS.

The commands in the blocks of docs/data.md are run by test_data.py, those of own data in README.md by
test_readme.py, those of the exercises of docs/course.md by test_course_solutions.py, those of the plan of the
recipe pages by tests/benchmarks/test_recipes.py.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.benchmarks.test_recipes import PLAN
from tests.support.doc_commands import COMMANDS as DATA_COMMANDS
from tests.support.doc_commands import EXERCISE_COMMANDS, OWN_DATA_COMMANDS
from whetstone import __main__ as cli
from whetstone.config import load, make_plan
from whetstone.model.hub import resolve

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import rl_trainer  # noqa: E402
import train_grpo  # noqa: E402

PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "log.md"),
]
PROGRAM = r"(?:whet(?![\w:])|python (?:-m whetstone(?![.\w])|train_grpo\.py|rl_trainer\.py))"
LAUNCHER = r"(?:torchrun|accelerate launch)[^`\n]*(?:whetstone|train_grpo\.py|rl_trainer\.py)"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:srun )?(?:\.venv/bin/)?(?:{PROGRAM}|{LAUNCHER})")
SMALL = shlex.split(
    "model_name_or_path=pebble bf16=false max_steps=1 eval_num_samples=2 eval_samples_per_problem=1 "
    "eval_num_examples_to_print=0 eval_greedy=false max_completion_length=8 prompts_per_step=2 "
    "num_generations=2 per_device_train_batch_size=4 gradient_accumulation_steps=1 save_strategy=no "
    "reward_workers=1 report_to=none overwrite_output_dir=true preflight=off"
)

FOREIGN = ROOT / "tests" / "data" / "foreign"
RUN = "outputs/grpo_trained"
# What stands in for words of the docs.
WORDS = {
    "CONFIG": "quickstart",
    "[CONFIG]": "grpo",
    "DATA": "rows.json",
    "RUN": RUN,
    "outputs/RUN": RUN,
    "outputs/quickstart": RUN,
    "outputs/quickstart/export": RUN,
    "YOUR.yaml": "theirs.yaml",
    "recipe.yaml": "theirs.yaml",
    "NAME": "gcd",
    "TEXT": "The answer is 3",
    "checkpoint_path=DIR": f"checkpoint_path={RUN}/checkpoint-1",
    "checkpoint_path=...": f"checkpoint_path={RUN}/final_model",
    f"checkpoint_path={RUN}/checkpoint-100": f"checkpoint_path={RUN}/checkpoint-1",
    "model_name_or_path=outputs/sft/final_model": "model_name_or_path=pebble",
    "seed=1,2": "seed=1",
    "seed=1,2,3": "seed=1",
}
# Commands that need more than that.
COMMANDS = {
    "whet": "whet --help",
    "whet config FILE": "whet config quickstart",
    "whet import FILE": f"whet import {FOREIGN}/verl_ppo_0_5b.sh",
    "whet import run_qwen2-7b.sh -o mine.yaml": f"whet import {FOREIGN}/verl_grpo_math.sh",
    "whet check": "whet check quickstart",
    "whet sft": "whet sft quickstart",
    "whet train math model_path=M data_path=rows.json": (
        "whet train math model_path=pebble data_path=rows.json use_peft=false"
    ),
    "whet check CONFIG --rewards": "whet check datasets='{gcd: {}}' --rewards --problems 2 reward_workers=1",
    "whet check datasets='{gcd: {}}' 'reward_funcs=[my_rewards.py:contains]' apply_chat_template=false "
    "--rewards": "whet check datasets='{gcd: {}}' 'reward_funcs=[accuracy]' --rewards --problems 2",
    "whet eval": f"whet eval checkpoint_path={RUN}/final_model",
    "whet explain": f"whet explain {RUN}",
    "whet export": f"whet export {RUN}",
    "whet init": "whet init rows.json",
    "whet plan": "whet plan quickstart",
    "whet play NAME": "whet play guess_number",
    "whet play my_env.py:MyEnv": "whet play examples/extending/task.py:Remainders",
    "whet sample": f"whet sample {RUN} --text Hello",
    "whet sample RUN --prompt FILE": f"whet sample {RUN} --prompt question.txt",
    "whet sample outputs/quickstart --problem chain_sum/eval/000003 -n 8": (
        f"whet sample {RUN} --problem basic_arithmetic/eval/000003 -n 8"
    ),
    "whet tasks NAME key=value": "whet tasks chain_sum max_terms=3",
    "whet tasks NAME model_name_or_path=... apply_chat_template=false": (
        "whet tasks gcd model_name_or_path=pebble apply_chat_template=false"
    ),
    "whet tasks [NAME]": "whet tasks maze",
    "whet tasks countdown ...": "whet tasks countdown apply_chat_template=false prompt_template='{question}'",
    "whet train NAME": "whet train syllogism_toy",
    "whet train [CONFIG] [key=value ...]": "whet train sums temperature=0.9",
    "whet train config/grpo.yaml auto_resume=true": (
        "whet train config/grpo.yaml auto_resume=true max_steps=2 overwrite_output_dir=false"
    ),
    "whet train CONFIG auto_resume=true": (
        "whet train config/grpo.yaml auto_resume=true max_steps=2 overwrite_output_dir=false"
    ),
    "whet train smollm2_cpu": "whet train smollm2_cpu sft_steps=1",
    "python rl_trainer.py --model M --output_dir D --use_wandb --wandb_name N ...": (
        "python rl_trainer.py --model pebble --output_dir D "
        "'datasets={code: {config: {path: expressions, language: python}}}'"
    ),
    "python train_grpo.py --config C --model_path M --output_dir D": (
        "python train_grpo.py --config config/math.yaml --model_path pebble --output_dir D "
        "data_path=rows.json use_peft=false"
    ),
}
# These need GPUs, a server, Ray, TRL with vLLM, the hub or q, or end by Ctrl-C: the tests of each run such
# commands. Their configurations are loaded here.
NOT_RUN = re.compile(
    r"torchrun|accelerate launch|whet (launch(?! --help)|serve|watch|chat|push(?!.*--dry-run))\b|"
    r"rollout_engine=(vllm|sglang)|\bq/|\| head|max_completion_length=2$"
)
QUICK_VERBS = {"config", "import", "doctor", "plan", "init", "tasks"}

# The table of docs/lab/losses.md: 15 variants, each a process of its own; one seed is enough here.
LOSSES = re.compile(r"whet compare quickstart variant=.* seed=1,2,3 max_steps=20 .* --jobs 8")


def commands(page: Path) -> list[str]:
    """The commands of a page: lines of its code blocks, and code inside sentences that begins with one."""
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r"^```.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    prose = fence.sub("", text)
    lines = [line for block in fence.findall(text) for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    lines += [line[4:] for line in prose.splitlines() if line.startswith("    ")]
    found = [re.sub(r"\s{3,}.*|\s+# .*", "", line) for line in lines if COMMAND.match(line)]
    found += [span for span in re.findall(r"`([^`\n]+)`", prose) if COMMAND.match(span)]
    return found


DOCUMENTED = sorted(
    {command for page in PAGES for command in commands(page)}
    - {*DATA_COMMANDS, *OWN_DATA_COMMANDS, *EXERCISE_COMMANDS, *(run.command for run in PLAN)}
)


def to_whet(command: str) -> list[str]:
    """The words that `whet` gets from a command, whichever program it names; what launches it is left out."""
    words = shlex.split(command)
    for i, word in enumerate(words):
        if word in ("train_grpo.py", "rl_trainer.py"):
            program = train_grpo.to_whet if word == "train_grpo.py" else rl_trainer.to_q
            return program(words[i + 1 :])
        if word == "whet" or word == "whetstone":
            return words[i + 1 :]
    raise AssertionError(f"no program in {command}")


def runnable(command: str) -> tuple[str, ...]:
    """The words of a command, with what stands in for its placeholders."""
    words = [WORDS.get(word, word) for word in to_whet(COMMANDS.get(command, command).partition(" > ")[0])]
    if words[0] == "play" and "--player" not in words:
        words += ["--player", "gold"]
    if words[0] == "sample":
        words += ["--max-tokens", "8"]
    if words[:2] == ["train", "gsm8k"]:
        words += ["data_path=rows.json", "eval_path=rows.json"]
    return tuple(words)


# Several commands of the docs differ in a placeholder or in numbers alone: they are one here.
RUNNABLE = dict.fromkeys(
    runnable(command)
    for command in DOCUMENTED
    if not NOT_RUN.search(command) and not LOSSES.fullmatch(command)
)
QUICK = [words for words in RUNNABLE if words[0] in QUICK_VERBS or {"gold", "--rewards", "--help"} & {*words}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("config", "examples", "train_grpo.py", "rl_trainer.py"):
        (folder / name).symlink_to(ROOT / name)
    sums = [{"question": f"What is {a} + 5?", "answer": str(a + 5)} for a in range(40)]
    (folder / "rows.json").write_text(json.dumps(sums), encoding="utf-8")
    (folder / "my_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums), encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "Yes."}]}
        for row in sums
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats), encoding="utf-8")
    (folder / "question.txt").write_text("What is 4 + 5?\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text('"What is 4 + 5?"\n', encoding="utf-8")
    (folder / "theirs.yaml").write_text("max_steps: 5\ndatasets: {gcd: {}}\n", encoding="utf-8")
    course = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    (rewards,) = re.findall(r"```python\n(.*?)```", course, flags=re.DOTALL)
    (folder / "my_rewards.py").write_text(rewards, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def runs(place: Path) -> Path:
    """... and with the runs that they name."""
    words = ["save_strategy=steps", "save_steps=1", f"output_dir={place / 'outputs'}"]
    assert cli.run(["train", "grpo", *SMALL, *words]) == 0
    shutil.copytree(place / "outputs" / "grpo_trained", place / "outputs" / "multi_tasks")
    shutil.copytree(place / "outputs", place / "kept")
    return place


@pytest.mark.parametrize("words", QUICK, ids=lambda words: " ".join(words)[:80])
def test_a_quick_command(
    words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert cli.run(list(words)) == 0, capsys.readouterr().err
    assert len(capsys.readouterr().out.splitlines()) >= 3


def small_words(words: Sequence[str]) -> list[str]:
    """Words at the end of a command that make it small; what this command is about stays."""
    verb, given = words[0], " ".join(words)
    kept = [word for word in ("auto_resume", "run_name=second") if word in given]
    taken = {"auto_resume": ("max_steps", "overwrite_output_dir"), "run_name=second": ("model_name_or_path",)}
    left_out = {name for word in kept for name in taken[word]}
    if verb in ("report", "explain", "export", "push", "sample"):
        return []
    if verb == "eval":
        left_out |= {"model_name_or_path", "overwrite_output_dir"}
    if verb == "check":  # with 8 tokens it would stop
        left_out |= {"max_completion_length", "num_generations"}
    if verb == "compare":
        left_out |= {"overwrite_output_dir", "report_to"}
    return [word for word in SMALL if word.partition("=")[0] not in left_out]


def made_small(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command, with what makes it small in place of its own numbers."""
    small = small_words(words)
    keys = {word.partition("=")[0] for word in small}
    return (*(word for word in words if word.partition("=")[0] not in keys), *small)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    dict.fromkeys(made_small(words) for words in RUNNABLE if words not in QUICK),
    ids=lambda words: " ".join(words[:3])[:80],
)
def test_a_command_that_trains_or_reads_a_run(
    words: tuple[str, ...], runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    shutil.rmtree(runs / "outputs")
    shutil.copytree(runs / "kept", runs / "outputs")
    code = cli.run(list(words))
    assert code == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_comparison_of_the_losses(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (command,) = [command for command in DOCUMENTED if LOSSES.fullmatch(command)]
    few = command.replace("seed=1,2,3", "seed=1").replace("--jobs 8", "--jobs 2")
    # Two iterations of a batch are two steps.
    words = [*to_whet(few), *small_words(["compare"]), "output_dir=losses", "max_steps=2"]
    assert cli.run(words) == 0
    (results,) = place.glob("losses/*/results.json")
    assert len(json.loads(results.read_text())["variants"]) == 15


@pytest.mark.parametrize(
    "command", [command for command in DOCUMENTED if NOT_RUN.search(command) and "config/" in command]
)
def test_a_command_that_is_not_run_loads(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = to_whet(command.replace("...", f"--model {resolve('pebble')} --output_dir D"))
    words = words[words.index("train" if "train" in words else "serve") + 1 :]
    found = re.search(r"(?:nproc_per_node=|processes |--ranks )(\d+)", command)
    config = load(words[0], words[1:]).config
    assert make_plan(config, num_problems=1_000, world_size=int(found[1]) if found else 1).num_steps > 0
