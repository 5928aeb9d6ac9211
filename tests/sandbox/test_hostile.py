"""Programs that mean harm: all contained, none paid, nothing left running or on disk, the pool as quick as
before. Runs at every strength of isolation that this machine allows.
"""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hostile_programs import PROGRAMS, SECRET, Hostile, wait_until_gone
from whetstone.rewards.programs import ProgramTest, run_tests
from whetstone.sandbox.languages import LANGUAGES, missing
from whetstone.sandbox.pool import KINDS, IsolationUnavailable, LocalPool, SupervisorProcess
from whetstone.sandbox.program import Input, Limits, Outcome, Program

LIMITS = Limits(
    seconds=0.3, memory_mb=128, disk_mb=8, output_kb=64, processes=24, compile_seconds=2, total_seconds=5
)
WANTED = (ProgramTest(stdin="3\n", stdout=f"OPEN SESAME {SECRET}"),)


def allowed(kind: str, without: tuple[str, ...] = ()) -> str | None:
    """Why this machine can't isolate at a strength; None: it can."""
    try:
        SupervisorProcess(kind, "python", LIMITS, without).close()
    except IsolationUnavailable as error:
        return str(error)
    return None


def opened(kind: str):
    """A pool at a strength such as "filters without Landlock", or a skip with the reason."""
    name, _, without = kind.partition(" without ")
    leave_out = (without.lower(), "cgroup") if without else ()
    reason = allowed(name, leave_out)
    if reason is not None:
        pytest.skip(f"{kind}: {reason}")
    return LocalPool(isolation=name, limits=LIMITS, without=leave_out)


@pytest.fixture(scope="module", autouse=True)
def secret_around():
    os.environ["WHET_TEST_SECRET"] = SECRET
    yield
    del os.environ["WHET_TEST_SECRET"]


@pytest.fixture(scope="module")
def pool():
    """The strongest isolation that this machine has."""
    with LocalPool(limits=LIMITS) as made:
        made.start("python")
        yield made


WEAKER = ("filters", "filters without Landlock")


@pytest.fixture(scope="module", params=WEAKER)
def weaker(request):
    with opened(request.param) as made:
        made.start("python")
        yield made


class Recording:
    """A pool that remembers what its programs said."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        self.said: list[Outcome] = []
        self.start, self.close, self.statement = pool.start, pool.close, pool.statement

    def run(self, program: Program, limits: Limits) -> Outcome:
        self.said.append(self._pool.run(program, limits))
        return self.said[-1]


def processes_of(pool: LocalPool) -> set[int]:
    """Every process beneath this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found, waiting = set(), [os.getpid()]
    while waiting:
        above = waiting.pop()
        below = [process for process, parent in parents.items() if parent == above]
        found.update(below)
        waiting += below
    return found


@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.name)
def test_a_hostile_program_is_contained_and_not_paid(
    pool: LocalPool, hostile: Hostile, tmp_path: Path
) -> None:
    contained(pool, hostile, tmp_path)


@pytest.mark.parametrize("hostile", PROGRAMS[::5], ids=lambda hostile: hostile.name)
def test_so_it_is_without_namespaces(weaker: LocalPool, hostile: Hostile, tmp_path: Path) -> None:
    contained(weaker, hostile, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.name)
def test_so_are_all_of_them_without_namespaces(weaker: LocalPool, hostile: Hostile, tmp_path: Path) -> None:
    contained(weaker, hostile, tmp_path)


def contained(pool: LocalPool, hostile: Hostile, tmp_path: Path) -> None:
    if missing(hostile.language):
        pytest.skip(f"{hostile.language} is not installed")
    if hostile.needs and pool.kind != "namespaces" and not any("Landlock" in layer for layer in pool.layers):
        pytest.skip("files that everybody may read are closed only by namespaces or Landlock")
    (tmp_path / "secret-answers.jsonl").write_text(SECRET)
    pool.start(hostile.language)
    before = processes_of(pool)
    begun = time.monotonic()
    recording = Recording(pool)
    verdict = run_tests(recording, LANGUAGES[hostile.language], hostile.source, WANTED, LIMITS)
    seconds = time.monotonic() - begun
    assert verdict.outcome in hostile.outcomes, verdict
    said = recording.said[0].results[0]
    assert "ESCAPED" not in said.stdout, said
    assert len(said.stdout) <= LIMITS.output_kb << 10
    assert seconds < 2 * (LIMITS.compile_seconds + LIMITS.seconds + 3)
    left = [process for process in processes_of(pool) - before if not wait_until_gone(process, 2)]
    assert not left, "processes are left running"
    assert_empty(pool)


def assert_empty(pool: LocalPool) -> None:
    """Nothing of the program is left where the next one will work."""
    probe = "import os\nprint(os.listdir('.'), os.listdir(os.environ.get('TMPDIR', '.')))"
    said = pool.run(Program(language="python", source=probe), LIMITS).results[0]
    assert said.stdout.split() == ["[]", "[]"], said


