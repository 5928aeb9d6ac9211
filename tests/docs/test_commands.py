"""Every command in README.md and docs/ runs on the embedded model, or stands in a table with the reason why
not. A command that is new in the docs fails here until it is in one of the tables.

The commands in the blocks of docs/data.md are run by test_data.py, those of own data in README.md by
test_readme.py, those of the exercises of docs/course.md by test_course_solutions.py, those of the plan of the
recipe pages by tests/benchmarks/test_recipes.py.
"""

import json
import re
import shlex
import shutil
import sys
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
# Commands that run in a second or two -> what stands in for their placeholders ("": they run as they are).
QUICK = {
    "whet": "whet --help",
    "whet config": "",
    "whet config FILE": "whet config quickstart",
    "whet config YOUR.yaml": "whet config theirs.yaml",
    "whet config --markdown": "",
    "whet import FILE": f"whet import {FOREIGN}/verl_ppo_0_5b.sh",
    "whet import YOUR.yaml": f"whet import {FOREIGN}/axolotl_gsm8k.yaml",
    "whet import run_qwen2-7b.sh -o mine.yaml": f"whet import {FOREIGN}/verl_grpo_math.sh",
    "whet config CONFIG": "whet config grpo",
    "whet config [CONFIG]": "whet config grpo",
    "whet config config/multi_tasks.yaml": "",
    "whet check CONFIG --rewards": "whet check datasets='{gcd: {}}' --rewards --problems 2 reward_workers=1",
    "whet check datasets='{gcd: {}}' 'reward_funcs=[my_rewards.py:contains]' apply_chat_template=false "
    "--rewards": "whet check datasets='{gcd: {}}' 'reward_funcs=[accuracy]' --rewards --problems 2",
    "whet doctor": "",
    "whet plan": "whet plan quickstart",
    "whet plan CONFIG": "whet plan quickstart",
    "whet plan six_tasks --gpu H200 --tokens 200 --price 2.5": "",
    "whet plan multi_tasks_1h --gpu H100 --tokens 200": "",
    "whet plan CONFIG --gpu H100 --scale": "whet plan quickstart --gpu H100 --scale",
    "whet plan six_tasks model_name_or_path=Qwen/Qwen2.5-14B-Instruct prompts_per_step=64 "
    "max_completion_length=8192 --gpu H200 --tokens 3000 --scale": "",
    "whet doctor --json": "",
    "whet doctor CONFIG": "whet doctor quickstart",
    "whet launch --help": "",
    "whet play maze_walk --player gold": "",
    "whet play NAME": "whet play guess_number --player gold",
    "whet init": "whet init rows.json",
    "whet init DATA": "whet init rows.json",
    "whet tasks": "",
    "whet tasks NAME": "whet tasks gcd",
    "whet tasks NAME --answer TEXT": "whet tasks gcd --answer 'The answer is 3'",
    "whet tasks NAME --answer 'TEXT'": "whet tasks gcd --answer 'The answer is 3'",
    "whet tasks NAME key=value": "whet tasks chain_sum max_terms=3",
    "whet tasks NAME model_name_or_path=... apply_chat_template=false": (
        "whet tasks gcd model_name_or_path=pebble apply_chat_template=false"
    ),
    "whet tasks [NAME]": "whet tasks maze",
    "whet tasks chain_sum": "",
    "whet tasks examples/extending/task.py:Remainders": "",
    "whet tasks countdown ...": "whet tasks countdown apply_chat_template=false prompt_template='{question}'",
    "whet tasks code path=problems language=klong": "",
    r"whet tasks math path=rows.json --answer 'The answer is \boxed{42}'": "",
}
# Commands that train, evaluate or read a run; with SMALL at the end.
SLOW = {
    "whet play wordle": "whet play wordle --player gold",
    "whet play guess_number high=10 --seed 3 --raw": (
        "whet play guess_number high=10 --seed 3 --raw --player gold"
    ),
    "whet play maze_walk --player random --episodes 200": "",
    "whet play chain_sum 'tools=[calculator]'": "whet play chain_sum 'tools=[calculator]' --player gold",
    "whet play my_env.py:MyEnv": "whet play examples/extending/task.py:Remainders --player gold",
    "whet play repair path=problems language=python --player random --episodes 48": "",
    "whet train guess": "",
    "whet train guess_gpu seed=42": "",
    "python rl_trainer.py --model M --output_dir D --use_wandb --wandb_name N ...": (
        "python rl_trainer.py --model pebble --output_dir D "
        "'datasets={code: {config: {path: expressions, language: python}}}'"
    ),
    "python train_grpo.py --config C --model_path M --output_dir D": (
        "python train_grpo.py --config config/math.yaml --model_path pebble --output_dir D "
        "data_path=rows.json use_peft=false"
    ),
    "python train_grpo.py --config config/course_cpu.yaml": "",
    "python train_grpo.py --config config/multi_tasks.yaml": "",
    "python train_grpo.py --config config/syllogism_toy.yaml": "",
    "python train_grpo.py --config-path config --config-name grpo max_steps=100 "
    "model_name_or_path=Qwen/Qwen2.5-1.5B-Instruct report_to=none": "",
    "python train_grpo.py --config-path config --config-name grpo max_steps=100 report_to=none": "",
    "whet check": "whet check quickstart",
    "whet check CONFIG": "whet check quickstart",
    "whet check quickstart": "",
    "whet compare CONFIG loss_type=grpo,dapo seed=1,2,3": (
        "whet compare course_cpu loss_type=grpo,dapo seed=1"
    ),
    "whet compare course_cpu beta=0,0.04 seed=1,2 fixed_eval_steps=0": (
        "whet compare course_cpu beta=0,0.04 seed=1 fixed_eval_steps=0"
    ),
    "whet compare CONFIG learning_rate=5e-7,1e-6,2e-6": (
        "whet compare course_cpu learning_rate=5e-7,1e-6 seed=1"
    ),
    "whet eval": "whet eval checkpoint_path=outputs/grpo_trained/final_model",
    "whet eval [CONFIG] checkpoint_path=DIR": (
        "whet eval config/grpo.yaml checkpoint_path=outputs/grpo_trained/checkpoint-1"
    ),
    "whet eval checkpoint_path=...": "whet eval checkpoint_path=outputs/grpo_trained/final_model",
    "whet eval checkpoint_path=outputs/grpo_trained/checkpoint-100": (
        "whet eval checkpoint_path=outputs/grpo_trained/checkpoint-1"
    ),
    "whet eval checkpoint_path=outputs/multi_tasks/final_model eval_num_samples=1000 "
    "eval_samples_per_problem=4": "",
    "whet explain": "whet explain outputs/grpo_trained",
    "whet explain RUN": "whet explain outputs/grpo_trained",
    "whet explain outputs/RUN": "whet explain outputs/grpo_trained",
    "whet export": "whet export outputs/grpo_trained",
    "whet export RUN": "whet export outputs/grpo_trained",
    "whet export RUN --gguf q8_0": "whet export outputs/grpo_trained --gguf q8_0",
    "whet export outputs/quickstart --dtype bf16 --gguf q8_0": (
        "whet export outputs/grpo_trained --dtype bf16 --gguf q8_0"
    ),
    "whet push outputs/quickstart/export my-name/quickstart --dry-run": (
        "whet push outputs/grpo_trained my-name/quickstart --dry-run"
    ),
    "whet train quickstart": "",
    "whet train recipe.yaml": "whet train theirs.yaml",
    "whet profile": "",
    "whet profile CONFIG": "whet profile config/grpo.yaml",
    "whet profile config/grpo.yaml": "",
    "whet profile quickstart micro_batch_tokens=4096 --steps 4": "",
    "whet profile six_tasks use_peft=true beta=0.01": "",
    "whet report RUN": "whet report outputs/grpo_trained",
    "whet report outputs/RUN": "whet report outputs/grpo_trained",
    "whet sample": "whet sample outputs/grpo_trained --text Hello --max-tokens 8",
    "whet sample RUN --prompt FILE": (
        "whet sample outputs/grpo_trained --prompt question.txt --max-tokens 8"
    ),
    "whet sample outputs/quickstart --prompt question.txt -n 8": (
        "whet sample outputs/grpo_trained --prompt question.txt -n 8 --max-tokens 8"
    ),
    "whet sample outputs/quickstart --prompt prompts.jsonl --json > answers.jsonl": (
        "whet sample outputs/grpo_trained --prompt prompts.jsonl --json --max-tokens 8"
    ),
    "whet sample outputs/quickstart --problem chain_sum/eval/000003 -n 8": (
        "whet sample outputs/grpo_trained --problem basic_arithmetic/eval/000003 -n 8 --max-tokens 8"
    ),
    "whet sft": "whet sft quickstart",
    "whet sft CONFIG": "whet sft quickstart",
    "whet sft math data_path=rows.json model_name_or_path=pebble use_peft=false": "",
    "whet sft rows data_path=chat.jsonl developer_prompt=null": "",
    "whet sft quickstart rejection_sampling=true": "",
    "whet train math data_path=rows.json model_name_or_path=outputs/sft/final_model use_peft=false": (
        "whet train math data_path=rows.json model_name_or_path=pebble use_peft=false"
    ),
    "whet train": "",
    "whet train --config YOUR.yaml": "whet train --config theirs.yaml",
    "whet train NAME": "whet train syllogism_toy",
    "whet train YOUR.yaml": "whet train theirs.yaml",
    "whet train [CONFIG] [key=value ...]": "whet train sums temperature=0.9",
    "whet train config/grpo.yaml": "",
    "whet train config/grpo.yaml auto_resume=true": (
        "whet train config/grpo.yaml auto_resume=true max_steps=2 overwrite_output_dir=false"
    ),
    "whet train CONFIG auto_resume=true": "whet train config/grpo.yaml auto_resume=true",
    "whet train gsm8k learning_rate=5e-6 max_completion_length=512 max_steps=120": (
        "whet train gsm8k data_path=rows.json eval_path=rows.json"
    ),
    "whet train gsm8k": "whet train gsm8k data_path=rows.json eval_path=rows.json",
    "whet train gsm8k seed=42": ("whet train gsm8k data_path=rows.json eval_path=rows.json"),
    "whet train critic": "",
    "whet train local_kl": "",
    "whet train six_tasks": "",
    "whet train six_tasks seed=43": "",
    "whet train six_tasks bf16_rounding=stochastic": "",
    "whet train six_tasks bf16_rounding=stochastic learning_rate=1.0e-6": "",
    "whet train gsm8k bf16_rounding=stochastic learning_rate=2.0e-6 max_steps=40": (
        "whet train gsm8k data_path=rows.json eval_path=rows.json bf16_rounding=stochastic"
    ),
    "whet train six_tasks use_peft=true learning_rate=2.0e-5 beta=0.01 max_steps=20 fixed_eval_steps=10 "
    "bf16_rounding=stochastic": "",
    "whet train six_tasks use_peft=true learning_rate=2.0e-5 beta=0.01 max_steps=20": "",
    "whet train six_tasks beta=0.01 max_steps=8 eval_num_samples=0 use_peft=true": "",
    "whet train gsm8k num_generations=8 max_steps=8 eval_num_samples=0 use_peft=true": (
        "whet train gsm8k data_path=rows.json eval_path=rows.json use_peft=true"
    ),
    "whet train smollm2_cpu": "whet train smollm2_cpu sft_steps=1",
    "whet train course_cpu run_name=accuracy_only 'reward_funcs=[accuracy]'": "",
    "whet train examples/agents/calculator.yaml": "",
    "whet train examples/extending/config.yaml": "",
    "whet train datasets='{gcd: {}}'": "",
    "whet train grpo model_name_or_path=outputs/grpo_trained/final_model run_name=second": "",
    "whet train math model_path=M data_path=rows.json": (
        "whet train math model_path=pebble data_path=rows.json use_peft=false"
    ),
    "whet train multi_tasks 'reward_funcs=[accuracy, my_rewards.py:strict_format]'": "",
    "whet train syllogism_toy": "",
}
# Commands that nothing here can run -> why. Their configurations are loaded all the same.
GPUS = "several GPUs; tests/distributed runs two processes on a CPU by torchrun and by accelerate"
SERVERS = (
    "vLLM or SGLang and GPUs of its own; tests/vllm, tests/sglang and tests/e2e/test_servers.py run servers"
)
ENDPOINT = "a server that runs until Ctrl-C; tests/serving and tests/commands/test_serve.py run it"
RAY = "a Ray cluster with GPUs; tests/commands/test_launch.py runs one of two ranks on a CPU"
WATCH = "serves until Ctrl-C; tests/watch runs the server"
HUB = "the hub; tests/export/test_push.py runs it against a stand-in"
CHAT = "a conversation in a terminal; tests/commands/test_chat.py types into one"
NOT_RUN = {
    "whet push": HUB,
    "whet push RUN NAME": HUB,
    "whet chat RUN": CHAT,
    "whet push outputs/quickstart my-name/quickstart": HUB,
    "whet chat outputs/quickstart": CHAT,
    "whet chat outputs/quickstart/checkpoint-30": CHAT,
    "whet chat smollm2-135m": CHAT,
    "whet watch": WATCH,
    "whet watch outputs/quickstart": WATCH,
    "whet watch --host 0.0.0.0": WATCH,
    "whet check quickstart max_completion_length=2": "exit code 1; tests/run/test_preflight.py runs it",
    "accelerate launch --multi_gpu train_grpo.py ...": GPUS,
    "accelerate launch --num-processes 7 --config-file config/zero3.yaml rl_trainer.py ...": GPUS,
    "accelerate launch --num_processes 8 -m whetstone train config/grpo.yaml": GPUS,
    'srun torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint="$head:29400" '
    '--rdzv_id="$SLURM_JOB_ID" --max-restarts=3 -m whetstone train config/grpo.yaml ddp_size=4 '
    "auto_resume=true": GPUS,
    "torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST0:29400 --rdzv_id=grpo1 "
    "--max-restarts=3 -m whetstone train config/grpo.yaml ddp_size=4": GPUS,
    "torchrun --nproc_per_node=2 -m whetstone train config/grpo.yaml": GPUS,
    "torchrun --nproc_per_node=4 -m whetstone train config/grpo.yaml": GPUS,
    "torchrun --nproc_per_node=8 -m whetstone train CONFIG": GPUS,
    "torchrun --nproc_per_node=8 -m whetstone train config/countdown.yaml tp_size=2": GPUS,
    "torchrun --nproc_per_node=8 -m whetstone train config/grpo.yaml": GPUS,
    "torchrun --nproc_per_node=8 -m whetstone train config/grpo.yaml tp_size=2 ddp_size=2": GPUS,
    "torchrun --standalone --nproc_per_node=4 train_grpo.py --config config/countdown.yaml tp_size=2": GPUS,
    "torchrun --nproc_per_node=6 -m whetstone train config/grpo.yaml rollout_engine=vllm "
    "rollout_servers=http://127.0.0.1:8000,http://127.0.0.1:8001": SERVERS,
    "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 whet train config/grpo.yaml rollout_engine=vllm "
    "rollout_servers=127.0.0.1:8000,127.0.0.1:8001": SERVERS,
    "whet serve": SERVERS,
    "whet serve RUN": ENDPOINT,
    "whet serve outputs/quickstart": ENDPOINT,
    "whet serve outputs/quickstart/checkpoint-30 --port 8001": ENDPOINT,
    "whet serve smollm2-135m --host 0.0.0.0 --api-key SECRET": ENDPOINT,
    "whet serve pebble --adapter sums=outputs/sums --adapter dates=outputs/dates": ENDPOINT,
    "whet serve CONFIG rollout_engine=vllm": SERVERS,
    "whet serve config/grpo.yaml rollout_engine=vllm server_devices=[6,7]": SERVERS,
    "whet train config/grpo.yaml rollout_engine=sglang server_python=.venv-sglang/bin/python": SERVERS,
    "whet launch": GPUS,
    "whet launch --max-restarts 3": GPUS,
    "whet launch --ranks 2": GPUS,
    "whet launch --ranks 8 train CONFIG": GPUS,
    "whet launch --ranks 8 train config/grpo.yaml": GPUS,
    "whet launch --share-gpu": "names the flag",
    "whet launch --ranks 2 --share-gpu train quickstart": "tests/gpu/test_shared_gpu.py runs it on a GPU",
    "accelerate launch --config-file YOURS.yaml -m whetstone config CONFIG": GPUS,
    "whet launch --ray": RAY,
    "whet launch --ray --ranks 16 --servers 4 train config/grpo.yaml rollout_engine=vllm "
    "server_tensor_parallel_size=4 weight_transfer_dir=/shared/weights": RAY,
    "whet launch --ray --ranks 32 --max-restarts 3 train config/grpo.yaml ddp_size=4": RAY,
    "whet launch --ray --ranks 6 --servers 2 train ...": RAY,
    "whet launch --ray --ranks 6 --servers 2 train config/grpo.yaml rollout_engine=vllm": RAY,
    "whet train q/7b model_name_or_path=M": "an interpreter of q, which needs a license",
    "whet train | head -1": "its output ends early; tests/e2e/test_train.py closes it after one line",
}

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
RUNNABLE = {command: text or command for command, text in {**QUICK, **SLOW}.items()}


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


