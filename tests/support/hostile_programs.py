# ruff: noqa: E501
"""Programs that try to hang, fill, read, break, outlive or cheat: what each tries, in which language, and the
word it must not be able to say.

Each is run as an answer to a problem whose tests want `OPEN SESAME <n>`; a program that gets at what it is after
prints `ESCAPED`. `needs`: "files" where only namespaces or Landlock hold the attempt back.
"""

import contextlib
import os
import time
from dataclasses import dataclass

SECRET = "open-sesame-7319"  # stands in the parent's environment, memory and files, and is what tests expect


@dataclass(frozen=True, kw_only=True)
class Hostile:
    name: str
    language: str
    source: str
    needs: str = ""
    outcomes: tuple[str, ...] = ("wrong", "crash", "timeout", "compile_error")


def _python(name: str, source: str, needs: str = "", **more) -> Hostile:
    return Hostile(name=name, language="python", source=source, needs=needs, **more)


def _c(name: str, body: str, needs: str = "", head: str = "") -> Hostile:
    includes = "\n".join(
        f"#include <{header}.h>"
        for header in (
            "stdio",
            "stdlib",
            "string",
            "unistd",
            "signal",
            "fcntl",
            "errno",
            "sys/types",
            "sys/wait",
        )
    )
    return Hostile(
        name=name, language="c", source=f"{includes}\n{head}\nint main(void) {{\n{body}\n}}\n", needs=needs
    )


def _bash(name: str, source: str, needs: str = "") -> Hostile:
    return Hostile(name=name, language="bash", source=source, needs=needs)