def test_the_pool_serves_on_at_full_speed_after_all_that(pool: LocalPool) -> None:
    program = Program(language="python", source="print(int(input()) * 2)", inputs=(Input(stdin="21"),))
    attack = [
        hostile.source
        for hostile in PROGRAMS
        if hostile.name in ("fork bomb", "memory", "daemon", "kill the parent")
    ]

    def speed() -> float:
        seconds = []
        for _ in range(30):
            begun = time.perf_counter()
            assert pool.run(program, LIMITS).results[0].stdout == "42\n"
            seconds.append(time.perf_counter() - begun)
        return sorted(seconds)[len(seconds) // 2]

    with LocalPool(isolation=pool.kind or "auto", limits=LIMITS) as fresh:
        fresh.run(program, LIMITS)
        supervisor = fresh._supervisors["python"].process.pid
    before = speed()
    for source in attack:
        pool.run(Program(language="python", source=source), LIMITS)
    after = speed()
    assert after < 3 * before + 0.01, (before, after)
    assert wait_until_gone(supervisor)


def test_closing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for kind in KINDS[:-1]:
        if allowed(kind) is not None:
            continue
        with LocalPool(isolation=kind, limits=LIMITS) as pool:
            pool.run(
                Program(language="python", source="open('x', 'w').write('x'); import os; os.fork()"), LIMITS
            )
            idle = list(pool._supervisors.values())
            supervisors = [supervisor.process.pid for supervisor in idle]
            groups = [folder for supervisor in idle for folder in supervisor.cgroup or ()]
        assert all(wait_until_gone(process) for process in supervisors)
        assert not list(tmp_path.iterdir())
        assert not [folder for folder in groups if os.path.exists(folder)]


# Looks for words in all of its memory. They are given, and looked for, with every byte one higher: so its own
# source and its own copies do not contain them.
SCAN = """
import re
shift = bytes((byte + 1) % 256 for byte in range(256))
found = set()
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps.readlines():
        start, end, rights = re.match(r"(\\w+)-(\\w+) (\\S+)", line).groups()
        if rights[0] == "r" and "[v" not in line:
            try:
                memory.seek(int(start, 16))
                content = memory.read(int(end, 16) - int(start, 16)).translate(shift)
            except (OSError, ValueError, OverflowError):
                continue
            found.update(word for word in {words!r} if word.encode() in content)
print(len(found), "found")
"""


def shifted(word: str) -> str:
    return "".join(chr(ord(letter) + 1) for letter in word)


def test_a_program_finds_nothing_of_the_one_before_it_in_memory(pool: LocalPool):
    output, source, given = "brassLANTERN77", "copperKETTLE55", "silverTHIMBLE33"
    first = f"word = '{source}'\ninput()\nprint(''.join(['brass', 'LANTERN', '77']))"
    for _ in range(3):
        ran = pool.run(Program(language="python", source=first, inputs=(Input(stdin=f"{given}\n"),)))
        assert ran.results[0].stdout.strip() == output
    words = [shifted(word) for word in (output, source, given)]
    roomy = Limits(seconds=30, memory_mb=512)
    (result,) = pool.run(Program(language="python", source=SCAN.format(words=words)), roomy).results
    assert result.stdout == "0 found\n", result
    here = f"kept = ['brass' + 'LANTERN77', '{source}']\n" + SCAN.format(words=words)  # the search works
    (result,) = pool.run(Program(language="python", source=here), roomy).results
    assert result.stdout == "2 found\n", result


MARK_FOLDER = """
import os
for folder in (".", ".."):
    for change in (lambda: os.setxattr(folder, "user.left", b"behind"), lambda: os.chmod(folder, 0o711),
                   lambda: os.utime(folder, (1234567890, 1234567890)), lambda: open(folder + "/left", "w")):
        try:
            change()
        except OSError:
            pass
"""
READ_FOLDER = """
import os
for folder in (".", ".."):
    state = os.stat(folder)
    was_marked = int(state.st_mtime) == 1234567890
    print(os.listxattr(folder), was_marked, oct(state.st_mode & 0o777), os.listdir(folder))
"""


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_work_folder_keeps_no_attributes_of_a_program(kind: str):
    with opened(kind) as pool:
        pool.run(Program(language="python", source=MARK_FOLDER), LIMITS)
        (result,) = pool.run(Program(language="python", source=READ_FOLDER), LIMITS).results
    assert result.stdout.splitlines() == ["[] False 0o700 []", "[] False 0o755 ['home']"], result


def test_filters_leave_no_unix_socket_of_the_host(tmp_path: Path):
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(str(tmp_path / "service"))
    server.setblocking(False)
    source = (
        "import socket\n"
        "for attempt in (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),\n"
        "                lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]):\n"
        "    try:\n"
        f"        attempt().sendto(b'x', '{tmp_path}/service')\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
        "a, b = socket.socketpair()\n"
        "a.send(b'a pair is allowed')\n"
        "print(b.recv(20))\n"
    )
    with opened("filters") as pool:
        (result,) = pool.run(Program(language="python", source=source), LIMITS).results
    assert result.stdout.split("\n")[2:3] == ["b'a pair is allowed'"], result
    with pytest.raises(BlockingIOError):
        server.recv(10)
    server.close()


def test_filters_leave_no_watch_on_a_folder_of_the_host(tmp_path: Path):
    """Landlock does not cover inotify."""
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "fd = libc.inotify_init()\n"
        f"print(fd >= 0 and libc.inotify_add_watch(fd, {str(tmp_path).encode()!r}, 0xFFF) >= 0)\n"
    )
    with opened("filters") as pool:  # ctypes takes long to load on a busy machine
        program = Program(language="python", source=source)
        (result,) = pool.run(program, replace(LIMITS, seconds=5)).results
    assert result.stdout == "False\n"
