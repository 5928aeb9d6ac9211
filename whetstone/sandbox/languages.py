"""The table of programming languages: how to compile, run, print a value, detect and install each.

`runner` is `python`, `klong` or `sql` where the sandbox's own interpreter runs it, `exec` for a command. This
module looks for programs on the machine; it starts only `rustc --print sysroot` and a check of PyKX.
"""

import glob
import importlib.util
import json
import math
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from typing import Any

from whetstone.errors import UserError
from whetstone.sandbox.program import VALUE_MARKER, Job, Limits, Program


@dataclass(frozen=True)
class Language:
    """A line of the table. Commands begin with the name of a program, which is looked for on the PATH."""

    title: str
    fences: tuple[str, ...]  # what stands behind ``` in a model's answer; the first is the name
    file: str
    install_hint: str
    _: KW_ONLY
    runner: str = "exec"
    compilers: tuple[str, ...] = ()  # the quickest first; the next where it fails
    command: str = "{build_dir}/main"
    print_call: Callable[[str, tuple[Any, ...]], str] | None = None  # code that prints a call's value
    syntax_error: str | None = None  # what stderr says where the program could not be read at all
    has_booleans: bool = True  # its truth values are not just 1 and 0
    limit_address_space: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fences[0]

    @property
    def takes_code(self) -> bool:
        """Whether tests may put code behind the program."""
        return not self.compilers and self.runner != "sql"

    @property
    def takes_calls(self) -> bool:
        return self.print_call is not None or self.runner in ("python", "klong")


def _print_javascript(function: str, arguments: tuple[Any, ...]) -> str:
    args = ", ".join(json.dumps(argument) for argument in arguments)
    value = f"JSON.stringify({function}({args}))"
    return f"\n;process.stdout.write({json.dumps(VALUE_MARKER)} + {value} + '\\n');\n"


def q_literal(value: Any) -> str:
    """Plain data as q writes it."""
    if value is None:
        return "(::)"
    if isinstance(value, bool):
        return "1b" if value else "0b"
    if isinstance(value, int):
        return f"({value})" if value < 0 else str(value)
    if isinstance(value, float):
        text = {math.inf: "0w", -math.inf: "-0w"}.get(value) or (
            "0n" if math.isnan(value) else repr(value) + "f"
        )
        return f"({text})" if text.startswith("-") else text
    if isinstance(value, str):
        if not value:
            return '""'
        text = json.dumps(value, ensure_ascii=True)
        return f"(enlist {text})" if len(value) == 1 else text
    if isinstance(value, list | tuple):
        if not value:
            return "()"
        inner = ";".join(q_literal(entry) for entry in value)
        return f"(enlist {inner})" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        keys = "`" + "`".join(str(key) for key in value)
        entries = ";".join(q_literal(entry) for entry in value.values())
        return f"((enlist {keys})!enlist {entries})" if len(value) == 1 else f"({keys}!({entries}))"
    raise UserError(f"A test holds {value!r}, which q cannot write: use numbers, text, lists, dictionaries.")


def _print_q(function: str, arguments: tuple[Any, ...]) -> str:
    mark = "".join(f"\\{ord(letter):03o}" if ord(letter) < 32 else letter for letter in VALUE_MARKER)
    args = ";".join(q_literal(argument) for argument in arguments)
    return f'\n-1 "{mark}",.j.j {function}[{args}];\n'


