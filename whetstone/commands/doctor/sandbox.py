"""The sandbox as it works here, by starting one, and the interpreters and compilers of programs."""

from whetstone.commands.doctor.check import Check, make_check
from whetstone.config import Config
from whetstone.errors import UserError
from whetstone.sandbox.languages import LANGUAGES, language, missing, tools
from whetstone.sandbox.pool import LocalPool

SANDBOX, PROGRAMS = "Sandbox for programs and scorers", "Languages of programs"


def check_sandbox(config: Config | None) -> list[Check]:
    isolation = "auto" if config is None else config.programs.sandbox_isolation
    try:
        with LocalPool(isolation=isolation) as pool:
            pool.start("python")
            kind, statement = str(pool.kind), pool.statement
    except UserError as error:
        remedy = "allow user namespaces or seccomp, or accept the risk with sandbox_isolation=limits"
        detail = str(error).partition(": allow")[0]
        return [make_check(SANDBOX, "isolation", detail, remedy, problem=True)]
    remedy = "" if kind == "namespaces" or isolation == kind else "allow user namespaces (docs/sandbox.md)"
    return [make_check(SANDBOX, "isolation", f"{kind}: {statement}", remedy)]


def check_languages(config: Config | None) -> list[Check]:
    """Every language, or those that the code tasks of a run name."""
    needed = list(LANGUAGES) if config is None else _languages(config)
    return [_language(name, is_needed=config is not None) for name in needed]


def _languages(config: Config) -> list[str]:
    specs = {**config.tasks.datasets, **config.tasks.eval_datasets}.values()
    named = [spec.config["language"] for spec in specs if spec.config.get("language")]
    return list(dict.fromkeys(language(str(name)).name for name in named))


def _language(name: str, *, is_needed: bool) -> Check:
    row = LANGUAGES[name]
    if missing(name) is not None:
        return make_check(PROGRAMS, name, "not installed", row.install_hint, problem=is_needed)
    detail = row.title
    if row.runner == "exec":
        here = tools(name)
        commands = here.compilers or (here.command,)
        detail += ": " + ", then ".join(command[0] for command in commands)
    return make_check(PROGRAMS, name, detail)
