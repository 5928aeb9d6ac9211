"""The five rules of the house, as code: who may import whom, where torch and the big optional packages may
stand, no room without a name, pure mathematics. Reads the source by its syntax tree; imports nothing of it.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "whetstone"
EVERYTHING = frozenset({"*"})

# Rule 1. Room -> the rooms it may import beside itself and `errors`.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "types": frozenset(),
    "config": frozenset({"text"}),
    "metrics": frozenset(),
    "seeds": frozenset(),
    "statistics": frozenset(),
    "stopping": frozenset(),
    "text": frozenset(),
    "stages": frozenset(),
    "streams": frozenset(),
    "environment": frozenset(),
    "display": frozenset({"stages", "text"}),
    "run_log": frozenset({"display", "metrics", "streams", "text"}),
    "run_record": frozenset({"metrics", "run_log"}),
    "learning_signal": frozenset({"types", "config", "text"}),
    "evaluation_folder": frozenset({"config"}),
    "sandbox": frozenset({"config"}),
    "rewards": frozenset({"types", "sandbox"}),
    "tasks": frozenset({"types", "config", "rewards", "sandbox", "seeds", "stages"}),
    "algorithm": frozenset({"types", "config"}),
    "parallel": frozenset({"config"}),
    "manifest": frozenset(),
    "model": frozenset({"config", "manifest", "parallel", "types"}),
    "engines": frozenset({"types", "config", "model", "parallel", "seeds"}),
    "batch": frozenset({"types", "config"}),
    "rollout": frozenset({"types", "config", "tasks", "engines", "seeds", "curriculum", "stages"}),
    "curriculum": frozenset({"types", "config"}),
    "ahead": frozenset({"types", "config", "tasks", "rollout"}),
    "sharing": frozenset({"types", "tasks", "engines", "rollout", "parallel"}),
    "marks": frozenset(),
    "utilisation": frozenset({"batch", "marks", "model", "parallel", "rollout"}),
    "optimiser": frozenset({"config", "parallel"}),
    "coefficients": frozenset({"config"}),
    "experience": frozenset({"types", "config", "algorithm", "model", "parallel", "batch"}),
    "update": frozenset(
        {"types", "config", "algorithm", "model", "parallel", "batch", "metrics", "optimiser"}
        | {"coefficients", "experience", "budget", "marks", "shortage", "stages", "tally"}
    ),
    "tally": frozenset({"parallel"}),
    "budget": frozenset({"types", "model", "batch", "parallel"}),
    "shortage": frozenset({"parallel"}),
    "evaluate": frozenset(
        {"types", "config", "tasks", "engines", "rollout", "metrics", "statistics"}
        | {"run_log", "stages", "text"}
    ),
    "checkpoint": frozenset({"config", "manifest", "parallel"}),
    "run_folder": frozenset({"config", "checkpoint", "metrics", "parallel"}),
    "sync_check": frozenset({"config"}),
    "packages": frozenset({"config", "engines"}),
    "completions": frozenset({"types", "metrics", "text"}),
    "progress": frozenset({"metrics", "run_log", "display", "text"}),
    # The report says of a run what `whet explain` says: one judgement, not two that differ.
    "report": frozenset({"metrics", "advice", "run_record"}),
    "advice": frozenset({"types", "config", "tasks", "model", "sandbox", "metrics", "text"}),
    # train and what it shares with trl, the command line, and the verbs around the loop
    **dict.fromkeys(("train", "assembly", "cli", "__main__", "listing", "trl", "serve"), EVERYTHING),
    **dict.fromkeys(("sft", "compare", "export", "chat", "launch", "profiling"), EVERYTHING),
    "compare_results": frozenset({"statistics"}),
    "compare_variants": frozenset({"statistics"}),
    "compare_progress": frozenset({"compare_results", "config", "metrics"}),
    "compare_plot": frozenset({"metrics"}),
}
# Rule 2.
WITHOUT_TORCH = ("config", "types", "tasks", "rewards", "sandbox", "report")
MAY_DISTRIBUTE = ("parallel", "checkpoint")
# Rule 3. Package -> the file or folder (beneath whetstone) that may import it, inside functions only.
ADAPTER_OF = {
    "vllm": "engines/vllm",
    "sglang": "engines/sglang",
    "trl": "trl",
    "ray": ("launch", "sandbox/ray_pool"),
    "wandb": "metrics",
    "tensorboard": "metrics",
    "trackio": "metrics",
    "torch.utils.tensorboard": "metrics",
}
# Rule 4.
NAMELESS = ("utils", "util", "common", "helpers", "helper", "misc")
# Rule 5. What a function of tensors has no business with.
IMPURE = (
    "os",
    "io",
    "pathlib",
    "logging",
    "random",
    "time",
    "tempfile",
    "shutil",
    "torch.distributed",
    "rich",
)


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    in_function: bool


def modules() -> list[str]:
    """Every module as a path beneath the package without its ending: `tasks/gym`, `config/__init__`."""
    return sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    return module.split("/")[0]


def imports_of(module: str) -> list[Import]:
    """Every import of a module; `from whetstone import seeds` counts as `whetstone.seeds`."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return imports_in(
        tree, f"whetstone.{module.replace('/', '.')}".removesuffix(".__init__"), module.endswith("__init__")
    )


