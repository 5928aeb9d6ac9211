# ruff: noqa: E501
"""More hostile programs than tests/support/hostile_programs.py has: system calls, traces left for the next program, the
host's sockets and processes, the memory of the process they were forked from, forged results.

They know the host's canaries by placeholders (@PORT@, @SOCKET@, @ABSTRACT@, @FILE@, @FOLDER@, @VICTIM@). A
program that gets at something prints `ESCAPED`. `TWICE`: run two times in a row; the second looks for what
the first left.
"""

from tests.support.hostile_programs import Hostile, _bash, _c, _python

# x86_64 and aarch64 number of a call that no program needs, and arguments with which it would succeed for root.
CALLS: dict[str, tuple[int, int, str]] = {
    "io_uring": (425, 425, "8, ctypes.create_string_buffer(256)"),
    "userfaultfd": (323, 282, "0"),
    "bpf": (321, 280, "0, ctypes.create_string_buffer(struct.pack('<IIII', 1, 4, 4, 1) + bytes(112)), 128"),
    "perf_event_open": (
        298,
        241,
        "ctypes.create_string_buffer(struct.pack('<IIQ', 1, 128, 0) + bytes(112)), 0, -1, -1, 0",
    ),
    "add_key": (248, 217, "b'user', b'torture', b'x', 1, -4"),
    "keyctl": (250, 219, "0, -4, 1"),
    "request_key": (249, 218, "b'user', b'torture', None, -4"),
    "process_vm_readv": (310, 270, "os.getppid(), None, 0, None, 0, 0"),
    "pidfd_getfd": (438, 438, "os.pidfd_open(os.getppid()), 0, 0"),
    "kcmp": (312, 272, "os.getpid(), os.getppid(), 1, 0, 0"),
    "setns": (308, 268, "os.open('/proc/1/ns/net', 0), 0"),
    "unshare a user namespace": (272, 97, "0x10000000"),
    "unshare the network": (272, 97, "0x40000000"),
    "open_tree": (428, 428, "-100, b'/', 1"),
    "fsopen": (430, 430, "b'tmpfs', 0"),
    "pivot_root": (155, 41, "b'.', b'.'"),
    "open_by_handle_at": (304, 265, "-100, ctypes.create_string_buffer(bytes(32)), 0"),
    "kernel log": (103, 116, "3, ctypes.create_string_buffer(4096), 4096"),
    "sethostname": (170, 161, "b'torture', 7"),
    "clock_settime": (227, 112, "0, ctypes.create_string_buffer(struct.pack('<qq', 10**9, 0))"),
    "accounting": (163, 89, "None"),
    "swapoff": (168, 225, "b'/dev/null'"),
    "load a module": (175, 105, "b'x', 1, b''"),
    "kexec": (246, 104, "0, 0, None, 0"),
    "fanotify": (300, 262, "0, 0"),
    "shared memory that stays": (29, 194, "7319, 4096, 0o1666"),
    "message queue that stays": (68, 186, "7319, 0o1666"),
    "semaphore that stays": (64, 190, "7319, 1, 0o1666"),
    "memfd": (319, 279, "b'x', 0"),
    "real-time priority": (144, 119, "0, 1, ctypes.create_string_buffer(struct.pack('<i', 50))"),
    "raised priority": (141, 140, "0, 0, -10"),
}


def _call(name: str, x86: int, arm: int, arguments: str) -> Hostile:
    return _python(
        f"system call: {name}",
        "import ctypes, os, platform, struct\n"
        f"number = {x86} if platform.machine() == 'x86_64' else {arm}\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"try:\n    done = libc.syscall(number, {arguments})\nexcept OSError:\n    done = -1\n"
        "if done != -1: print('ESCAPED', done)\n",
    )


