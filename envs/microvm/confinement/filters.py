"""Builds filters of the host's system calls, as BPF programs for bubblewrap's `--seccomp`. Pure.

User-mode Linux may make only the calls that its kernel and its guest processes need: a program that
breaks out of its guest kernel is left with this list. QEMU and bare programs may make all calls
except those that are useful mainly for attacks on the host's kernel. Refused calls fail with EPERM
instead of killing the process, because programs try such calls and continue without them, and
because user-mode Linux has a filter of its own that traps its guests' calls and must take
precedence.

Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

import struct
from collections.abc import Iterable, Mapping

_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16
_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
_CLONE, _CLONE3 = 56, 435

UML_CALLS: Mapping[str, int] = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20,
    "access": 21, "pipe": 22, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32,
    "dup2": 33, "pause": 34, "nanosleep": 35, "getpid": 39, "sendmsg": 46, "recvmsg": 47,
    "socketpair": 53, "execve": 59, "exit": 60, "wait4": 61, "kill": 62, "uname": 63, "fcntl": 72,
    "fsync": 74, "fdatasync": 75, "ftruncate": 77, "mkdir": 83, "rmdir": 84, "unlink": 87,
    "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "sysinfo": 99, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "setsid": 112,
    "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131,
    "personality": 135, "statfs": 137, "fstatfs": 138, "prctl": 157, "arch_prctl": 158,
    "gettid": 186, "tkill": 200, "futex": 202, "sched_getaffinity": 204, "epoll_create": 213,
    "set_tid_address": 218, "timer_create": 222, "timer_settime": 223, "timer_gettime": 224,
    "timer_getoverrun": 225, "timer_delete": 226, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234,
    "waitid": 247, "openat": 257, "newfstatat": 262, "unlinkat": 263, "ppoll": 271,
    "set_robust_list": 273, "epoll_pwait": 281, "fallocate": 285, "signalfd4": 289,
    "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "prlimit64": 302,
    "seccomp": 317, "getrandom": 318, "memfd_create": 319, "execveat": 322, "rseq": 334,
    "close_range": 436,
}  # fmt: skip
"""System calls of user-mode Linux, by x86-64 number; `clone` is allowed separately."""

REFUSED_CALLS: Mapping[str, int] = {
    "ptrace": 101, "syslog": 103, "uselib": 134, "pivot_root": 155, "chroot": 161,
    "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
    "lookup_dcookie": 212, "mbind": 237, "set_mempolicy": 238, "kexec_load": 246, "add_key": 248,
    "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272,
    "vmsplice": 278, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443,
    "memfd_secret": 447, "set_mempolicy_home_node": 450,
}  # fmt: skip
"""System calls that neither machines nor programs in them need, by x86-64 number.

`mknod` is not among them: programs create pipes with it, and devices need a capability that no
machine has.
"""


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _answer(numbers: Iterable[int], value: int) -> bytes:
    """Return instructions that return `value` for some system calls."""
    # Three per run of consecutive numbers: far fewer than one comparison per call.
    steps = b""
    for first, last in _runs(sorted(numbers)):
        steps += _step(_JUMP_FROM, first, 0, 2)
        steps += _step(_JUMP_FROM, last + 1, 1, 0)
        steps += _step(_RETURN, value)
    return steps


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _program(rules: bytes, otherwise: int) -> bytes:
    """Return a complete program that refuses other architectures and `clone` into namespaces."""
    # Other architectures and x32 number their calls differently, which would evade the rules.
    refuse = _step(_RETURN, _ERRNO | _EPERM)
    return b"".join((
        _step(_LOAD, _ARCHITECTURE), _step(_JUMP_EQUAL, _X86_64, 1, 0), refuse,
        _step(_LOAD, _NUMBER), _step(_JUMP_FROM, _X32_BIT, 0, 1), refuse,
        rules,
        _step(_JUMP_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS),
        _step(_JUMP_EQUAL, _CLONE, 1, 0), _step(_RETURN, otherwise),
        _step(_LOAD, _ARGUMENT_0), _step(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse,
        _step(_RETURN, _ALLOW),
    ))  # fmt: skip


def allow_only(calls: Iterable[int]) -> bytes:
    """Return a filter that allows only some calls, and `clone` without namespaces."""
    # `clone3` fails with ENOSYS: its flags are in memory, which a filter cannot read, and C
    # libraries then fall back to `clone`.
    return _program(_answer(calls, _ALLOW), _ERRNO | _EPERM)


def refuse_only(calls: Iterable[int]) -> bytes:
    """Return a filter that refuses some calls and the creation of namespaces."""
    return _program(_answer(calls, _ERRNO | _EPERM), _ALLOW)
