# ruff: noqa: E501
"""The sandbox with well-meaning programs: every language that is installed, every way a run can end, and what
the layers let through.
"""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox.test_hostile import opened
from tests.support.hostile_programs import wait_until_gone
from whetstone.errors import UserError
from whetstone.sandbox import languages, pool, protocol, seccomp, spawn_helper
from whetstone.sandbox.languages import LANGUAGES, missing, q_literal
from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.program import VALUE_MARKER, Input, Limits, Program

LIMITS = Limits(seconds=5.0, compile_seconds=30.0, memory_mb=256)

DOUBLE = {
    "python": "print(int(input()) * 2)",
    "klong": ".p(42)",
    "sql": "select x * 2 from t",
    "javascript": "console.log(2 * parseInt(require('fs').readFileSync(0, 'utf8')))",
    "bash": "read n; echo $((n * 2))",
    "c": '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", 2 * n); return 0; }',
    "cpp": "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n << std::endl; }",
    "rust": "use std::io;\nfn main() { let mut s = String::new(); io::stdin().read_line(&mut s).unwrap();\n"
    'let n: i64 = s.trim().parse().unwrap(); println!("{}", 2 * n); }',
    "java": "import java.util.*;\npublic class Main { public static void main(String[] a) {\n"
    "System.out.println(2 * new Scanner(System.in).nextInt()); } }",
}
BROKEN = {
    "python": "print((",
    "sql": "selec x from t",
    "javascript": "console.log((",
    "bash": "if then",
    "c": "int main(void) { return x; }",
    "cpp": "int main() { return x; }",
    "rust": "fn main() { x }",
    "java": "public class Main { int }",
}


@pytest.fixture(scope="module")
def box():
    with LocalPool(limits=LIMITS) as made:
        yield made


def installed(name: str) -> None:
    if missing(name):
        pytest.skip(f"{name} is not installed")


def stdin_of(name: str) -> str:
    return "create table t(x); insert into t values (21)" if name == "sql" else "21\n"


@pytest.mark.parametrize("name", DOUBLE)
def test_every_language_reads_and_prints(box: LocalPool, name: str) -> None:
    installed(name)
    program = Program(language=name, source=DOUBLE[name], inputs=(Input(stdin=stdin_of(name)),) * 2)
    for result in box.run(program).results:
        assert (result.stdout, result.exit_code, result.outcome) == ("42\n", 0, "ok"), result
        assert 0 < result.seconds < LIMITS.seconds


@pytest.mark.parametrize("name", BROKEN)
def test_a_program_that_can_not_be_read_is_a_compile_error(box: LocalPool, name: str) -> None:
    installed(name)
    result = box.run(
        Program(language=name, source=BROKEN[name], inputs=(Input(stdin=stdin_of(name)),))
    ).results[0]
    assert result.outcome == "compile_error"
    assert result.stderr


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("1 / 0", "crash"),
        ("raise SystemExit(3)", "crash"),
        ("raise SystemExit", "ok"),
        ("while True: pass", "timeout"),
    ],
)
def test_crash_timeout_and_success_are_told_apart(box: LocalPool, source: str, outcome: str) -> None:
    limits = Limits(seconds=0.3 if outcome == "timeout" else 5)
    assert box.run(Program(language="python", source=source), limits).results[0].outcome == outcome


def test_what_a_limit_ended_is_named(box: LocalPool) -> None:
    talks = box.run(
        Program(language="python", source="while True: print('x' * 99)"), Limits(output_kb=4)
    ).results[0]
    assert talks.exceeded_limit == "output"
    assert len(talks.stdout) == 4 << 10
    grows = "import os\nfor _ in range(8):\n    if os.fork() == 0: break\nx = bytearray(b'1') * (60 << 20)\nimport time; time.sleep(5)"
    grown = box.run(Program(language="python", source=grows), Limits(seconds=4, memory_mb=128)).results[0]
    # The watch sees the sum; where there is a control group, the kernel may be quicker.
    assert grown.exceeded_limit == "memory" or grown.outcome == "crash"


