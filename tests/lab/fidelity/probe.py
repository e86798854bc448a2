"""Program that runs in a guest and prints its checks as one JSON object, check -> value.

It needs only the standard library, since guests have no Penstock. It reads, measures times and
writes one scratch file and a scratch repository. It refuses to run as any user but the guest's, so
that nobody mistakes a host's values for a guest's.
"""

import json
import os
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GUEST_USER = "agent"


def user(field: str) -> str:
    """Return one field of this process's account, or "no"."""
    try:
        return getattr(pwd.getpwuid(os.getuid()), field)
    except KeyError:
        return "no"


def text(path: str, size: int = 4096) -> str:
    """Return the beginning of a file, or the reason why it cannot be read."""
    try:
        with Path(path).open(errors="replace") as file:
            return file.read(size).strip()
    except OSError as error:
        return f"no: {error.strerror}"


def output(*command: str) -> str:
    """Return the output of a program, or the reason why it did not run."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no: {type(error).__name__}"
    return done.stdout.decode(errors="replace").strip()


def names(folder: str) -> list[str] | str:
    """Return the names in a folder, sorted."""
    try:
        return sorted(entry.name for entry in Path(folder).iterdir())[:200]
    except OSError as error:
        return f"no: {error.strerror}"


def cpu(field: str) -> str:
    """Return one field of the first CPU's description, or "no"."""
    found = re.search(rf"^{field}\s*:\s*(.*)$", text("/proc/cpuinfo", 20000), re.MULTILINE)
    return found.group(1) if found else "no"


