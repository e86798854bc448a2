"""Runs one step of a Dockerfile inside a build machine, as root; uses no module of Penstock.

The image's layers are an overlay at `/mnt/image`. A `RUN` has that as its root, its own processes,
and the capabilities of a container. The step's changes are written as a tar stream to the last
disk.
"""

import contextlib
import ctypes
import glob
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile

ROOT, UPPER, FROM, CONTEXT = "/mnt/image", "/mnt/up/files", "/mnt/from", "/mnt/context"
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS_AND_PROCESSES = 0x00020000 | 0x20000000
READ_ONLY, NO_SUID, BIND, REMOUNT, PRIVATE = 1, 2, 4096, 32, 1 << 18 | 1 << 14
KEPT = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31}
"""Numbers of the capabilities that `envs/microvm/guest/launch.c` keeps."""
LINKS_MAX, REFUSED = 40, 3
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9),
         "tty": (5, 0)}  # fmt: skip


class StepRefusal(Exception):
    """The step cannot be executed; the text says why."""


def mount(source, target, kind, flags=0, data=""):
    """Mount a file system."""
    done = LIBC.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode())
    if done != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def stack(disks, name):
    """Mount layers, the uppermost first, and return overlayfs's option."""
    folders = []
    for number, disk in enumerate(disks):
        folder = f"/mnt/{name}-{number}"
        os.makedirs(folder)
        mount(disk, folder, "erofs", READ_ONLY)
        folders.append(folder)
    if len(folders) < 2:  # An overlay without an upper folder needs two layers.
        os.makedirs(f"/mnt/{name}-none")
        folders.append(f"/mnt/{name}-none")
    return "lowerdir=" + ":".join(folders)


def inside(root, path, *, follow_last=True):
    """Return the place of an image's path in this machine, following links inside the image."""
    todo, done, num = [p for p in path.split("/") if p not in ("", ".")], [], 0
    while todo:
        name = todo.pop(0)
        if name == "..":
            done = done[:-1]
            continue
        at = os.path.join(root, *done, name)
        if os.path.islink(at) and (todo or follow_last):
            num += 1
            if num > LINKS_MAX:
                raise StepRefusal(f"{path}: links lead in circles")
            target = os.readlink(at)
            done = [] if target.startswith("/") else done
            todo = [p for p in target.split("/") if p not in ("", ".")] + todo
            continue
        done.append(name)
    return os.path.join(root, *done)


def rows(name):
    """Return the fields of an account file of the image."""
    with contextlib.suppress(OSError), open(inside(ROOT, name), errors="replace") as file:
        return [line.rstrip("\n").split(":") for line in file]
    return []


def owner(text):
    """Return the ids and the home of `USER[:GROUP]`."""
    name, _, group = text.partition(":")
    name = name or "0"
    row = next((r for r in rows("/etc/passwd") if len(r) > 5 and name in (r[0], r[2])), None)
    if row is None and not name.isdecimal():
        raise StepRefusal(f"the image has no user {name!r}")
    uid, gid, home = (int(row[2]), int(row[3]), row[5]) if row else (int(name), 0, "/")
    if group:
        row = next((r for r in rows("/etc/group") if len(r) > 2 and group in (r[0], r[2])), None)
        if row is None and not group.isdecimal():
            raise StepRefusal(f"the image has no group {group!r}")
        gid = int(row[2]) if row else int(group)
    elif ":" not in text and row is None:
        gid = 0
    return uid, gid, home


def groups(uid):
    """Return the supplementary groups of a user."""
    names = {r[0] for r in rows("/etc/passwd") if len(r) > 2 and r[2] == str(uid)}
    members = [r for r in rows("/etc/group") if len(r) > 3 and names & set(r[3].split(","))]
    return [int(r[2]) for r in members if r[2].isdecimal()]