_TABLE = (
    Language("Python", ("python", "py", "python3"), "main.py", "it runs whetstone itself", runner="python"),
    Language(
        "Klong", ("klong", "kg"), "main.kg", "pip install klongpy==0.7.1", runner="klong", has_booleans=False
    ),
    Language(
        "q (kdb+)",
        ("q", "kdb", "kdb+"),
        "main.q",
        "install kdb+ from kx.com (the personal edition is free) and put `q` on the PATH, or pip install "
        "pykx and set up its licence: PyKX without a licence can't evaluate q",
        command="q main.q -q",
        print_call=_print_q,
        environment={"QINIT": "/dev/null"},
    ),
    Language(
        "SQL (SQLite)",
        ("sql", "sqlite"),
        "main.sql",
        "Python's sqlite3 module, which most builds of Python have",
        runner="sql",
        syntax_error=r"OperationalError: near |incomplete input|syntax error",
    ),
    Language(
        "JavaScript",
        ("javascript", "js", "node"),
        "main.js",
        "install node (apt install nodejs)",
        command="node --max-old-space-size=256 main.js",
        print_call=_print_javascript,
        syntax_error=r"^SyntaxError:",
        limit_address_space=False,
        environment={"OPENSSL_CONF": "/dev/null"},
    ),
    Language(
        "Bash",
        ("bash", "sh", "shell"),
        "main.sh",
        "install bash",
        command="bash main.sh",
        syntax_error=r"syntax error",
    ),
    Language(
        "C",
        ("c",),
        "main.c",
        "install gcc, clang or tcc (apt install gcc)",
        compilers=("tcc -o main main.c -lm", *(f"{cc} -O2 -w -o main main.c -lm" for cc in ("gcc", "clang"))),
    ),
    Language(
        "C++",
        ("cpp", "c++", "cxx"),
        "main.cpp",
        "install g++ or clang++ (apt install g++)",
        compilers=tuple(f"{cc} -O1 -w -std=c++17 -o main main.cpp" for cc in ("g++", "clang++")),
    ),
    Language(
        "Rust",
        ("rust", "rs"),
        "main.rs",
        "install rustc (https://rustup.rs) and a C compiler to link with",
        compilers=("rustc -O --edition=2021 -Awarnings -o main main.rs",),
    ),
    Language(
        "Java (class Main)",
        ("java",),
        "Main.java",
        "install a JDK (apt install default-jdk-headless)",
        compilers=("javac -J-XX:TieredStopAtLevel=1 -J-XX:-UsePerfData -J-Xshare:auto -proc:none Main.java",),
        command="java -XX:TieredStopAtLevel=1 -XX:-UsePerfData -XX:+UseSerialGC -Xmx256m -Xshare:auto "
        "-cp {build_dir} Main",
        limit_address_space=False,
    ),
)
LANGUAGES = {language.name: language for language in _TABLE}
_PYKX = "import pykx, sys; assert pykx.licensed; pykx.q('\\\\l ' + sys.argv[1])"


def language(name: str) -> Language:
    """The language called `name` (or one of its names in fences)."""
    for known in LANGUAGES.values():
        if name.lower() in known.fences:
            return known
    raise UserError(f"There is no language {name[:40]!r}: choose from {', '.join(LANGUAGES)}.")


@dataclass(frozen=True, kw_only=True)
class Tools:
    """A language as this machine has it: whole paths, and the folders they need to see."""

    compilers: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]
    visible: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    import_folders: tuple[str, ...] = ()  # of packages that the interpreter finds only by our own sys.path


@cache
def missing(name: str) -> str | None:
    """Why the language can't be used on this machine, and how to get it; None: it can."""
    try:
        tools(name)
    except UserError as error:
        return str(error)
    return None


@cache
def tools(name: str) -> Tools:
    """What runs the language here; a complaint that names it and says how to get it where nothing does."""
    row = LANGUAGES[name]
    absent = UserError(f"The language {name} is not installed on this machine: {row.install_hint}.")
    if row.runner != "exec":
        if importlib.util.find_spec({"klong": "klongpy", "sql": "sqlite3"}.get(row.runner, "sys")) is None:
            raise absent
        packages = ("klongpy", "numpy") if row.runner == "klong" else ()
        return Tools(
            compilers=(),
            command=(),
            visible=(*_python_folders(), *_package_folders(*packages)),
            import_folders=_import_folders(*packages),
        )
    compilers = tuple(resolved for entry in row.compilers if (resolved := _resolve(entry)) is not None)
    command = _resolve(row.command)
    environment: dict[str, str] = {}
    visible = [folder for argv in (*compilers, command) if argv for folder in _home(argv[0])]
    if name == "q":
        if command is None and _pykx_is_licensed():
            command = (sys.executable, "-c", _PYKX, row.file)
            visible = [*_python_folders(), *_package_folders("pykx", "numpy", "pandas", "pytz")]
        for key in ("QHOME", "QLIC"):
            if os.environ.get(key):
                environment[key] = os.environ[key]
                visible.append(os.environ[key])
    if command is None or (row.compilers and not compilers):
        raise absent
    return Tools(
        compilers=compilers,
        command=command,
        visible=tuple(dict.fromkeys(visible)),
        environment=tuple(environment.items()),
    )


