"""Builds the guest agent, the read-only base image that contains it, and the initramfs.

All files of the image belong to root and have time 0, so the same packages give the same bytes; the
agent creates the writable parts at boot. The initramfs holds one program and the drivers that
Debian's kernels have as modules.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from penstock.envs.microvm.recipe.apt import MIRROR
from penstock.envs.microvm.recipe.steps import Steps, find_first, install, require_programs
from penstock.envs.sandbox import WORK_DIR, WORK_NAMES

FIRST_PROGRAM = Path(__file__).resolve().parents[1] / "initramfs" / "init.c"
_DIRECTORY, _PROGRAM, _FILE = 0o40755, 0o100755, 0o100644


def initramfs_inputs() -> list[bytes]:
    """Return the inputs of the initramfs, except for the drivers."""
    return [Path(__file__).read_bytes(), FIRST_PROGRAM.read_bytes()]


def pack_initramfs(steps: Steps, what: str, modules: Path, drivers: Sequence[str]) -> Path:
    """Build an initramfs and return its path.

    Args:
        steps: Runner with a scratch folder of its own.
        what: Name of the product, for progress messages.
        modules: Folder of an unpacked package that contains the drivers.
        drivers: Names of the drivers in loading order: each may depend on those before it.

    Raises:
        BuildError: A driver is missing, or a step failed.

    """
    program = steps.scratch / "init"
    flags = ["-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror"]
    compile_command = ["gcc", *flags, "-o", str(program), str(FIRST_PROGRAM)]
    steps.run(f"{what}: compiling init", compile_command, timeout_s=120)
    entries = [("modules", _DIRECTORY, b""), ("init", _PROGRAM, program.read_bytes())]
    for number, name in enumerate(drivers):
        module = find_first(modules, f"**/{name}.ko")
        small = steps.scratch / f"{name}.small"
        strip = ["strip", "--strip-debug", "-o", str(small), str(module)]
        steps.run(f"{what}: {name}", strip, timeout_s=60)
        entries.append((f"modules/{number:02d}.ko", _FILE, small.read_bytes()))
    packed = steps.scratch / "initramfs"
    packed.write_bytes(pack_cpio(entries))
    return packed


def pack_cpio(entries: list[tuple[str, int, bytes]]) -> bytes:
    """Return a cpio archive in "newc" format, which the kernel unpacks at boot.

    Args:
        entries: Name, mode and content of each file.

    """
    # No times and no owners, so that equal content gives equal bytes.
    packed = bytearray()
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        packed += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        packed += bytes(-len(packed) % 4) + data
        packed += bytes(-len(packed) % 4)
    return bytes(packed)


GUEST_SOURCE = Path(__file__).resolve().parents[1] / "guest"
LAUNCHER_SOURCE = Path(__file__).resolve().parents[1] / "confinement" / "launcher.c"
SUITE = "bookworm"
PACKAGES = (
    *("base-files", "base-passwd", "bash", "coreutils", "dash", "diffutils", "findutils", "git"),
    *("grep", "gzip", "libc-bin", "mawk", "patch", "procps", "python3", "ripgrep", "sed", "tar"),
    *("ca-certificates", "curl", "debianutils", "less", "util-linux"),
)
ALTERNATIVES = {"awk": "mawk", "which": "which.debianutils"}
"""Links in /usr/bin that package scripts would create; those scripts are not run."""
VERIFIER_FOLDERS = ("tests", "logs", "solution")
"""Folders that verifiers and known solutions in Harbor's format read and write; empty while an
agent works."""
UUID = "00000000-0000-0000-0000-000000000001"
"""Fixed identifier of the file system, so that equal content gives equal bytes."""
LEFT_OUT = ("doc", "man", "info", "locale", "lintian", "perl", "perl5", "gitweb", "bug")
"""Folders of /usr/share that no task needs."""
REMOVED = ("var/lib/apt", "var/lib/dpkg/info", "var/cache", "var/log", "usr/bin/perl*")


def image_inputs() -> list[bytes]:
    """Return the inputs of the image, except for the versions of its packages."""
    return [Path(__file__).read_bytes(), *(p.read_bytes() for p in sorted(GUEST_SOURCE.iterdir()))]


def build_agent(steps: Steps, folder: Path) -> Path:
    """Compile the guest agent into one static file, `agent.new` in `folder`."""
    return _compile(steps, folder, "agent", sorted(GUEST_SOURCE.glob("*.c")))


def build_launcher(steps: Steps, folder: Path) -> Path:
    """Compile the launcher of machine processes into `launcher.new` in `folder`."""
    return _compile(steps, folder, "launcher", [LAUNCHER_SOURCE])


def _compile(steps: Steps, folder: Path, name: str, sources: list[Path]) -> Path:
    require_programs("gcc")
    flags = ["-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror"]
    built = steps.scratch / name
    steps.run(f"{name}: compiling", ["gcc", *flags, "-o", str(built), *map(str, sources)],
              timeout_s=600)  # fmt: skip
    install(built, folder / f"{name}.new", 0o755)
    return folder / f"{name}.new"


def _bootstrap(steps: Steps) -> Path:
    hook = 'for d in bin sbin lib lib64; do mkdir -p "$1/usr/$d"; ln -s "usr/$d" "$1/$d"; done'
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
    archive = steps.scratch / "root.tar"
    command = [
        *("mmdebstrap", "--variant=extract", f"--include={','.join(PACKAGES)}"),
        *("--aptopt=Acquire::Languages none", f"--setup-hook={hook}", *left_out),
        *(SUITE, str(archive), f"deb {MIRROR} {SUITE} main"),
    ]
    steps.run("image: fetching Debian packages", command, timeout_s=900)
    root = steps.scratch / "root"
    root.mkdir()
    unpack = ["tar", "xf", str(archive), "--exclude=./dev/*", "--no-same-owner"]
    steps.run("image: unpacking", unpack, timeout_s=600, cwd=root)
    archive.unlink()
    return root


def _write_account(root: Path) -> None:
    etc, masters = root / "etc", root / "usr/share/base-passwd"
    agent = "agent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    (etc / "passwd").write_text((masters / "passwd.master").read_text() + agent)
    (etc / "group").write_text((masters / "group.master").read_text() + "agent:x:1000:\n")
    (etc / "hostname").write_text("vm\n")
    (etc / "hosts").write_text("127.0.0.1 localhost vm\n")
    (etc / "resolv.conf").write_text("")


def _write_certificates(root: Path) -> None:
    """Write the certificate bundle that the package's script would create; it is not run."""
    certificates = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_bytes(b"".join(path.read_bytes() for path in certificates))