def test_every_command_of_the_docs_is_run_or_says_why_not() -> None:
    listed = {*QUICK, *SLOW, *NOT_RUN}
    new = [command for command in DOCUMENTED if command not in listed and not LOSSES.fullmatch(command)]
    assert new == [], "put it into QUICK, SLOW or NOT_RUN"
    assert sorted(listed - set(DOCUMENTED)) == [], "no page has it any more"
    assert not set(QUICK) & set(SLOW) and not set(NOT_RUN) & {*QUICK, *SLOW}
    assert all(reason for reason in NOT_RUN.values())


def test_commands_are_found_in_blocks_and_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Use `whet tasks gcd`, not `whetstone` or `whet:` or `torchrun --max-restarts=3`.\n\n"
        "```\nwhet train a=1 \\\n  b=2      a remark\nls\nA=1 torchrun -m whetstone train x   # why\n```\n\n"
        "    whet profile\n"
    )
    assert sorted(commands(page)) == [
        "A=1 torchrun -m whetstone train x",
        "whet profile",
        "whet tasks gcd",
        "whet train a=1 b=2",
    ]


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


# Several commands of the docs differ in a placeholder alone: they are one here.
@pytest.mark.parametrize(
    "words",
    dict.fromkeys(tuple(to_whet(RUNNABLE[command])) for command in QUICK),
    ids=lambda words: " ".join(words)[:80],
)
def test_a_quick_command(
    words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert cli.run(list(words)) == 0, capsys.readouterr().err
    assert len(capsys.readouterr().out.splitlines()) >= 5


def small_words(words: list[str]) -> list[str]:
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


def made_small(command: str) -> tuple[str, ...]:
    """The words of a command, with what makes it small in place of its own numbers."""
    words = to_whet(RUNNABLE[command])
    small = small_words(words)
    keys = {word.partition("=")[0] for word in small}
    return (*(word for word in words if word.partition("=")[0] not in keys), *small)


# Several commands of the docs differ in numbers alone: they are one here.
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", dict.fromkeys(map(made_small, SLOW)), ids=lambda words: " ".join(words[:3])[:80]
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


@pytest.mark.parametrize("command", [command for command in NOT_RUN if "config/" in command])
def test_a_command_that_is_not_run_loads(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = to_whet(command.replace("...", f"--model {resolve('pebble')} --output_dir D"))
    words = words[words.index("train" if "train" in words else "serve") + 1 :]
    found = re.search(r"(?:nproc_per_node=|processes |--ranks )(\d+)", command)
    config = load(words[0], words[1:]).config
    assert make_plan(config, num_problems=1_000, world_size=int(found[1]) if found else 1).num_steps > 0