# Each looks first for what it left the last time.
TWICE = (
    _python(
        "left behind: extended attributes",
        "import os\ntry:\n    if 'user.torture' in os.listxattr('.'): print('ESCAPED')\n    os.setxattr('.', 'user.torture', b'x')\nexcept OSError: pass",
    ),
    _python(
        "left behind: mode of the folder",
        "import os\nif os.stat('.').st_mode & 0o7777 in (0o1777, 0o2711): print('ESCAPED')\nos.chmod('.', 0o2711)\nif os.stat('.').st_mode & 0o2000 == 0: os.chmod('.', 0o1777)",
    ),
    _python(
        "left behind: access list",
        "import os, struct\nacl = struct.pack('<I', 2) + struct.pack('<HHI', 1, 7, 0xffffffff) + struct.pack('<HHI', 2, 5, 65534) + struct.pack('<HHI', 4, 5, 0xffffffff) + struct.pack('<HHI', 16, 7, 0xffffffff) + struct.pack('<HHI', 32, 5, 0xffffffff)\nfor name in ('system.posix_acl_access', 'system.posix_acl_default'):\n    try:\n        if os.getxattr('.', name) == acl: print('ESCAPED', name)\n    except OSError: pass\n    try: os.setxattr('.', name, acl)\n    except OSError: pass",
    ),
    _python(
        "left behind: file flags",
        "import fcntl, os, struct\nfd = os.open('.', os.O_RDONLY)\ntry:\n    flags = struct.unpack('l', fcntl.ioctl(fd, 0x80086601, bytes(8)))[0]\n    if flags & 0x48: print('ESCAPED', hex(flags))\n    fcntl.ioctl(fd, 0x40086602, struct.pack('l', flags | 0x48))\nexcept OSError: pass",
    ),
    _python(
        "left behind: times",
        "import os\nif abs(os.stat('.').st_mtime - 1234567) < 2 or abs(os.stat('.').st_atime - 1234567) < 2: print('ESCAPED')\nos.utime('.', (1234567, 1234567))",
    ),
    _python(
        "left behind: shared memory file",
        "import os\ntry:\n    if os.path.exists('/dev/shm/torture'): print('ESCAPED')\n    open('/dev/shm/torture', 'w').write('x')\nexcept OSError: pass",
    ),
    _python(
        "left behind: temporary files",
        "import os, tempfile\ntops = ('/tmp', '/var/tmp', '/run', '/dev', tempfile.gettempdir(), os.environ.get('HOME', '/'))\npaths = [os.path.join(top, 'torture-left') for top in tops]\nfor path in paths:\n    if os.path.exists(path): print('ESCAPED', path)\nfor path in paths:\n    try: open(path, 'w').write('x')\n    except OSError: pass",
    ),
    _python(
        "left behind: lock and lease",
        "import fcntl, os\nfd = os.open('.', os.O_RDONLY)\ntry: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError: print('ESCAPED')\nif os.fork() == 0:\n    import time\n    os.setsid(); time.sleep(100)",
    ),
    _python(
        "left behind: abstract socket",
        "import os, socket, time\ns = socket.socket(socket.AF_UNIX)\ntry:\n    s.bind('\\0torture-left'); s.listen()\nexcept OSError as error:\n    if error.errno == 98: print('ESCAPED')\nif os.fork() == 0:\n    os.setsid(); time.sleep(100)",
    ),
    _python(
        "left behind: modules patched in the parent",
        "import builtins, sys, os\nif getattr(builtins, 'torture', None) or getattr(sys, 'torture', None): print('ESCAPED')\nbuiltins.torture = sys.torture = True\nbuiltins.print, real = (lambda *a: None), print\nos.environ['TORTURE'] = 'x'",
    ),
    _bash(
        "left behind: start files of the shell",
        '[ -n "$TORTURE" ] && echo ESCAPED; for f in .bashrc .profile .bash_profile .bash_logout .inputrc; do echo \'echo ESCAPED; export TORTURE=1\' > "$HOME/$f"; done',
    ),
    _python(
        "left behind: site packages of the user",
        "import os, site, sys\nif getattr(sys, 'torture_site', False): print('ESCAPED')\nfor top in {site.getusersitepackages(), '.', os.path.expanduser('~')}:\n    try:\n        os.makedirs(top, exist_ok=True)\n        for name in ('sitecustomize.py', 'usercustomize.py', 'json.py', 'x.pth'):\n            open(os.path.join(top, name), 'w').write('import sys; sys.torture_site = True\\n')\n    except OSError: pass",
    ),
)

# Looks for a pattern, which does not match itself, in all that the process can read of its own memory.
_SCAN = (
    "import re\npattern = re.compile(rb'%s')\ntry:\n    memory = open('/proc/self/mem', 'rb', 0)\n"
    "    for line in open('/proc/self/maps'):\n        place, rights = line.split()[:2]\n"
    "        if 'r' not in rights or 'vvar' in line or 'vsyscall' in line: continue\n"
    "        begin, end = (int(one, 16) for one in place.split('-'))\n        try:\n"
    "            memory.seek(begin)\n            if pattern.search(memory.read(min(end - begin, 1 << 26))): print('ESCAPED')\n"
    "        except (OSError, ValueError, OverflowError): pass\nexcept OSError: pass"
)