def _customize(steps: Steps, root: Path, agent: Path) -> None:
    _write_account(root)
    _write_certificates(root)
    for name in ("work", "home/agent", "mnt", "proc", "sys", "dev", "tmp", "var/log", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for pattern in REMOVED:
        for path in root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, target in ALTERNATIVES.items():
        (root / "usr/bin" / name).unlink(missing_ok=True)
        (root / "usr/bin" / name).symlink_to(target)
    # Unchecked bytecode: the interpreter loads it without comparing it with the source, which all
    # have time 0 here.
    compile_all = ["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    enter = ["bwrap", "--unshare-all", "--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"]
    steps.run(
        "image: compiling Python's library",
        [*enter, "--", *compile_all, "-x", "test/|lib2to3/tests", "/usr/lib/python3.11"],
        timeout_s=900,
    )
    shutil.copy(agent, root / "usr/sbin/penstock-agent")
    for name in ("tmp", "var/tmp", *VERIFIER_FOLDERS):
        (root / name).mkdir(exist_ok=True)
        (root / name).chmod(0o1777)
    for name in WORK_NAMES:
        alias = root / name.lstrip(
            "/"
        )  # Below the image's root: joined, "/app" would be the host's.
        if not alias.exists():
            alias.symlink_to(WORK_DIR.lstrip("/"))


def _write_erofs(steps: Steps, root: Path, built: Path) -> None:
    make = ["mkfs.erofs", "--quiet", "-T0", f"-U{UUID}", "--all-root", str(built), str(root)]
    steps.run("image: writing erofs", make, timeout_s=300)


def build_image(steps: Steps, folder: Path, agent: Path) -> Path:
    """Build the base image as `image.new` in `folder`.

    Args:
        steps: Runner with a scratch folder of its own, which needs 1 GB.
        folder: Folder in which to put the image.
        agent: Path of the compiled guest agent.

    Raises:
        BuildError: A program is missing, or a step failed.

    """
    require_programs("mmdebstrap", "mkfs.erofs", "tar", "bwrap")
    root = _bootstrap(steps)
    _customize(steps, root, agent)
    built = steps.scratch / "image"
    _write_erofs(steps, root, built)
    install(built, folder / "image.new", 0o644)
    return folder / "image.new"