def _resolve(command: str) -> tuple[str, ...] | None:
    program, *options = command.split()
    if program.startswith("{build_dir}"):
        return (program,)
    path = shutil.which(program)
    if path is None:
        return None
    if program == "rustc":  # rustup's is only a door, which looks for the real one in the home folder
        sysroot = subprocess.run([path, "--print", "sysroot"], capture_output=True, text=True, check=False)
        real = os.path.join(sysroot.stdout.strip(), "bin", "rustc")
        path = real if os.path.exists(real) else path
    return (os.path.realpath(path) if program in ("java", "javac") else path, *options)


def _home(program: str) -> list[str]:
    """The folders beside the system's own that a program needs to see."""
    if not program.startswith("/"):
        return []
    path = os.path.realpath(program)
    extra = glob.glob("/etc/java*") if "/jvm/" in path else []
    if path.startswith(("/usr/", "/bin/", "/lib")):
        return extra if program.startswith(("/usr/", "/bin/")) else [*extra, os.path.dirname(program)]
    return [os.path.dirname(os.path.dirname(path)), os.path.dirname(program), *extra]


@cache
def _pykx_is_licensed() -> bool:
    if importlib.util.find_spec("pykx") is None:
        return False
    command = [sys.executable, "-c", "import pykx; print(pykx.licensed)"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "True"


def _python_folders() -> tuple[str, ...]:
    return tuple(dict.fromkeys((os.path.realpath(sys.base_prefix), sys.base_prefix)))


def _package_folders(*names: str) -> tuple[str, ...]:
    """Where packages lie, and the libraries beside them that wheels bring."""
    folders = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            folder = os.path.dirname(spec.origin)
            folders += [folder, *glob.glob(f"{os.path.dirname(folder)}/{name}.libs")]
    return tuple(folders)


def _import_folders(*names: str) -> tuple[str, ...]:
    """Folders of packages outside site-packages: the supervisor gets no PYTHONPATH of ours."""
    known = {os.path.realpath(folder) for folder in site.getsitepackages()}
    origins = [spec.origin for name in names if (spec := importlib.util.find_spec(name)) and spec.origin]
    folders = dict.fromkeys(os.path.dirname(os.path.dirname(os.path.abspath(origin))) for origin in origins)
    return tuple(folder for folder in folders if os.path.realpath(folder) not in known)


def job_of(program: Program, limits: Limits) -> Job:
    row, here = LANGUAGES[program.language], tools(program.language)
    inputs = []
    for run_input in program.inputs:
        source, call = program.source, None
        if run_input.code:
            assert row.takes_code, f"{row.name} takes no code behind a program"
            source += "\n" + run_input.code
        if run_input.call is not None:
            function, arguments = run_input.call
            if row.print_call is None:
                call = (function, list(arguments))
            else:
                source += row.print_call(function, arguments)
        if row.name == "q":
            source += "\nexit 0\n"
        inputs.append({"source": source, "stdin": run_input.stdin, "call": call})
    return Job(
        runner=row.runner,
        file=row.file,
        inputs=tuple(inputs),
        limits=replace(limits, limit_address_space=row.limit_address_space),
        compilers=here.compilers,
        command=here.command,
        environment={**row.environment, **dict(here.environment)},
    )


def is_syntax_error(name: str, stderr: str) -> bool:
    """Whether a language without a compiler could not even read the program; for the metrics only."""
    pattern = LANGUAGES[name].syntax_error
    return pattern is not None and re.search(pattern, stderr, re.MULTILINE) is not None
