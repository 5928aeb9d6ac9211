"""A seccomp filter as classic BPF, for x86_64 and aarch64: the system calls that no program gets.

A deny list. Behind namespaces it is a second layer; without them it is the layer for network, tracing and
signals. Needs no libseccomp.
"""

import errno
import os
import re
import struct

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
_NEW_NAMESPACES = 0x7E020000 | 0x80  # CLONE_NEW*, and CLONE_NEWTIME
_AF_UNIX = 1

# Name and numbers on x86_64 and aarch64; "-": the architecture has no such call. Landlock does not keep a
# program from watching the host's folders: hence inotify.
_TABLE = """
    ptrace 101 117                  process_vm_readv 310 270        process_vm_writev 311 271
    process_madvise 440 440         kcmp 312 272                    pidfd_getfd 438 438
    mount 165 40                    umount2 166 39                  pivot_root 155 41
    chroot 161 51                   unshare 272 97                  setns 308 268
    open_tree 428 428               move_mount 429 429              fsopen 430 430
    fsconfig 431 431                fsmount 432 432                 fspick 433 433
    mount_setattr 442 442           name_to_handle_at 303 264       open_by_handle_at 304 265
    bpf 321 280                     perf_event_open 298 241         userfaultfd 323 282
    io_uring_setup 425 425          io_uring_enter 426 426          io_uring_register 427 427
    keyctl 250 219                  add_key 248 217                 request_key 249 218
    memfd_create 319 279            memfd_secret 447 447            kexec_load 246 104
    kexec_file_load 320 294         init_module 175 105             finit_module 313 273
    delete_module 176 106           reboot 169 142                  swapon 167 224
    swapoff 168 225                 sethostname 170 161             setdomainname 171 162
    settimeofday 164 170            clock_settime 227 112           adjtimex 159 171
    clock_adjtime 305 266           acct 163 89                     quotactl 179 60
    quotactl_fd 443 443             syslog 103 116                  vhangup 153 58
    fanotify_init 300 262           inotify_init 253 -              inotify_init1 294 26
    inotify_add_watch 254 27        setpriority 141 140             sched_setscheduler 144 119
    sched_setparam 142 118          sched_setattr 314 274           ioprio_set 251 30
    migrate_pages 256 238           move_pages 279 239              personality 135 92
    shmget 29 194                   msgget 68 186                   semget 64 190
    mq_open 240 180                 iopl 172 -                      ioperm 173 -
    modify_ldt 154 -                io_setup 206 0
"""
REFUSED: dict[str, tuple[int | None, int | None]] = {
    name: (int(x86_64), None if aarch64 == "-" else int(aarch64))
    for name, x86_64, aarch64 in map(str.split, re.split(r"\s{2,}", _TABLE.strip()))
}
_CLONE, _CLONE3, _SOCKET, _PRLIMIT = (56, 220), (435, 435), (41, 198), (302, 261)
_SOCKETPAIR = (53, 199)
_SOCKET_TYPE, _SOCK_STREAM = 0xF, 1
_KILL_CALLS = {"kill": (62, 129), "tgkill": (234, 131)}
_SIGNAL_CALLS = {
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}


def is_supported() -> bool:
    """Whether the numbers of this machine's system calls are known here."""
    return os.name == "posix" and os.uname().sysname == "Linux" and os.uname().machine in _AUDIT


def build(only_signals_to: int | None = None, *, unix_sockets: bool = True) -> bytes:
    """The filter. `only_signals_to`: without a process namespace, the one process that may be signaled.
    `unix_sockets`: without namespaces they would reach the host's services, so that only connected pairs are
    left (a datagram pair could still be sent to a path).
    """
    machine = os.uname().machine
    column = 0 if machine == "x86_64" else 1
    code: list[bytes] = [
        _instruction(_LD, 0, 0, _ARCH),
        _instruction(_JEQ, 1, 0, _AUDIT[machine]),
        _instruction(_RET, 0, 0, _KILL),
        _instruction(_LD, 0, 0, _NR),
    ]
    if column == 0:  # the x32 numbers would be a way around every line below
        code += [_instruction(_JGE, 0, 1, 0x40000000), _refuse(errno.EPERM)]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            code += [_instruction(_JEQ, 0, 1, number), _refuse(errno.EPERM)]
    # Its flags lie in memory, where a filter cannot look: without it glibc falls back to clone.
    code += [_instruction(_JEQ, 0, 1, _CLONE3[column]), _refuse(errno.ENOSYS)]
    code += _on_argument(_CLONE[column], [_instruction(_JSET, 0, 1, _NEW_NAMESPACES), _refuse(errno.EPERM)])
    if unix_sockets:
        code += _on_argument(_SOCKET[column], [_instruction(_JEQ, 1, 0, _AF_UNIX), _refuse(errno.EACCES)])
    else:
        code += [_instruction(_JEQ, 0, 1, _SOCKET[column]), _refuse(errno.EACCES)]
        is_stream = [_instruction(_AND, 0, 0, _SOCKET_TYPE), _instruction(_JEQ, 1, 0, _SOCK_STREAM)]
        code += _on_argument(_SOCKETPAIR[column], [*is_stream, _refuse(errno.EACCES)], _ARG1)
    code += _on_argument(_PRLIMIT[column], [_instruction(_JEQ, 1, 0, 0), _refuse(errno.EPERM)])
    if only_signals_to is not None:
        for numbers in _SIGNAL_CALLS.values():
            code += [_instruction(_JEQ, 0, 1, numbers[column]), _refuse(errno.EPERM)]
        for numbers in _KILL_CALLS.values():
            code += _on_argument(
                numbers[column], [_instruction(_JEQ, 1, 0, only_signals_to), _refuse(errno.EPERM)]
            )
    code.append(_instruction(_RET, 0, 0, _ALLOW))
    return b"".join(code)


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _refuse(number: int) -> bytes:
    return _instruction(_RET, 0, 0, _ERRNO | number)


def _on_argument(number: int, check: list[bytes], argument: int = _ARG0) -> list[bytes]:
    """Where the call is `number`: load an argument, check it, allow what the check let through."""
    body = [_instruction(_LD, 0, 0, argument), *check, _instruction(_RET, 0, 0, _ALLOW)]
    return [_instruction(_JEQ, 0, len(body), number), *body]