def test_runs_know_nothing_of_each_other(box: LocalPool) -> None:
    source = "import os, builtins\nprint(hasattr(builtins, 'mine'), os.listdir('.'))\nbuiltins.mine = 1\nopen('x', 'w').write('x')"
    results = box.run(Program(language="python", source=source, inputs=(Input(), Input()))).results
    assert [result.stdout for result in results] == ["False []\n"] * 2


def test_time_for_the_whole_program_is_limited_too(box: LocalPool) -> None:
    program = Program(language="python", source="import time; time.sleep(60)", inputs=(Input(),) * 5)
    results = box.run(program, Limits(seconds=1, total_seconds=1.7)).results
    assert all(result.timed_out for result in results)
    assert [result.seconds > 0 for result in results] == [True, True, False, False, False]


def test_usual_ways_of_reading_and_writing_work(box: LocalPool) -> None:
    source = (
        "import sys, os, tempfile, subprocess\n"
        "print(open('/dev/stdin').readline().strip(), sys.stdin.isatty())\n"
        "with tempfile.NamedTemporaryFile('w+') as f:\n    f.write('a'); f.seek(0); print(f.read())\n"
        "print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout.strip())\n"
        "print('\\u00e9\\U0001F600')\nexit(0)\n"
    )
    result = box.run(Program(language="python", source=source, inputs=(Input(stdin="hello\n"),))).results[0]
    assert result.stdout == "hello False\na\nchild\n\u00e9\U0001f600\n", result


def test_values_of_calls_come_back_as_plain_data(box: LocalPool) -> None:
    source = "def f(a, b=1):\n    print('noise')\n    return {'x': (a, b), 'y': {2, 1}}\nclass C:\n    pass\ndef g(): return C()"
    calls = (Input(call=("f", (5,))), Input(call=("g", ())))
    first, second = box.run(Program(language="python", source=source, inputs=calls)).results
    assert first.stdout == f'noise\n{VALUE_MARKER}{{"x": [5, 1], "y": [1, 2]}}\n'
    assert second.outcome == "crash" and "type C" in second.stderr


def test_javascript_calls(box: LocalPool) -> None:
    installed("javascript")
    program = Program(
        language="javascript",
        source="function f(a, b) { return [a + b, {k: a}] }",
        inputs=(Input(call=("f", (1, 2))),),
    )
    assert box.run(program).results[0].stdout == f'{VALUE_MARKER}[3,{{"k":1}}]\n'