def memory(field: str) -> int | str:
    """Return a memory size as the number of bits of its MiB, so that small differences vanish."""
    found = re.search(rf"^{field}:\s*(\d+)", text("/proc/meminfo"), re.MULTILINE)
    return (int(found.group(1)) // 1024).bit_length() if found else "no"


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the shortest of several times, in seconds: other load can only lengthen a time."""
    best = 1e9
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def count() -> int:
    """Compute for about a millisecond."""
    total = 0
    for number in range(20000):
        total += number * number
    return total


def ratio(work: Callable[[], object], times: int = 5) -> int:
    """Return how long some work takes relative to `count`, as a power of two from -12 to 12."""
    share = seconds(work, times) / seconds(count, times)
    return max(
        -12, min(12, round(share).bit_length() if share >= 1 else -round(1 / share).bit_length())
    )


def scratch() -> None:
    """Write and sync a file."""
    path = Path("/tmp/.probe")
    with path.open("wb") as file:
        file.write(bytes(65536))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def reach() -> str:
    """Try to open a connection to an outside address; return "connected" or the error."""
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=0.5).close()
    except OSError as error:
        return type(error).__name__ + (f" {error.errno}" if error.errno else "")
    return "connected"


def fork() -> None:
    """Start and end a process."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def processes() -> list[str]:
    """Return the names of the running processes, without kernel threads and this program."""
    # Kernel threads have an empty command line.
    pids = [pid for pid in names("/proc") if pid.isdigit() and text(f"/proc/{pid}/cmdline")]
    return sorted({text(f"/proc/{pid}/comm") for pid in pids} - {"python3"})


def git_date() -> bool | str:
    """Return whether git dates a new commit within 2 s of the clock, or why git did not run."""
    folder = "/tmp/.probe-git"
    made = output("sh", "-c", f"rm -rf {folder}; git init -q {folder} && cd {folder} && "
                "git -c user.name=a -c user.email=a@a commit -q --allow-empty -m x && "
                "git log -1 --format=%ct; rm -rf " + folder)  # fmt: skip
    return abs(int(made) - int(time.time())) <= 2 if made.isdigit() else made


if user("pw_name") != GUEST_USER and "--anywhere" not in sys.argv:
    sys.exit(f"probe: expected to run as user {GUEST_USER!r} in a guest; --anywhere runs it anyway")

CHECKS = {
    "kernel.release": os.uname().release,
    "kernel.version": os.uname().version,
    "kernel.machine": os.uname().machine,
    "kernel.sysname": os.uname().sysname,
    "kernel.cmdline": text("/proc/cmdline"),
    "kernel.tainted": text("/proc/sys/kernel/tainted"),
    "kernel.pid_max": text("/proc/sys/kernel/pid_max"),
    "kernel.threads_max_magnitude": text("/proc/sys/kernel/threads-max").__len__(),
    "kernel.overcommit": text("/proc/sys/vm/overcommit_memory"),
    "kernel.aslr": text("/proc/sys/kernel/randomize_va_space"),
    "kernel.modules": len(text("/proc/modules").splitlines()),
    "kernel.filesystems": sorted(text("/proc/filesystems").replace("nodev", "").split()),
    "kernel.devices": names("/sys/bus"),
    "kernel.config_there": Path("/proc/config.gz").exists(),
    "kernel.dmesg": output("dmesg")[:80],
    "cpu.model": cpu("model name"),
    "cpu.vendor": cpu("vendor_id"),
    "cpu.flags": len(cpu("flags").split()),
    "cpu.hypervisor_flag": "hypervisor" in cpu("flags"),
    "cpu.bogomips": cpu("bogomips").split(".")[0],
    "cpu.num": os.cpu_count(),
    "cpu.affinity": len(os.sched_getaffinity(0)),
    "cpu.host_field": cpu("host"),
    "memory.total": memory("MemTotal"),
    "memory.swap": memory("SwapTotal"),
    "memory.huge_pages": text("/sys/kernel/mm/transparent_hugepage/enabled"),
    "firmware.dmi_vendor": text("/sys/class/dmi/id/sys_vendor"),
    "firmware.dmi_product": text("/sys/class/dmi/id/product_name"),
    "firmware.acpi": Path("/sys/firmware/acpi").exists(),
    "firmware.hypervisor_type": text("/sys/hypervisor/type"),
    "devices.block": names("/sys/block"),
    "devices.dev": names("/dev"),
    "devices.tty": Path("/dev/tty").exists(),
    "devices.pci": names("/sys/bus/pci/devices"),
    "devices.rtc": Path("/dev/rtc0").exists(),
    "network.interfaces": names("/sys/class/net"),
    "network.routes": len(text("/proc/net/route").splitlines()),
    "network.resolv": text("/etc/resolv.conf"),
    "network.hosts": text("/etc/hosts"),
    "network.hostname": socket.gethostname(),
    "network.egress": reach(),
    "network.proxy_variables": sorted(k for k in os.environ if "proxy" in k.lower()),
    "files.root": names("/"),
    "files.root_type": output("stat", "-f", "-c", "%T", "/"),
    "files.work_type": output("stat", "-f", "-c", "%T", "/work"),
    "files.mounts": sorted({line.split()[2] for line in text("/proc/mounts").splitlines()}),
    "files.tmp": names("/tmp"),
    "files.home": names(str(Path.home())),
    "files.etc": names("/etc"),
    "files.release": text("/etc/os-release").split("\n")[0],
    "files.machine_id": len(text("/etc/machine-id")),
    "files.docker_marker": Path("/.dockerenv").exists(),
    "files.work_owner": Path("/work").stat().st_uid,
    "files.free_magnitude": (shutil.disk_usage("/work").free >> 20).bit_length(),
    "user.name": user("pw_name"),
    "user.groups": sorted(os.getgroups()),
    "user.home": str(Path.home()),
    "user.shell": user("pw_shell"),
    "user.umask": os.umask(0o022),
    "user.sudo": shutil.which("sudo") is not None,
    "user.capabilities": re.findall(r"CapEff:\s*(\S+)", text("/proc/self/status")),
    "user.seccomp": re.findall(r"Seccomp:\s*(\S+)", text("/proc/self/status")),
    "environment.names": sorted(os.environ),
    "environment.path": os.environ.get("PATH"),
    "environment.locale": os.environ.get("LC_ALL"),
    "environment.locales": output("locale", "-a").split(),
    "environment.terminal": os.environ.get("TERM"),
    "environment.stdin": str(Path("/proc/self/fd/0").readlink()),
    "environment.descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "environment.processes_limited": resource.getrlimit(resource.RLIMIT_NPROC)[0] > 0,
    "processes.names": processes(),
    "processes.first": text("/proc/1/comm"),
    "processes.parent": text(f"/proc/{os.getppid()}/comm"),
    "processes.cgroup": text("/proc/self/cgroup"),
    "time.zone": time.tzname[0],
    "time.year": time.gmtime().tm_year,
    "time.uptime_magnitude": int(float(text("/proc/uptime").split()[0])).bit_length(),
    "time.clock_source": text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    "time.file_times": [Path(p).stat().st_mtime_ns == 0 for p in ("/usr/bin", "/etc")],
    "time.git_date": git_date(),
    "tools.python": sys.version.split()[0],
    "tools.git": output("git", "--version"),
    "tools.ripgrep": output("rg", "--version").split("\n")[0],
    "tools.shell": output("bash", "--version").split("\n")[0],
    "tools.missing": [
        name
        for name in ("gcc", "make", "curl", "ps", "setsid", "which", "less", "vi")
        if not shutil.which(name)
    ],
    "timing.system_call": ratio(os.getppid),
    "timing.fork": ratio(fork),
    "timing.file_sync": ratio(scratch),
    "timing.sleep": ratio(lambda: time.sleep(0.001)),
}

print(json.dumps(CHECKS))
