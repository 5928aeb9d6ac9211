"""docs/course.md: its commands load, its settings are accepted, and what is short enough is run."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import cost_tables
from benchmarks.published_runs import NEMO_RUNS, published_rows
from whetstone.commands.compare.grid import parse_grid
from whetstone.config import LoadedConfig, load, make_plan
from whetstone.cost.estimate import estimate
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import model_shape
from whetstone.train import train

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402

COURSE = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
DIRECTIONS = COURSE[COURSE.index("## The directions") : COURSE.index("### 7. Measuring")]
SETTING = re.compile(r"[a-z_]+=\S")
GPU_RECIPES = ("syllogism_toy", "multi_tasks", "grpo")
SMALL = shlex.split(
    "model_name_or_path=pebble bf16=false max_steps=2 eval_num_samples=5 eval_num_examples_to_print=0 "
    "eval_greedy=false max_completion_length=64 per_device_train_batch_size=4 gradient_accumulation_steps=1 "
    "num_generations=4 save_strategy='no' reward_workers=1 report_to=none preflight=off"
)


def commands() -> list[list[str]]:
    """Every command of the page: lines of its code blocks, and whole commands inside sentences."""
    blocks = COURSE.split("```")[1::2]
    shell = [line for block in blocks if block.startswith("\n") for line in block.splitlines()]
    lines = [re.sub(r" {3,}\S.*", "", line) for line in shell]
    spans = re.findall(r"`(whet [^`]+)`", COURSE)
    return [shlex.split(text) for text in (*lines, *spans) if text]


def settings() -> list[str]:
    """Every `key=value ...` of the directions."""
    spans = re.findall(r"`([^`\n]+)`", DIRECTIONS)
    return [span for span in spans if SETTING.match(span)]


def load_words(words: list[str]) -> LoadedConfig:
    """A command of the page as the program would load it."""
    if words[:2] == ["python", "train_grpo.py"]:
        words = ["whet", *train_grpo.to_whet(words[2:])]
    assert words[0] == "whet", words
    verb, *rest = words[1:]
    source = rest.pop(0) if rest and "=" not in rest[0] else "multi_tasks"
    if verb == "compare":
        assert len(parse_grid(source, rest).cells) == 4
        return load(source)
    return load(source, rest)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_loads(words: list[str]) -> None:
    if words[:2] in (["whet", "train"], ["whet", "profile"]) and words[2:] in (["NAME"], []):
        return
    loaded = load_words(words)
    assert make_plan(loaded.config, num_problems=10_000).num_steps > 0


@pytest.mark.parametrize("recipe", ["multi_tasks", "course_cpu"])
@pytest.mark.parametrize("text", settings())
def test_a_setting_of_the_directions_is_accepted(text: str, recipe: str) -> None:
    words = [text] if text.startswith("reward_") else shlex.split(text)
    config = load(recipe, words).config
    assert make_plan(config, num_problems=10_000).num_steps > 0


@pytest.mark.parametrize(
    ("recipe", "funcs", "weights"),
    [
        ("multi_tasks", "[accuracy]", [1.0]),
        ("grpo", "[format]", [0.2]),
        ("grpo", "[format, accuracy]", [0.2, 1.0]),
        ("grpo", "[accuracy, my_rewards.py:strict_format]", [1.0, 0.2]),  # in the place of format
        ("grpo", "[accuracy, format, length]", [1.0, 0.2, 1.0]),
    ],
)
def test_weights_follow_the_reward_functions(recipe: str, funcs: str, weights: list[float]) -> None:
    loaded = load(recipe, [f"reward_funcs={funcs}"])
    assert loaded.config.tasks.reward_weights == weights
    assert load(recipe, [f"reward_funcs={funcs}", f"reward_weights={weights}"]).config == loaded.config


def test_a_change_of_weights_is_said() -> None:
    assert any(note.startswith("reward_weights") for note in load("grpo", ["reward_funcs=[format]"]).notes)
    assert not any("reward_weights" in note for note in load("grpo", ["reward_weights=[1, 0.5]"]).notes)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_a_recipe_of_the_course_starts_on_a_cpu(recipe: str, tmp_path: Path) -> None:
    """Its prompts, developer prompt included, fit into the embedded model's context."""
    results = train(load(recipe, [*SMALL, f"output_dir={tmp_path}"]))
    assert results["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("text", settings())
def test_a_direction_runs_on_a_cpu(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", DIRECTIONS, flags=re.DOTALL)
    assert code is not None
    (tmp_path / "my_rewards.py").write_text(code.group(1), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = [text] if text.startswith("reward_") else shlex.split(text)
    quick = [word for word in SMALL if word.partition("=")[0] not in text]
    results = train(load("course_cpu", [*quick, *words, f"output_dir={tmp_path}"]))
    assert results["steps"] == 2


# --- memory: docs/scale.md and the recipes' own claims ---


def test_the_tables_of_the_scale_pages_are_the_cost_model_s(capsys: pytest.CaptureFixture[str]) -> None:
    cost_tables.main(cost_tables.SCALINGS[:2])  # the others take seconds each
    print("\n".join(published_rows(NEMO_RUNS[:2])))
    pages = [ROOT / "docs" / "scale.md", ROOT / "docs" / "lab" / "scale.md"]
    lines = {line for page in pages for line in page.read_text(encoding="utf-8").splitlines()}
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 40 and [row for row in rows if row not in lines] == []


def test_grpo_yaml_fits_into_the_memory_that_it_names() -> None:
    named = re.search(r"One GPU with (\d+) GB", (ROOT / "config" / "grpo.yaml").read_text(encoding="utf-8"))
    assert named is not None
    config = load("grpo").config
    shape = model_shape(config.model.model_name_or_path)
    prompts = Prompts(tokens=256, num_problems=1000, source="")
    planned = estimate(config, shape, prompts, capacity=0.85 * int(named.group(1)) * 1e9)
    assert planned.memory.fits