def test_c_falls_back_to_the_next_compiler(box: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("c")
    here = languages.tools("c")
    false = ("/bin/false",)
    monkeypatch.setattr(
        languages,
        "tools",
        lambda name: languages.Tools(
            compilers=(false, *here.compilers), command=here.command, visible=here.visible
        ),
    )
    result = box.run(Program(language="c", source=DOUBLE["c"], inputs=(Input(stdin="4"),))).results[0]
    assert result.stdout == "8\n"


# Of signals, what a program is started with: blocked and ignored ones. Those that bash itself catches or blocks
# change from moment to moment, so the status is that of a child, which inherits the rest.
LOOK_AROUND = """ulimit -a; id; pwd; umask; env | grep -v ^_= | sort; ls /proc/self/fd
grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp|Sig(Blk|Ign)|NSpid)' /proc/self/status | grep -v NSpid
read -r pid name state parent group session rest < /proc/$$/stat; echo $((group == pid)) $((session == pid)) $parent
cat"""


def _without_those_of_the_c_library(found: re.Match[str]) -> str:
    """Signals 32 and 33: whoever is started by posix_spawn (by make, say) ignores them, and so do the
    children that it forks; the spawn helper does not. Nobody can send them to any effect.
    """
    return f"SigIgn:\t{int(found[1], 16) & ~(0b11 << 31):016x}"


def test_spawned_and_forked_commands_have_equal_restrictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """`spawn_helper.c` does what `restrict.apply` does: limits, users, capabilities, signals, descriptors."""
    if spawn_helper.descriptor() is None:
        pytest.skip("no C compiler to build the spawn helper with")
    program = Program(language="bash", source=LOOK_AROUND, inputs=(Input(stdin="the end\n"),))

    def seen() -> str:
        with LocalPool(limits=LIMITS) as made:
            result = made.run(program).results[0]
            if made.kind != "namespaces":
                pytest.skip("commands are spawned only in namespaces")
        assert result.outcome == "ok" and not result.stderr, result
        # What the supervisor itself takes is allowed on top, and differs by the spawn helper that it has read.
        out = re.sub(r"(virtual memory .*) 2[6-9]\d{4}\n", r"\1 256 MB and some\n", result.stdout)
        return re.sub(r"SigIgn:\t(\w+)", _without_those_of_the_c_library, out)

    spawned = seen()
    monkeypatch.setattr(spawn_helper, "descriptor", lambda: None)
    assert seen() == spawned
    assert spawned.endswith("1 1 1\nthe end\n")
    assert "CapEff:\t0000000000000000" in spawned
    assert re.search(r"cpu time .* 6\n", spawned)
    assert "256 MB and some" in spawned


def test_a_spawn_helper_that_can_not_do_its_work_says_why(tmp_path: Path) -> None:
    if (held := spawn_helper.descriptor()) is None:
        pytest.skip("no C compiler to build the spawn helper with")
    path = f"/proc/self/fd/{held}"
    for words, said in (
        ([str(tmp_path), "-1", "0", "/no/such/command"], b"sandbox: /no/such/command: No such file"),
        (["/no/such/folder", "-1", "0", "/bin/true"], b"sandbox: /no/such/folder: No such file"),
        ([str(tmp_path), "-1", "1", "0", "1", "1"], b"sandbox: no command"),
    ):
        done = subprocess.run([path, *words], pass_fds=[held], capture_output=True, check=False)
        assert done.returncode == 127 and said in done.stderr, done


def test_the_sandbox_says_what_it_is_made_of(box: LocalPool) -> None:
    box.start("python")
    assert box.kind in pool.KINDS
    assert "rlimits" in box.statement
    assert ("Missing:" in box.statement) == (box.kind != "namespaces")


def test_a_pool_that_finds_nothing_safe_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise pool.IsolationUnavailable("not here")

    monkeypatch.setattr(pool, "SupervisorProcess", refuse)
    with pytest.raises(UserError, match="sandbox_isolation: limits"):
        LocalPool().start("python")


def test_limits_alone_is_only_for_those_who_ask(box: LocalPool) -> None:
    with LocalPool(isolation="limits") as weak:
        assert weak.run(Program(language="python", source="print(1)")).results[0].stdout == "1\n"
        assert "can read every file" in weak.statement


def test_a_supervisor_that_dies_is_replaced(box: LocalPool) -> None:
    program = Program(language="python", source="print(7)")
    box.run(program)
    supervisor = box._supervisors["python"]
    supervisor.process.kill()
    supervisor.process.wait()
    assert box.run(program).results[0].stdout == "7\n"


def test_a_supervisor_ends_when_its_pool_is_killed() -> None:
    code = (
        "import os, signal\nfrom whetstone.sandbox.pool import LocalPool\nfrom whetstone.sandbox.program import Program\n"
        "p = LocalPool(); p.run(Program(language='python', source='print(1)'))\n"
        "print(p._supervisors['python'].process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert wait_until_gone(int(done.stdout))


def test_supervisor_ends_silently_when_its_pool_hangs_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that is refused at its start has begun supervisors: its one sentence must stay the last word."""

    def hang_up(supervisor: pool.SupervisorProcess, message: object, patience_s: float) -> None:
        protocol.send(supervisor._socket.fileno(), message)
        supervisor._socket.close()
        assert supervisor.process.wait(30) == 0
        raise EOFError

    monkeypatch.setattr(pool.SupervisorProcess, "request", hang_up)
    with pytest.raises(pool.IsolationUnavailable):
        pool.SupervisorProcess("limits", "python", LIMITS)
    assert capfd.readouterr().err == ""


def test_unknown_and_missing_languages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'cobol'.*python, klong, q"):
        languages.language("cobol")
    assert languages.language("C++") is LANGUAGES["cpp"]
    languages.tools.cache_clear()
    languages.missing.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        assert re.search(r"\bq\b", str(missing("q")))
    finally:
        languages.tools.cache_clear()
        languages.missing.cache_clear()


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (1, "1"),
        (-1, "(-1)"),
        (2.5, "2.5f"),
        (True, "1b"),
        ([1, 2], "(1;2)"),
        ([1], "(enlist 1)"),
        ([], "()"),
        ("ab", '"ab"'),
        ("a", '(enlist "a")'),
        ([[1, 2], [3]], "((1;2);(enlist 3))"),
        ({"a": 1, "b": 2}, "(`a`b!(1;2))"),
        (None, "(::)"),
    ],
)
def test_values_as_q_writes_them(value: object, literal: str) -> None:
    assert q_literal(value) == literal


STAND_IN = """#!/bin/sh
# A stand-in for q, used by the tests where no q interpreter is to be had. It evaluates nothing: it checks its
# command line and the end of the script, and prints what a real q would print for the one call it knows.
echo "stand-in for q: $*" >&2
[ "$2" = "-q" ] || exit 9
tail -n 2 "$1" | grep -q '^exit 0' || exit 8
grep -q 'add\\[2;3\\]' "$1" && printf '\\036\\002value\\0035\\n'
exit 0
"""


def test_the_command_line_of_q_with_a_stand_in_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "q"
    script.write_text(STAND_IN)
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    for above in (tmp_path, *tmp_path.parents[:3]):
        if above.stat().st_uid == os.getuid() and above != Path("/tmp"):
            above.chmod(above.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    languages.tools.cache_clear()
    languages.missing.cache_clear()
    try:
        with LocalPool(limits=LIMITS) as made:
            program = Program(language="q", source="add:{x+y}", inputs=(Input(call=("add", (2, 3))),))
            result = made.run(program).results[0]
        assert result.exit_code == 0, result
        assert result.stdout == f"{VALUE_MARKER}5\n"
        assert "stand-in for q: main.q -q" in result.stderr
    finally:
        languages.tools.cache_clear()
        languages.missing.cache_clear()


def test_the_filter_knows_this_machine() -> None:
    if not seccomp.is_supported():
        pytest.skip("no seccomp numbers for this architecture")
    code = seccomp.build()
    assert len(code) % 8 == 0
    # Every jump lands inside the filter.
    for place in range(0, len(code), 8):
        kind, yes, no = code[place] | code[place + 1] << 8, code[place + 2], code[place + 3]
        if kind & 7 == 5:
            assert place // 8 + 1 + max(yes, no) < len(code) // 8
    assert len(seccomp.build(only_signals_to=1)) > len(code)


@pytest.mark.parametrize("kind", ["namespaces", "filters"])
def test_klong_is_found_outside_site_packages(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Packages may lie in a folder of PYTHONPATH, which a sandbox does not get: here a copy that knows `mark`."""
    installed("klong")
    for module in [name for name in sys.modules if name.partition(".")[0] == "klongpy"]:
        monkeypatch.delitem(sys.modules, module)
    spec = importlib.util.find_spec("klongpy")
    assert spec is not None and spec.origin is not None
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # programs run as another user
    shutil.copytree(Path(spec.origin).parent, tmp_path / "klongpy")
    with (tmp_path / "klongpy" / "__init__.py").open("a", encoding="utf-8") as stream:
        stream.write("\n_plain = KlongInterpreter\n\n\ndef KlongInterpreter():\n")
        stream.write("    made = _plain()\n    made('mark::6*7')\n    return made\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    languages.tools.cache_clear()
    try:
        assert languages.tools("klong").import_folders == (str(tmp_path),)
        with opened(kind) as own_box:
            result = own_box.run(Program(language="klong", source=".p(mark)", inputs=(Input(),))).results[0]
    finally:
        languages.tools.cache_clear()
    assert result.stdout.strip() == "42", result.stderr
