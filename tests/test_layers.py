"""The rules of the architecture: which package may import which, no cycles, where torch and optional packages
may be imported, pure mathematics. Reads the syntax trees; imports nothing of the package.
"""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "whetstone"
MAX_ROOT_MODULES = 8

# Rule 1. Package -> the packages that it imports. A permission that nobody uses fails, too.
# The order is the order of the layers: an entry names only entries above it, so there are no cycles.
MAY_IMPORT: dict[str, str] = {
    "errors": "",
    "types": "",
    "seeds": "",
    "files": "errors",
    "terminal": "errors files",
    "config": "errors terminal",
    "sandbox": "errors",
    "rewards": "errors types config files sandbox",
    "environments": "errors types config files sandbox rewards",
    "tasks": "errors types seeds terminal config sandbox rewards environments",
    "endpoint": "errors types files environments",
    "algorithm": "errors config",
    "parallel": "errors config",
    "model": "errors types terminal config environments parallel",
    "engines": "errors types seeds terminal config parallel model",
    "cost": "errors config tasks model",
    "rollout": "errors types seeds terminal config environments tasks endpoint parallel engines",
    "optimizer": "errors config parallel",
    "update": "errors types terminal config algorithm parallel model cost optimizer",
    "evaluation": "types files terminal config tasks rollout",
    "run": "errors types seeds files terminal config sandbox rewards environments tasks endpoint algorithm "
    "parallel model engines cost rollout update evaluation",
    "inference": "errors types seeds files config tasks endpoint model engines rollout run",
    "serving": "errors types seeds environments endpoint model engines rollout run inference",
    "diagnosis": "errors terminal run",
    "watch": "errors types files sandbox endpoint model run inference diagnosis",
    "report": "errors files terminal model evaluation run diagnosis watch",
    "export": "errors terminal config model report run",
    "train": "types seeds terminal config parallel model rollout evaluation run report export",
    "api": "errors files config engines inference report rewards run export train",
    "commands": "errors types seeds files terminal config sandbox environments tasks parallel model engines "
    "cost rollout update evaluation run inference serving diagnosis report watch export train",
    "__main__": "errors terminal commands",
}
# Rule 2.
WITHOUT_TORCH = ("config", "types", "tasks", "rewards", "sandbox", "environments", "report")
MAY_DISTRIBUTE = ("parallel", "run/checkpoint")
# Rule 3. Package -> the file or folder (beneath whetstone) that may import it, inside functions only.
ADAPTER_OF = {
    "vllm": "engines/servers/vllm",
    "sglang": "engines/servers/sglang",
    "trl": (),
    "ray": ("commands/launch", "sandbox/ray_pool"),
    "wandb": "run/metrics",
    "tensorboard": "run/metrics",
    "trackio": "run/metrics",
    "websockets": "environments/openenv",
    "torch.utils.tensorboard": "run/metrics",
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


def full_name(module: str) -> str:
    return f"whetstone.{module.replace('/', '.')}".removesuffix(".__init__")


def package_of(module: str) -> str:
    return module.split("/")[0]


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


@functools.cache
def imports_of(module: str) -> list[Import]:
    """Every import of a module; `from whetstone import seeds` counts as `whetstone.seeds`."""
    return imports_in(
        tree_of(module),
        f"whetstone.{module.replace('/', '.')}".removesuffix(".__init__"),
        module.endswith("__init__"),
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


def packages_imported(imports: list[Import]) -> dict[str, int]:
    """Package -> a line that imports it. `whetstone` itself (its version) does not count."""
    return {
        entry.module.split(".")[1]: entry.line
        for entry in imports
        if entry.module.startswith("whetstone.") and is_package_name(entry.module.split(".")[1])
    }


def is_package_name(name: str) -> bool:
    return (PACKAGE / f"{name}.py").is_file() or (PACKAGE / name / "__init__.py").is_file()


def reaches(entry: Import, package: str) -> bool:
    return entry.module == package or entry.module.startswith(f"{package}.")


def imported_packages() -> dict[str, dict[str, str]]:
    """Package -> package it imports -> where."""
    edges: dict[str, dict[str, str]] = {}
    for module in modules():
        if module == "__init__":
            continue
        own = edges.setdefault(package_of(module), {})
        for other, line in packages_imported(imports_of(module)).items():
            if other != package_of(module):
                own[other] = f"whetstone/{module}.py:{line}"
    return edges


def test_packages_import_exactly_what_the_table_says() -> None:
    edges = imported_packages()
    assert set(edges) == set(MAY_IMPORT), "a package is missing in MAY_IMPORT, or no longer exists"
    for package, others in edges.items():
        allowed = set(MAY_IMPORT[package].split())
        for other, where in others.items():
            assert other in allowed, f"{where} imports {other}, which {package} may not"
        assert not allowed - set(others), f"MAY_IMPORT['{package}'] allows what nobody imports"


def test_layers_have_an_order() -> None:
    seen: set[str] = set()
    for package, others in MAY_IMPORT.items():
        assert set(others.split()) <= seen, f"{package} imports a package below it in the table"
        seen.add(package)


def test_there_is_no_cycle_of_modules() -> None:
    """Within packages too; imports inside functions and for typing count."""
    names = {full_name(module): module for module in modules()}
    graph = {}
    for name, module in names.items():
        lines: dict[int, list[str]] = {}
        for entry in imports_of(module):
            lines.setdefault(entry.line, []).append(entry.module)
        # `from package import module` imports the module alone, as far as cycles go.
        graph[name] = {
            other
            for imported in lines.values()
            for other in imported
            if other in names
            and not any(inner in names and inner.startswith(f"{other}.") for inner in imported)
        } - {name}
    while graph:
        free = {name for name, others in graph.items() if not others & set(graph)}
        assert free, f"modules that import each other: {sorted(graph)}"
        graph = {name: others for name, others in graph.items() if name not in free}


def test_the_root_is_small() -> None:
    root = [module for module in modules() if "/" not in module]
    assert len(root) <= MAX_ROOT_MODULES, root


def test_importing_the_package_is_cheap() -> None:
    """`whet --help` imports whetstone/__init__.py."""
    for entry in imports_of("__init__"):
        assert entry.in_function or not entry.module.startswith(("whetstone.", "torch")), entry


def test_packages_without_tensors_import_no_torch() -> None:
    for module in [name for name in modules() if package_of(name) in WITHOUT_TORCH]:
        for entry in imports_of(module):
            assert not reaches(entry, "torch"), f"whetstone/{module}.py:{entry.line} imports torch"


def test_torch_distributed_stays_in_its_packages() -> None:
    for module in [name for name in modules() if not name.startswith(MAY_DISTRIBUTE)]:
        for entry in imports_of(module):
            assert not reaches(entry, "torch.distributed"), (
                f"whetstone/{module}.py:{entry.line} imports torch.distributed"
            )
        for node in ast.walk(tree_of(module)):
            assert not (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) == ("torch", "distributed")
            ), f"whetstone/{module}.py uses torch.distributed"


def test_optional_packages_are_imported_inside_their_adapter() -> None:
    for module in modules():
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


def test_no_package_is_called_utils() -> None:
    for module in modules():
        assert not set(module.split("/")) & set(NAMELESS), (
            f"whetstone/{module}.py: name it after what it does"
        )


def test_the_mathematics_is_pure() -> None:
    for module in [name for name in modules() if package_of(name) == "algorithm"]:
        for entry in imports_of(module):
            for package in IMPURE:
                assert not reaches(entry, package), f"whetstone/{module}.py:{entry.line} imports {package}"
        called = {
            node.func.id
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"open", "print", "input"}, f"whetstone/{module}.py reads, writes or prints"