def make_folder(path, ids=(0, 0)):
    """Make a folder and those above it."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path), ids)
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        raise StepRefusal(f"{path.removeprefix(ROOT)}: a file is in the way of a folder") from None
    os.chmod(path, 0o755)
    os.chown(path, *ids)


def prepare_root():
    """Mount what a program expects under its root."""
    for name in ("dev", "proc", "sys"):
        at = os.path.join(ROOT, name)
        if os.path.islink(at):
            os.unlink(at)
        os.makedirs(at, exist_ok=True)
    mount("tmpfs", f"{ROOT}/dev", "tmpfs", NO_SUID, "mode=755,size=16m")
    for name, (major, minor) in NODES.items():
        os.mknod(f"{ROOT}/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(f"{ROOT}/dev/{name}", 0o666)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{ROOT}/dev/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"{ROOT}/dev/{name}")
    mount("tmpfs", f"{ROOT}/dev/shm", "tmpfs", NO_SUID, "mode=1777")
    mount("devpts", f"{ROOT}/dev/pts", "devpts", NO_SUID, "newinstance,ptmxmode=666,mode=620")
    os.symlink("pts/ptmx", f"{ROOT}/dev/ptmx")


def run(step):
    """Run a command in the image, and return its exit code."""
    uid, gid, home = owner(step["user"])
    extra = groups(uid)
    make_folder(inside(ROOT, step["workdir"]))
    prepare_root()
    for target in step["tmpfs"]:
        at = inside(ROOT, os.path.join(step["workdir"], target))
        make_folder(at)
        mount("tmpfs", at, "tmpfs", 0, "mode=1777")
    for name, text in step["files"].items():
        with open(f"{ROOT}/dev/{name}", "w") as file:
            file.write(text)
        os.chmod(f"{ROOT}/dev/{name}", 0o755)
    env = {"HOME": home} | step["env"]
    env |= {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    outer = os.fork()
    if outer == 0:
        os._exit(run_apart(step, env, (uid, gid, extra)))
    return os.waitstatus_to_exitcode(os.waitpid(outer, 0)[1])


def run_apart(step, env, ids):
    """Run a command in its own process and mount namespaces, and return its exit code."""
    uid, gid, extra = ids
    if LIBC.unshare(NEW_MOUNTS_AND_PROCESSES) != 0:
        return 127
    pid = os.fork()
    if pid == 0:
        # As PID 1 of its namespace: when it ends, so does everything that it left running.
        try:
            mount("none", "/", "", PRIVATE)
            mount("proc", f"{ROOT}/proc", "proc", NO_SUID)
            for name in ("sys", "sysrq-trigger"):
                at = f"{ROOT}/proc/{name}"
                if os.path.exists(at):
                    mount(at, at, "", BIND)
                    mount("", at, "", BIND | REMOUNT | READ_ONLY)
            os.chroot(ROOT)
            os.chdir(step["workdir"])
            for number in range(41):
                if number not in KEPT:
                    LIBC.prctl(24, number, 0, 0, 0)
            inner = os.fork()
            if inner == 0:
                os.setgroups(extra)
                os.setgid(gid)
                os.setuid(uid)
                os.umask(0o022)
                os.execvpe(step["argv"][0], step["argv"], env)
            while True:
                ended, status = os.wait()
                if ended == inner:
                    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        except BaseException as error:
            os.write(2, f"{step['argv'][0]}: {error}\n".encode())
            os._exit(127)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF


def sources(step):
    """Return the sources of a COPY, each with its path in this machine."""
    root = FROM if step["is_from"] else CONTEXT
    found = []
    for pattern in step["sources"]:
        at = pattern
        if any(c in pattern for c in "*?["):
            matches = sorted(glob.glob(pattern.lstrip("/"), root_dir=root))
        else:
            matches = [at] if os.path.lexists(inside(root, at)) else []
        if not matches:
            raise StepRefusal(f"no file is {pattern!r}")
        found += [(one, inside(root, one)) for one in matches]
    return found


def put(source, target, ids, mode):
    """Copy a file, a link or the content of a folder over the target."""
    info = os.lstat(source)
    if stat.S_ISDIR(info.st_mode):
        if os.path.lexists(target) and (os.path.islink(target) or not os.path.isdir(target)):
            raise StepRefusal(f"{target.removeprefix(ROOT)}: expected a folder")
        if not os.path.isdir(target):
            make_folder(os.path.dirname(target))
            os.mkdir(target)
        own(target, info, ids, mode)
        for name in sorted(os.listdir(source)):
            put(os.path.join(source, name), os.path.join(target, name), ids, mode)
        return
    if os.path.isdir(target) and not os.path.islink(target):
        raise StepRefusal(f"{target.removeprefix(ROOT)}: a folder is in the way of a file")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
        os.lchown(target, *(ids or (info.st_uid, info.st_gid)))
        return
    shutil.copyfile(source, target)
    own(target, info, ids, mode)


def own(target, info, ids, mode):
    """Give a copy its owner and mode."""
    os.chown(target, *(ids or (info.st_uid, info.st_gid)))
    os.chmod(target, stat.S_IMODE(info.st_mode) if mode < 0 else mode)


def unpack(source, target):
    """Unpack an archive inside the image, as ADD does; return False if it is not an archive."""
    if not os.path.isfile(source) or not tarfile.is_tarfile(source):
        return False
    make_folder(target)
    with open(source, "rb") as file:
        pid = os.fork()
        if pid == 0:
            try:
                archive = tarfile.open(fileobj=file)
                "".encode("idna")  # Import now what a process under another root cannot load.
                os.chroot(ROOT)
                os.chdir("/" + os.path.relpath(target, ROOT))
                archive.extractall(".", numeric_owner=True)
                os._exit(0)
            except BaseException as error:
                os.write(2, f"{error}\n".encode())
                os._exit(1)
        if os.waitpid(pid, 0)[1] != 0:
            raise StepRefusal(f"the archive {os.path.basename(source)!r} cannot be unpacked")
    return True


def copy(step):
    """Copy files into the image."""
    ids = owner(step["chown"])[:2] if step["chown"] else None
    found = sources(step)
    make_folder(inside(ROOT, step["workdir"]))
    wanted = step["target"]
    target = inside(ROOT, wanted)
    is_into = wanted.endswith(("/", "/.")) or os.path.isdir(target)
    if len(found) + len(step["files"]) > 1 and not is_into:
        raise StepRefusal(f"{wanted!r}: expected a folder for several sources, with / at its end")
    for name, source in found:
        if step["unpacks"] and unpack(source, target):
            continue
        if os.path.isdir(source):
            put_content(source, target, ids, step["mode"])
            continue
        at = os.path.join(target, os.path.basename(name.rstrip("/"))) if is_into else target
        make_folder(os.path.dirname(at))
        put(source, at, ids, step["mode"])
    for name, text in step["files"].items():
        at = os.path.join(target, name) if is_into else target
        make_folder(os.path.dirname(at))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(at)
        with open(at, "w") as file:
            file.write(text)
        os.chown(at, *(ids or (0, 0)))
        os.chmod(at, 0o644 if step["mode"] < 0 else step["mode"])
    return 0


def put_content(source, target, ids, mode):
    """Copy the content of a folder."""
    make_folder(target, ids or (0, 0))
    for name in sorted(os.listdir(source)):
        put(os.path.join(source, name), os.path.join(target, name), ids, mode)


def export(disk):
    """Write the step's changes to a disk, and return the number of bytes."""
    command = ["tar", "--create", "--file", disk, "--xattrs", "--xattrs-include=trusted.overlay.*",
               "--numeric-owner", "--format=pax", "--totals", "--sort=name",
               "--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./sys/*",
               "--directory", UPPER, "."]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StepRefusal(f"the step's files cannot be kept: {done.stderr[-300:]}")
    os.sync()


def main():
    """Execute the step that the input files describe."""
    with open("/tmp/step.json") as file:
        step = json.load(file)
    os.makedirs("/mnt/up")
    mount("tmpfs", "/mnt/up", "tmpfs", 0, f"mode=755,size={step['files_mib']}m")
    for name in (UPPER, "/mnt/up/work", ROOT):
        os.makedirs(name)
    lower = stack(step["disks"], "layer")
    options = f"{lower},upperdir={UPPER},workdir=/mnt/up/work,redirect_dir=off,metacopy=off"
    mount("overlay", ROOT, "overlay", 0, options)
    if step["from_disks"]:
        os.makedirs(FROM)
        mount("overlay", FROM, "overlay", READ_ONLY, stack(step["from_disks"], "from"))
    if step["context"]:
        os.makedirs(CONTEXT)
        mount(step["context"], CONTEXT, "erofs", READ_ONLY)
    try:
        code = run(step) if step["argv"] else copy(step)
        if code == 0:
            export(step["out"])
    except StepRefusal as error:
        sys.stderr.write(str(error))
        return REFUSED
    if code:
        sys.stderr.write(f"\nexit code {code}")
    return 100 if code else 0


if __name__ == "__main__":
    sys.exit(main())