def imports_in(tree: ast.AST, name: str, is_package: bool = False) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            # The names may be modules themselves; naming both can only make a rule see more.
            found.append(Import(base, node.lineno, in_function))
            found.extend(Import(f"{base}.{alias.name}", node.lineno, in_function) for alias in node.names)
        function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, False)
    return found


def rooms_imported(imports: list[Import]) -> dict[str, int]:
    """Room -> a line that imports it. `whetstone` itself (its version) is no room."""
    return {
        entry.module.split(".")[1]: entry.line
        for entry in imports
        if entry.module.startswith("whetstone.") and is_room(entry.module.split(".")[1])
    }


def is_room(name: str) -> bool:
    return (PACKAGE / f"{name}.py").is_file() or (PACKAGE / name / "__init__.py").is_file()


def reaches(entry: Import, package: str) -> bool:
    return entry.module == package or entry.module.startswith(f"{package}.")


@pytest.mark.parametrize("module", modules())
def test_a_room_imports_only_what_it_may(module: str) -> None:
    if module == "__init__":
        assert not rooms_imported(imports_of(module)), (
            "whetstone/__init__.py must stay light: `whet --help` imports it"
        )
        return
    room = room_of(module)
    assert room in MAY_IMPORT, f"whetstone/{room} is a new room: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[room] | {room, "errors"}
    if allowed >= EVERYTHING:
        return
    for other, line in rooms_imported(imports_of(module)).items():
        assert other in allowed, f"whetstone/{module}.py:{line} imports {other}, which {room} may not"


@pytest.mark.parametrize("module", [name for name in modules() if room_of(name) in WITHOUT_TORCH])
def test_rooms_that_need_no_tensors_import_no_torch(module: str) -> None:
    for entry in imports_of(module):
        assert not reaches(entry, "torch"), f"whetstone/{module}.py:{entry.line} imports torch"


@pytest.mark.parametrize("module", [name for name in modules() if room_of(name) not in MAY_DISTRIBUTE])
def test_torch_distributed_stays_in_its_rooms(module: str) -> None:
    for entry in imports_of(module):
        assert not reaches(entry, "torch.distributed"), (
            f"whetstone/{module}.py:{entry.line} imports torch.distributed"
        )
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        is_torch = (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        )
        assert not (is_torch and node.attr == "distributed"), f"whetstone/{module}.py uses torch.distributed"  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", modules())
def test_optional_packages_are_imported_in_their_adapter_inside_functions(module: str) -> None:
    for entry in imports_of(module):
        for package, named in ADAPTER_OF.items():
            if not reaches(entry, package):
                continue
            where = f"whetstone/{module}.py:{entry.line}"
            homes = (named,) if isinstance(named, str) else named
            assert any(module == home or module.startswith(f"{home}/") for home in homes), (
                f"{where} imports {package}, which only {homes} may"
            )
            assert entry.in_function, (
                f"{where} imports {package} at the top: do it inside the function that needs it"
            )


@pytest.mark.parametrize("module", modules())
def test_every_room_has_a_name_of_its_own(module: str) -> None:
    assert not set(module.split("/")) & set(NAMELESS), f"whetstone/{module}.py: name it after what it does"


@pytest.mark.parametrize("module", [name for name in modules() if room_of(name) == "algorithm"])
def test_the_mathematics_is_pure(module: str) -> None:
    for entry in imports_of(module):
        for package in IMPURE:
            assert not reaches(entry, package), f"whetstone/{module}.py:{entry.line} imports {package}"
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input"}, f"whetstone/{module}.py reads, writes or prints"


def test_the_scan_sees_every_form_of_import() -> None:
    code = (
        "import torch.distributed as dist\n"
        "from whetstone import seeds\n"
        "from ..config import load\n"
        "def f():\n    import vllm\n    from torch import distributed\n"
    )
    found = imports_in(ast.parse(code), "whetstone.tasks.gym")
    assert [(entry.module, entry.in_function) for entry in found] == [
        ("torch.distributed", False),
        ("whetstone", False),
        ("whetstone.seeds", False),
        ("whetstone.config", False),
        ("whetstone.config.load", False),
        ("vllm", True),
        ("torch", True),
        ("torch.distributed", True),
    ]
    assert set(rooms_imported(found)) == {"seeds", "config"}
    # In a package's __init__, one dot is the package itself.
    found = imports_in(ast.parse("from .load import build\n"), "whetstone.config", is_package=True)
    assert found[0].module == "whetstone.config.load"