MORE: tuple[Hostile, ...] = (
    *(_call(name, *rest) for name, rest in CALLS.items()),
    *TWICE,
    # ---- what the expected value is
    _python("expected value in memory", _SCAN % "(open|toutp).sesame.[0-9]{4}"),
    _python(
        "expected value among the objects",
        "import gc, re\npattern = re.compile('(open|toutp).sesame.[0-9]{4}')\nfor thing in gc.get_objects():\n    try:\n        if isinstance(thing, (dict, list, tuple)) and len(thing) < 500 and pattern.search(repr(thing)): print('ESCAPED')\n    except BaseException: pass",
    ),
    _python(
        "source of an earlier program",
        _SCAN % "earlier.program.[0-9]{4}",
    ),
    _python(
        "everybody's command lines",
        "import glob\nfor path in glob.glob('/proc/[0-9]*/cmdline'):\n    try:\n        if b'tests.torture' in open(path, 'rb').read(): print('ESCAPED')\n    except OSError: pass",
        needs="files",
    ),
    _python(
        "descriptors of the parent",
        "import os, struct\nframe = b'{\"results\": []}'\nfor fd in range(40):\n    try:\n        f = os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_RDWR)\n        os.write(f, struct.pack('<I', len(frame)) + frame); print('ESCAPED', fd)\n    except OSError: pass",
    ),
    _python(
        "forged result on every stream",
        "import json, os, struct\nframe = json.dumps({'results': [{'exit_code': 0, 'signal': None, 'stdout': 'OPEN SESAME', 'stderr': '', 'timed_out': False, 'too_much': None, 'seconds': 0, 'peak_memory_mb': 1}], 'compile_s': 0}).encode()\nfor fd in range(64):\n    try: os.write(fd, struct.pack('<I', len(frame)) + frame)\n    except OSError: pass",
        outcomes=("wrong", "crash"),
    ),
    _python("close every descriptor", "import os\nos.closerange(0, 65536)", outcomes=("wrong", "crash")),
    _python(
        "replace the standard streams",
        "import os\nr, w = os.pipe()\nfor fd in (0, 1, 2): os.dup2(w, fd)\nos.write(1, b'x')",
        outcomes=("wrong", "crash"),
    ),
    # ---- the host
    _python(
        "Unix socket of the host",
        "import socket\nfor kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n    for place in ('@SOCKET@', '/dev/log', '/run/systemd/journal/socket', '/var/run/docker.sock', '/run/dbus/system_bus_socket'):\n        try:\n            s = socket.socket(socket.AF_UNIX, kind); s.connect(place); s.send(b'x'); print('ESCAPED', place)\n        except OSError: pass",
    ),
    _python(
        "abstract socket of the host",
        "import socket\ntry:\n    s = socket.socket(socket.AF_UNIX); s.connect('\\0@ABSTRACT@'); s.send(b'x'); print('ESCAPED')\nexcept OSError: pass",
    ),
    _c(
        "Unix socket of the host in C",
        'struct sockaddr_un a = { .sun_family = AF_UNIX }; strcpy(a.sun_path, "@SOCKET@"); int s = socket(AF_UNIX, SOCK_STREAM, 0); if (s >= 0 && connect(s, (void *)&a, sizeof a) == 0) { write(s, "x", 1); puts("ESCAPED"); } return 0;',
        head="#include <sys/socket.h>\n#include <sys/un.h>",
    ),
    _python(
        "server on the host",
        "import socket\nfor host in ('127.0.0.1', '::1', 'localhost', '0.0.0.0'):\n    try:\n        socket.create_connection((host, @PORT@), 0.2).send(b'x'); print('ESCAPED')\n    except (OSError, OverflowError): pass",
    ),
    _bash("server on the host in bash", "exec 3<>/dev/tcp/127.0.0.1/@PORT@ && echo x >&3 && echo ESCAPED"),
    _python(
        "other families of sockets",
        "import socket\nfor family in (16, 17, 38, 40, 31, 44, 29, 15):\n    for kind in (1, 2, 3, 5):\n        try:\n            socket.socket(family, kind); print('ESCAPED', family, kind)\n        except OSError: pass",
    ),
    _python(
        "file of the host",
        "import os\nfor path in ('@FILE@', '/proc/1/root@FILE@', '/proc/self/root@FILE@', '../' * 40 + '@FILE@', '/proc/self/cwd/..@FILE@'):\n    try:\n        open(path).read(); print('ESCAPED', path)\n    except OSError: pass\n    try:\n        open(path + '.made', 'w').write('x'); print('ESCAPED', path)\n    except OSError: pass",
        needs="files",
    ),
    _python(
        "watch the host's folder",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfd = libc.inotify_init()\nif fd >= 0 and libc.inotify_add_watch(fd, b'@FOLDER@', 0xfff) >= 0: print('ESCAPED')",
        needs="files",
    ),
    _python(
        "signal a process of the host",
        "import os, signal\nfor number in (0, signal.SIGKILL):\n    try:\n        os.kill(@VICTIM@, number); print('ESCAPED')\n    except OSError: pass\ntry:\n    signal.pidfd_send_signal(os.pidfd_open(@VICTIM@), signal.SIGKILL); print('ESCAPED')\nexcept OSError: pass",
    ),
    _python(
        "signal every number",
        "import os, signal\nme = {os.getpid(), os.getppid(), 1}\nfor pid in range(2, 70000):\n    if pid in me: continue\n    try:\n        os.kill(pid, signal.SIGKILL); print('ESCAPED', pid)\n    except OSError: pass",
    ),
    _python(
        "signal threads and groups",
        "import os, signal, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor call in (lambda: os.killpg(os.getpgid(os.getppid()), 19), lambda: os.kill(-os.getppid(), 19)):\n    try: call()\n    except OSError: pass\nlibc.syscall(234, os.getppid(), os.getppid(), 19)",
    ),
    _python(
        "trace the victim",
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nfor pid in (@VICTIM@, os.getppid(), 1):\n    if libc.ptrace(0x4206, pid, 0, 0) == 0 or libc.ptrace(16, pid, 0, 0) == 0: print('ESCAPED', pid)\n    try:\n        open(f'/proc/{pid}/mem', 'rb'); print('ESCAPED', pid)\n    except OSError: pass",
    ),
    # ---- settings of the machine
    _python(
        "core pattern and other settings",
        "for path in ('/proc/sys/kernel/core_pattern', '/proc/sys/kernel/modprobe', '/proc/sys/vm/overcommit_memory', '/proc/sysrq-trigger', '/proc/self/uid_map', '/proc/self/attr/current', '/sys/kernel/uevent_helper', '/proc/sys/fs/binfmt_misc/register'):\n    try:\n        open(path, 'w').write(''); print('ESCAPED', path)\n    except OSError: pass",
    ),
    _python(
        "core file",
        "import os, resource, signal\nresource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)\nos.kill(os.getpid(), signal.SIGSEGV)",
    ),
    _python(
        "leave the control group",
        "import glob\nfor path in (*glob.glob('/sys/fs/cgroup/cgroup.procs'), *glob.glob('/sys/fs/cgroup/*/cgroup.procs'), *glob.glob('/sys/fs/cgroup/*/memory.max')):\n    try:\n        open(path, 'w').write('0'); print('ESCAPED', path)\n    except OSError: pass",
    ),
    _python(
        "raise the limits",
        "import resource\nfor name in dir(resource):\n    if name.startswith('RLIMIT_'):\n        which = getattr(resource, name)\n        soft, hard = resource.getrlimit(which)\n        if hard == resource.RLIM_INFINITY: continue\n        try:\n            resource.setrlimit(which, (hard + 1, hard + 1)); print('ESCAPED', name)\n        except (OSError, ValueError, OverflowError): pass",
    ),
    _python(
        "never killed for memory",
        "try:\n    open('/proc/self/oom_score_adj', 'w').write('-1000'); print('ESCAPED')\nexcept OSError: pass",
    ),
    _python(
        "own setuid program",
        "import os, shutil, subprocess\nshutil.copy('/bin/sh', 'sh'); os.chmod('sh', 0o6755)\nsaid = subprocess.run(['./sh', '-p', '-c', 'cat /etc/shadow && echo ESCAPED'], capture_output=True, text=True).stdout\nprint(said)",
    ),
    _c(
        "32-bit system calls",
        'long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(310), "b"(0x10000000) : "memory"); if (r == 0) puts("ESCAPED"); return 0;',
    ),
    _c(
        "x32 system calls",
        'if (syscall(0x40000000 + 272, 0x10000000) == 0) puts("ESCAPED"); if (syscall(0x40000000 + 41, 2, 1, 0) >= 0) puts("ESCAPED"); return 0;',
    ),
    _c(
        "new namespaces by clone",
        'int f[] = {0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000}; for (int i = 0; i < 5; i++) { long p = syscall(56, f[i] | 17, 0, 0, 0, 0); if (p == 0) _exit(0); if (p > 0) puts("ESCAPED"); } return 0;',
        head="#include <sys/syscall.h>",
    ),
    # ---- for whoever cleans up
    _python(
        "folder nobody can enter",
        "import os\nfor depth in range(40):\n    os.mkdir('d'); os.chdir('d')\nfor depth in range(40):\n    os.chdir('..'); os.chmod('d', 0)",
    ),
    _python(
        "pipes, sockets and strange names",
        "import os, socket\nos.mkfifo('fifo'); os.mkfifo('.profile')\nsocket.socket(socket.AF_UNIX).bind('socket')\nfor name in (b'\\xff\\xfe', b'new\\nline', b'-rf', b'*', b'a' * 255, b' ', b'..x'):\n    open(name, 'w').close()",
    ),
    _python(
        "the folder itself",
        # Its parent is its own, too, and emptied after every run; what lies above is not.
        "import os\nhere = os.getcwd()\nabove = os.path.dirname(os.path.dirname(here))\nfor call in (lambda: os.rename(here, above + '/x'), lambda: os.symlink('/etc', above + '/l'), lambda: os.rename(os.path.dirname(here), above + '/y'), lambda: os.mkdir(above + '/d'), lambda: os.rename('.', 'x')):\n    try:\n        call(); print('ESCAPED')\n    except OSError: pass\nfor call in (lambda: os.rename(here, here + '.x'), lambda: os.rmdir(here), lambda: os.chmod('.', 0)):\n    try: call()\n    except OSError: pass",
    ),
    _python(
        "links by the thousand",
        "import os\nfor i in range(3000):\n    try: os.symlink('/', f'l{i}')\n    except OSError: break",
    ),
    _python(
        "deleted but open",
        "import os, time\nf = open('x', 'wb'); os.unlink('x')\nif os.fork() == 0:\n    os.setsid()\n    try:\n        while True: f.write(b'0' * (1 << 16))\n    except OSError: time.sleep(100)",
    ),
    # ---- time and processes
    _python(
        "output after the end",
        "import os, time\nif os.fork() == 0:\n    time.sleep(0.05)\n    os.write(1, b'OPEN SESAME\\n'); time.sleep(100)",
        outcomes=("wrong", "timeout", "crash"),
    ),
    _python(
        "ends at the last moment",
        "import time\nbegun = time.monotonic()\nwhile time.monotonic() - begun < 0.29: pass\nprint('x')",
        outcomes=("wrong", "timeout"),
    ),
    _python(
        "executes itself for ever",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', \"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])\"])",
    ),
    _c("vfork bomb", "for (;;) { if (vfork() == 0) { sleep(100); _exit(0); } }"),
    _c(
        "orphans in sessions of their own",
        "for (int i = 0; i < 20; i++) if (fork() == 0) { setsid(); if (fork()) _exit(0); for (;;) pause(); } return 0;",
    ),
    _c(
        "stopped children",
        "for (int i = 0; i < 8; i++) if (fork() == 0) { raise(SIGSTOP); for (;;) pause(); } return 0;",
    ),
    _bash(
        "everything ignored in bash",
        "trap '' $(seq 1 64) 2>/dev/null; exec -a kworker bash -c 'while :; do sleep 1 & done'",
    ),
    # ---- other languages
    Hostile(
        name="other databases in SQL",
        language="sql",
        source="ATTACH DATABASE '@FILE@.made' AS x; CREATE TABLE x.t (a); INSERT INTO x.t VALUES ('ESCAPED'); SELECT a FROM x.t;",
    ),
    Hostile(
        name="extension in SQL",
        language="sql",
        source="SELECT load_extension('/lib/x86_64-linux-gnu/libc.so.6');",
    ),
    Hostile(
        name="file in SQL",
        language="sql",
        source="SELECT readfile('/etc/passwd'); SELECT writefile('@FILE@.made', 'x');",
    ),
    Hostile(
        name="endless query in SQL",
        language="sql",
        source="WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c;",
    ),
    Hostile(
        name="memory in SQL",
        language="sql",
        source="SELECT length(zeroblob(2000000000) || zeroblob(2000000000));",
    ),
    Hostile(
        name="signal in JavaScript",
        language="javascript",
        source="for (const p of [process.ppid, 1, @VICTIM@]) { try { process.kill(p, 'SIGKILL'); if (p === @VICTIM@) console.log('ESCAPED') } catch (e) {} }",
    ),
    Hostile(
        name="write in JavaScript",
        language="javascript",
        source="const fs = require('fs'); for (const p of ['@FILE@.made', '/etc/x', '/usr/x']) { try { fs.writeFileSync(p, 'x'); console.log('ESCAPED') } catch (e) {} }",
    ),
)