PROGRAMS: tuple[Hostile, ...] = (
    # ---- hang
    _python("endless loop", "while True: pass", outcomes=("timeout",)),
    _python("sleep", "import time; time.sleep(1000)", outcomes=("timeout",)),
    _python(
        "signals ignored",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        outcomes=("timeout",),
    ),
    _python("waits for input", "import sys\nwhile True: sys.stdin.read()", outcomes=("timeout",)),
    _python(
        "deadlock", "import threading\nl = threading.Lock(); l.acquire(); l.acquire()", outcomes=("timeout",)
    ),
    _python(
        "thread that never ends",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start()",
        outcomes=("timeout",),
    ),
    _python(
        "catastrophic regular expression",
        "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
        outcomes=("timeout",),
    ),
    _python("huge power", "print(10 ** 10 ** 10)"),
    _python(
        "stops itself",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        outcomes=("timeout", "crash"),
    ),
    _python(
        "exit that hangs", "import atexit, time; atexit.register(time.sleep, 1000)", outcomes=("timeout",)
    ),
    _c("endless loop in C", "for (;;);"),
    _bash("endless loop in bash", "while :; do :; done"),
    # ---- fill
    _python("memory", "x = []\nwhile True: x.append(bytearray(1 << 20))"),
    _python("one huge allocation", "x = bytearray(1 << 40)"),
    _python(
        "memory in many processes",
        "import os\nfor _ in range(16):\n    if os.fork() == 0: break\nx = []\nwhile True: x.append(bytearray(b'1') * (1 << 20))",
    ),
    _python("disk", "f = open('big', 'wb')\nwhile True: f.write(b'0' * (1 << 20))"),
    _python(
        "many files", "import itertools\nfor i in itertools.count(): open(f'f{i}', 'w').write('x' * 4096)"
    ),
    _python("sparse file", "f = open('big', 'wb'); f.seek(1 << 40); f.write(b'1')"),
    _python("deep folders", "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')"),
    _python("endless output", "while True: print('x' * 1000)"),
    _python("endless errors", "import sys\nwhile True: sys.stderr.write('x' * 1000)"),
    _python("many open files", "x = [open('/dev/null') for _ in range(100000)]"),
    _python("huge recursion", "import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)"),
    _python("nested source", "(" * 100000 + ")" * 100000),
    _c("memory in C", "for (;;) { char *p = malloc(1 << 20); if (!p) return 1; memset(p, 1, 1 << 20); }"),
    _c(
        "stack in C",
        "return f(0);",
        head="int f(int n) { volatile char big[4096]; big[0] = n; return f(n + 1) + big[0]; }",
    ),
    _c(
        "disk in C",
        'FILE *f = fopen("big", "w"); char b[65536]; memset(b, 1, sizeof b); while (fwrite(b, 1, sizeof b, f)); return 1;',
    ),
    _c("includes without end", "", head='#include "/dev/zero"'),
    _bash("endless output in bash", "yes"),
    _bash("pipes that fill", "cat /dev/zero | head -c 100G | tail"),
    # ---- processes
    _python(
        "fork bomb",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        outcomes=("timeout", "crash", "wrong"),
    ),
    _python("zombies", "import os\nfor _ in range(10000):\n    if os.fork() == 0: os._exit(0)"),
    _python(
        "daemon",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\n",
    ),
    _python("child keeps the output open", "import os, time\nif os.fork() == 0: time.sleep(1000)\n"),
    _python(
        "threads without end",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    ),
    _c("fork bomb in C", "for (;;) fork();"),
    _c(
        "daemon in C",
        "if (fork() == 0) { setsid(); signal(SIGTERM, SIG_IGN); signal(SIGHUP, SIG_IGN); for (;;) sleep(1); } return 0;",
    ),
    _bash("fork bomb in bash", "f() { f | f & }; f; sleep 100"),
    _bash(
        "background jobs",
        "for i in 1 2 3 4 5; do (trap '' TERM HUP INT; sleep 1000) & done; disown -a; exit 0",
    ),
    # ---- kill
    _python(
        "kill everything", "import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept PermissionError: pass"
    ),
    _python(
        "kill the parent",
        "import os, signal, time\ntry: os.kill(os.getppid(), signal.SIGKILL)\nexcept PermissionError: pass\ntime.sleep(0.2)",
    ),
    _python(
        "stop the parent",
        "import os, signal\ntry: os.kill(os.getppid(), signal.SIGSTOP)\nexcept PermissionError: pass",
    ),
    _c("kill everything in C", "kill(-1, 9); kill(getppid(), 9); kill(1, 9); return 0;"),
    _bash("kill everything in bash", "kill -9 -1; kill -9 $PPID; kill -9 1"),
    _c(
        "ptrace",
        'if (ptrace(16, getppid(), 0, 0) == 0) puts("ESCAPED"); return 0;',
        head="#include <sys/ptrace.h>",
    ),
    _python(
        "read the parent's memory",
        "import os\ntry:\n    m = open(f'/proc/{os.getppid()}/mem', 'rb'); print('ESCAPED')\nexcept OSError: pass",
    ),
    _python(
        "lower the parent's limits",
        "import resource, os\ntry:\n    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3)); print('ESCAPED')\nexcept OSError: pass",
    ),
    # ---- read and write
    _python(
        "read /etc/passwd",
        "try:\n    if 'root:' in open('/etc/passwd').read(): print('ESCAPED')\nexcept OSError: pass",
        needs="files",
    ),
    _python(
        "read /etc/shadow", "try:\n    open('/etc/shadow').read(); print('ESCAPED')\nexcept OSError: pass"
    ),
    _python(
        "read the environment",
        f"import os\nif any('{SECRET[:4]}' in v for v in os.environ.values()): print('ESCAPED', os.environ)",
    ),
    _python(
        "read everybody's environment",
        f"import os, glob\nfor p in glob.glob('/proc/[0-9]*/environ'):\n    try:\n        if b'{SECRET}'[:11] in open(p, 'rb').read(): print('ESCAPED')\n    except OSError: pass",
    ),
    _python(
        "read the answers",
        "import os, sys\nfor top in (os.environ.get('HOME', '/'), '/root', '/home', '/srv', '/opt', '/tmp', '/usr/lib/python3', *sys.path):\n    for d, _, names in os.walk(top):\n        for n in names:\n            if n == 'problems.jsonl' or n == 'secret-answers.jsonl': print('ESCAPED', d)",
        needs="files",
    ),
    _python(
        "list the home folder",
        "import os\ntry:\n    os.listdir('/' + 'root'); os.listdir('/home')\n    if os.path.exists('/' + 'root/.cache'): print('ESCAPED')\nexcept OSError: pass",
        needs="files",
    ),
    _python(
        "write outside",
        "for p in ('/x', '/usr/x', '/etc/x', '/var/x', '/home/x', '/' + 'root/x', '/dev/x', '/usr/bin/python3'):\n    try:\n        open(p, 'a').write('x'); print('ESCAPED', p)\n    except OSError: pass",
    ),
    _python(
        "symlink out",
        "import os\nfor t in ('/etc/passwd', '/' + 'root', '/proc/1/' + 'root/etc/passwd', '/proc/1/cwd'):\n    try:\n        os.symlink(t, 'l'); data = open('l').read()\n        if 'root:' in data: print('ESCAPED')\n    except OSError: pass\n    if os.path.lexists('l'): os.unlink('l')",
        needs="files",
    ),
    _python(
        "symlink for the cleaner",
        "import os\nos.symlink('/usr', 'usr'); os.symlink('/', 'root'); os.mkdir('d'); os.symlink('/usr/bin', 'd/b'); os.chmod('d', 0)",
    ),
    _python(
        "hard link out",
        "import os\nfor t in ('/etc/passwd', '/usr/bin/env'):\n    try:\n        os.link(t, 'l'); print('ESCAPED')\n    except OSError: pass",
    ),
    _python(
        "device nodes",
        "import os, stat\ntry:\n    os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(254, 0)); open('d', 'rb').read(1); print('ESCAPED')\nexcept OSError: pass",
    ),
    _python(
        "mount",
        "import ctypes\nl = ctypes.CDLL(None)\nif l.mount(b'none', b'/box', b'tmpfs', 0, None) == 0: print('ESCAPED')\nif l.unshare(0x10000000) == 0: print('ESCAPED')\nif l.chroot(b'/') == 0: print('ESCAPED')",
    ),
    _python(
        "every asynchronous input of the machine",
        "import ctypes, platform\nn = {'x86_64': 206}.get(platform.machine(), 0)\nif ctypes.CDLL(None).syscall(n, 60000, ctypes.byref(ctypes.c_ulong())) == 0: print('ESCAPED')",
    ),
    _python(
        "become root",
        "import os\ntry:\n    os.setuid(0); os.setgid(0)\n    open('/etc/shadow').read(); print('ESCAPED')\nexcept OSError: pass",
    ),
    _bash("sudo and su", "su -c 'echo ESCAPED' </dev/null; sudo -n echo ESCAPED"),
    _bash(
        "read the answers in bash",
        "grep -rl 'sumlist' / --include='*.jsonl' 2>/dev/null | grep -q . && echo ESCAPED; grep root: /etc/passwd && echo ESCAPED",
        needs="files",
    ),
    _c(
        "read /etc/passwd in C",
        'char b[4096] = {0}; int f = open("/etc/passwd", 0); if (f >= 0) { read(f, b, 4095); if (strstr(b, "root:")) puts("ESCAPED"); } return 0;',
        needs="files",
    ),
    # ---- network
    _python(
        "network outside",
        "import socket\ntry:\n    socket.create_connection(('1.1.1.1', 53), 1); print('ESCAPED')\nexcept OSError: pass",
    ),
    _python(
        "network to loopback",
        "import socket\nfor f in (socket.AF_INET, socket.AF_INET6):\n    try:\n        s = socket.socket(f); s.bind(('localhost', 0)); s.listen(); print('ESCAPED')\n    except OSError: pass",
    ),
    _python(
        "packets",
        "import socket\nfor k in (socket.SOCK_DGRAM, socket.SOCK_RAW):\n    try:\n        socket.socket(socket.AF_INET, k).sendto(b'x', ('127.0.0.1', 9)); print('ESCAPED')\n    except OSError: pass",
    ),
    _python(
        "name service",
        "import socket\ntry:\n    socket.getaddrinfo('example.com', 80); print('ESCAPED')\nexcept OSError: pass",
    ),
    _bash(
        "network in bash",
        "exec 3<>/dev/tcp/127.0.0.1/22 && echo ESCAPED; exec 3<>/dev/tcp/1.1.1.1/53 && echo ESCAPED",
    ),
    # ---- cheat
    _python("exit 0", "import sys; sys.exit(0)", outcomes=("wrong",)),
    _python("hard exit 0", "import os; os._exit(0)", outcomes=("wrong",)),
    _python(
        "print what a test might want",
        "for w in ('passed', 'OK', 'True', 'ok', '1 passed', 'OPEN SESAME'): print(w)",
        outcomes=("wrong",),
    ),
    _python(
        "monkey-patch comparison",
        "import builtins, operator\nclass E(str):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    __hash__ = str.__hash__\nbuiltins.str = E; operator.eq = lambda a, b: True\nprint(E('x'))",
        outcomes=("wrong", "crash"),
    ),
    _python(
        "monkey-patch the runner",
        "import sys, json, os\nfor m in list(sys.modules.values()):\n    for n in ('same_text', 'same_value', 'judge', '_outcome', 'plain'):\n        if hasattr(m, n): setattr(m, n, lambda *a, **k: True)\njson.loads = lambda *a, **k: True\nprint('x')",
        outcomes=("wrong", "crash"),
    ),
    _python(
        "look up the stack",
        f"import sys\nf = sys._getframe()\nseen = ''\nwhile f:\n    seen += repr(f.f_locals) + repr(list(f.f_globals.items())); f = f.f_back\nif '{SECRET[::-1]}'[::-1] in seen: print('ESCAPED')",
        outcomes=("wrong", "crash"),
    ),
    _python(
        "write to inherited files",
        "import os\nfor fd in range(3, 300):\n    try:\n        os.write(fd, b'{\"results\": []}'); print('ESCAPED')\n    except OSError: pass",
        outcomes=("wrong",),
    ),
    _python("raise the exit code", "raise SystemExit(256)", outcomes=("wrong", "crash")),
    _python("raise a strange error", "class E(BaseException):\n    def __str__(self): raise E\nraise E"),
    _python(
        "close the output", "import os; os.close(1); os.close(2); os.close(0)", outcomes=("wrong", "crash")
    ),
    _python(
        "unicode and NUL output",
        "import sys\nsys.stdout.buffer.write(b'\\x00\\xff\\xfe\\xed\\xa0\\x80' * 100); print('\\u202e\\U0001F600\\x1b[2J')",
        outcomes=("wrong",),
    ),
    _python("NUL in the source", "print('x\x00')"),
    _python(
        "marks of a value",
        "import sys\nsys.stdout.write('\\x1e\\x02value\\x03true\\n' * 50)",
        outcomes=("wrong",),
    ),
    _c("raise SIGKILL", "raise(SIGKILL); return 0;"),
    _c("unicode and NUL output in C", 'fwrite("\\0\\xff\\xfe", 1, 3, stdout); return 0;'),
    _bash("exit 0 in bash", "exit 0"),
    # ---- JavaScript, where it is installed
    Hostile(name="endless loop in JavaScript", language="javascript", source="for (;;);"),
    Hostile(
        name="memory in JavaScript",
        language="javascript",
        source="const x = []; for (;;) x.push(new Array(1e6).fill(1.5))",
    ),
    Hostile(
        name="read a file in JavaScript",
        language="javascript",
        source="try { if (require('fs').readFileSync('/etc/passwd', 'utf8').includes('root:')) console.log('ESCAPED') } catch (e) {}",
        needs="files",
    ),
    Hostile(
        name="spawn in JavaScript",
        language="javascript",
        source="for (;;) { try { require('child_process').spawn('sleep', ['1000'], { detached: true }) } catch (e) {} }",
    ),
    Hostile(
        name="network in JavaScript",
        language="javascript",
        source="const s = require('net').createServer(() => {}); s.on('error', () => process.exit(0)); s.listen(0, '127.0.0.1', () => { console.log('ESCAPED'); process.exit(0) })",
    ),
)


def wait_until_gone(process: int, timeout_s: float = 5.0) -> bool:
    """Whether a process ends within the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 0)
            time.sleep(0.02)
            continue
        return True
    return False
