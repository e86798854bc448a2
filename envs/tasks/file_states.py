"""Reads the state of a machine's working directory, and restores it in another machine.

```
 machine ── sh: one listing ──▶ kind, mode, links, times of every file   (`list_states`)
 machine ◀── sh: clear the way ◀─ files ◀─ sh: links, pipes, modes, times (`lay_out`)
```
Both run the machine's programs as its user: `find` (GNU's, or any other together with `stat`),
`chmod`, `ln`, `mkfifo`, `touch`. Names and targets are bytes; in scripts, those that are not UTF-8
are written in octal digits.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from penstock.envs.sandbox import WORK_DIR, Sandbox, SandboxFileError
from penstock.messages.errors import PenstockError
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import FILE_MODE, FOLDER_MODE, FileKind, FileState

SEALED_NAMES = ("__pycache__", ".git", ".pytest_cache")
"""Never carried over: bytecode and history could smuggle in what the sources do not show."""
LIST_S_MAX = 60.0
LIST_BYTES_MAX = 1 << 20
LAY_OUT_S_MAX = 60.0
SCRIPT_BYTES_MAX = 60_000
"""Of one command: an argument has 128 KiB at most."""
_PARENTS = 'mkdir -p "${v%/*}" && '
_LIST_NAME = "list-states"
_FIELDS = 7
_NAMES = " -o ".join(f"-name {name}" for name in SEALED_NAMES)
_LIST = rf"""
[ -r "$1" ] && [ -w "$1" ] && [ -x "$1" ] || chmod u+rwx "$1"
cd "$1" || exit 2
up=$(cut -d. -f1 /proc/uptime); now=$(date +%s)
printf '%s %s\000' $((now - up)) "$now"
if find . -maxdepth 0 -printf '' 2> /dev/null; then
  all='%y %m %n %i %s %b %T@\0%P\0%l\0'
  if [ -n "$2" ]; then set -- ! -newerct @86400 -printf '\0%P\0\0' -o; else set --; fi
  exec find . -mindepth 1 \( {_NAMES} \) -prune -o \
    -type d ! -perm -0500 -printf "$all" -exec chmod u+rwx {{}} \; -o "$@" -printf "$all"
fi
export only=$2
find . -mindepth 1 \( {_NAMES} \) -prune -o -exec sh -c '
  if [ -L "$1" ]; then y=l; elif [ -d "$1" ]; then y=d; elif [ -f "$1" ]; then y=f
  elif [ -p "$1" ]; then y=p; else exit; fi
  set -- "$1" $(stat -c "%a %h %i %s %b %Y %Z" "$1")
  if [ -z "$only" ] || [ "$8" -gt 86400 ]; then
    printf "%s %s %s %s %s %s %s" $y $2 $3 $4 $5 $6 $7
  fi
  printf "\000%s\000" "${{1#./}}"
  if [ $y = l ]; then readlink -n "$1"; fi
  printf "\000"
  if [ $y = d ] && {{ [ ! -r "$1" ] || [ ! -x "$1" ]; }}; then chmod u+rwx "$1"; fi
' sh {{}} \;
"""
"""Prints when the machine booted and what time it is, then of each file its fields, path and
target. A folder that is closed to its owner is opened: the caller closes it again."""
_SCRIPT = r"""
b() { v=$(printf "$1."); v=${v%.}; }
c() {
  rest=$2 part=
  while [ "${rest#*/}" != "$rest" ]; do
    part=$part${rest%%/*}; rest=${rest#*/}
    if [ -L "$part" ] || { [ -e "$part" ] && [ ! -d "$part" ]; }; then rm -f "$part"; break; fi
    if [ -d "$part" ] && [ ! -w "$part" ]; then
      printf '%s\000%s\000' "$(stat -c %a "$part")" "$part"; chmod u+rwx "$part" 2> /dev/null
    fi
    part=$part/
  done
  case $1 in
    f) [ ! -L "$2" ] && { [ ! -e "$2" ] || [ -f "$2" ]; } && return ;;
    d) [ ! -L "$2" ] && { [ ! -e "$2" ] || [ -d "$2" ]; } && return ;;
  esac
  [ -L "$2" ] || [ ! -d "$2" ] || chmod -R u+rwx "$2"
  rm -rf "$2"
}
r() { chmod "$1" "$2" 2> /dev/null; :; }
"""
"""`b` decodes a path, `r` restores a mode, `c` clears the way for a file that is there (f), a
folder (d), or what is made anew. Removed is what is no folder on the way, and what is in its place:
through an image's own link another file would be written, and through a hard link two."""
_LETTERS = {"f": FileKind.FILE, "d": FileKind.FOLDER, "l": FileKind.LINK, "p": FileKind.PIPE}
_DAY_NS, _HOUR_NS = 86_400 * 10**9, 3_600 * 10**9


class ListingError(PenstockError, ValueError):
    """A working directory cannot be listed, because of what its programs did to it."""


class ListedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a listing."""

    state: FileState
    is_touched: bool = True
    """Whether it differs from the image layer; if not, the state has only its path."""
    size: int = 0
    is_hole: bool = False
    """Whether it takes no space at all."""
    written_ns: int = 0
    """Time at which its content changed; orders the files."""


def list_command(root: str, *, has_layer: bool = False) -> list[str]:
    """Return the command of a listing, which has only the paths of a layer's untouched files."""
    return ["sh", "-c", _LIST, _LIST_NAME, root, "layer" if has_layer else ""]


def is_listing(argv: Collection[str]) -> bool:
    """Return whether a command is a listing, for sandboxes that run no programs."""
    return _LIST_NAME in argv


def plain_listing(files: Mapping[str, int]) -> bytes:
    """Return a listing of regular files, from their sizes by path."""
    kept = [path for path in files if not set(path.split("/")).intersection(SEALED_NAMES)]
    told = (f"f 644 1 {n} {files[path]} 1 0\0{path}\0\0" for n, path in enumerate(kept))
    return ("0 0\0" + "".join(told)).encode()


async def list_states(
    sandbox: Sandbox, root: str = WORK_DIR, *, has_layer: bool = False
) -> dict[bytes, ListedFile]:
    """Return all files below a folder, by their path in it.

    Raises:
        ListingError: There are too many, or the folder cannot be listed.
        SandboxError: The machine failed.

    """
    done = await sandbox.exec(
        list_command(root, has_layer=has_layer),
        timeout_s=LIST_S_MAX,
        output_bytes_max=LIST_BYTES_MAX,
        cwd="/",
    )
    if done.timed_out or done.truncated or done.exit_code not in {0, 1}:  # 1: an unreadable folder.
        raise ListingError(f"{root}: its files are too many to be listed, or it is closed")
    try:
        return _parsed(done.stdout)
    except (ValueError, KeyError) as error:
        raise ListingError(f"{root}: its listing is malformed: {error}") from error


def _parsed(listing: bytes) -> dict[bytes, ListedFile]:
    head, *fields = listing.removesuffix(b"\0").split(b"\0")
    boot_s, now_s = map(int, head.split())
    usual_ns = (boot_s * 10**9 - _DAY_NS, now_s * 10**9 + _HOUR_NS)
    found: dict[bytes, ListedFile] = {}
    same: dict[bytes, bytes] = {}
    if len(fields) % 3:
        raise ValueError(f"{len(fields)} fields")
    told_of = sorted(zip(fields[1::3], fields[::3], fields[2::3], strict=True))
    for path, told, text in told_of:
        if not told:
            found[path] = ListedFile(state=FileState(path=path), is_touched=False)
            continue
        letter, mode, num_links, inode, size, blocks, time = told.split(b" ", _FIELDS - 1)
        if (kind := _LETTERS.get(letter.decode("latin-1"))) is None:
            continue  # Sockets and devices have no meaning without their program.
        if kind is FileKind.FILE and int(num_links) > 1 and same.setdefault(inode, path) != path:
            kind = FileKind.HARD_LINK
        seconds, _, fraction = time.partition(b".")
        time_ns = int(seconds) * 10**9 + int(fraction.ljust(9, b"0")[:9])
        is_set = kind is FileKind.FILE and not usual_ns[0] <= time_ns <= usual_ns[1]
        has_mode = kind in {FileKind.FILE, FileKind.FOLDER, FileKind.PIPE}
        state = FileState(
            path=path,
            kind=kind,
            mode=int(mode, 8) if has_mode else FILE_MODE,
            target=same[inode] if kind is FileKind.HARD_LINK else text,
            mtime_ns=time_ns if is_set and now_s else None,
        )
        is_hole = int(size) > 0 and int(blocks) == 0
        found[path] = ListedFile(state=state, size=int(size), is_hole=is_hole, written_ns=time_ns)
    return found


async def read_odd_name(sandbox: Sandbox, path: bytes, num_bytes_max: int) -> bytes:
    """Return the content of a file whose name is not UTF-8.

    Raises:
        ListingError: It cannot be read, or is larger.

    """
    done = await _run(sandbox, [f'{_word(path)}cat < "$v"'], min(num_bytes_max, LIST_BYTES_MAX))
    if done.truncated or done.exit_code != 0:
        raise ListingError(f"{path!a}: expected a readable file, {num_bytes_max} bytes at most")
    return done.stdout


async def set_modes(sandbox: Sandbox, modes: Mapping[bytes, int]) -> None:
    """Set the modes of files, deepest first; ignore failures."""
    deepest = sorted(modes.items(), key=lambda one: -one[0].count(b"/"))
    for lines in _pieces([f'{_word(path)}r {mode:o} "$v"' for path, mode in deepest]):
        await _run(sandbox, lines)


async def lay_out(
    sandbox: Sandbox,
    files: Mapping[str, bytes],
    states: Collection[FileState] = (),
    *,
    clears: bool = False,
) -> None:
    """Write files with all their state.

    Args:
        sandbox: The machine.
        files: Regular files with UTF-8 names.
        states: Their state besides bytes.
        clears: Whether to remove whatever else is in their place.

    Raises:
        SandboxFileError: They do not fit into the machine.
        SandboxError: The machine failed.

    """
    opened: dict[bytes, int] = {}
    if clears:
        opened = await _clear(sandbox, files, states)
    if files:
        await sandbox.write_files(files, keeps_modes=False)
    await _make(sandbox, states)
    await set_modes(sandbox, opened | _modes(states, FileKind.FOLDER))


async def _clear(
    sandbox: Sandbox, files: Iterable[str], states: Iterable[FileState]
) -> dict[bytes, int]:
    """Remove conflicting files, and return the modes of folders that were opened for that."""
    ways = [("w", path.encode()) for path in files]
    kinds = {FileKind.FILE: "f", FileKind.FOLDER: "d"}
    gone = [one for one in states if one.kind is FileKind.GONE]
    deepest = sorted(gone, key=lambda one: -one.path.count(b"/"))
    others = (one for one in states if one.kind is not FileKind.GONE)
    ways = [("x", one.path) for one in deepest] + ways
    ways += [(kinds.get(one.kind, "x"), one.path) for one in others]
    opened: dict[bytes, int] = {}
    for lines in _pieces([f'{_word(path)}c {letter} "$v"' for letter, path in ways]):
        done = await _run(sandbox, lines, LIST_BYTES_MAX)
        fields = done.stdout.split(b"\0")
        for mode, path in zip(fields[::2], fields[1::2], strict=False):
            if re.fullmatch(rb"[0-7]{1,4}", mode):
                opened.setdefault(path.removeprefix(b"./"), int(mode, 8))
    return opened


async def _make(sandbox: Sandbox, states: Collection[FileState]) -> None:
    """Create links, folders and pipes, then set modes and times of files."""
    odd = [one for one in states if one.data is not None]
    places = {f"/tmp/.carried-{number}": one for number, one in enumerate(odd)}  # noqa: S108
    if places:
        await sandbox.write_files({place: one.data or b"" for place, one in places.items()})
    lines = [_made(one, FOLDER_MODE) for one in states if one.kind is FileKind.FOLDER]
    lines += [f'{_word(one.path)}{_PARENTS}mv -f {place} "$v"' for place, one in places.items()]
    lines += [
        f'{_word(one.path)}{_PARENTS}: > "$v" && truncate -s {one.hole_bytes} "$v"'
        for one in states
        if one.hole_bytes
    ]
    later = (FileKind.LINK, FileKind.HARD_LINK, FileKind.PIPE)
    lines += [_made(one, one.mode) for one in states if one.kind in later]
    files = [one for one in states if one.kind is FileKind.FILE]
    lines += [f'{_word(one.path)}chmod {one.mode:o} "$v"' for one in files]
    lines += [
        f'{_word(one.path)}touch -d @{one.mtime_ns // 10**9}.{one.mtime_ns % 10**9:09d} "$v"'
        for one in files
        if one.mtime_ns is not None
    ]
    for piece in _pieces([f"{line} || exit 9" for line in lines]):
        done = await _run(sandbox, piece)
        if done.exit_code != 0 or done.timed_out:
            text = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise SandboxFileError(f"cannot be laid out: {text}")


def _made(state: FileState, mode: int) -> str:
    """Return the line that makes a folder, link, hard link or pipe."""
    if state.kind is FileKind.FOLDER:
        return f'{_word(state.path)}mkdir -p "$v"'
    if state.kind is FileKind.PIPE:
        return f'{_word(state.path)}{_PARENTS}mkfifo "$v" && chmod {mode:o} "$v"'
    is_link = state.kind is FileKind.LINK
    target = _word(state.target, is_path=not is_link)
    command = "ln -sfn" if is_link else "ln -f"
    return f'{target}w=$v; {_word(state.path)}{_PARENTS}{command} -- "$w" "$v"'


def _modes(states: Iterable[FileState], kind: FileKind) -> dict[bytes, int]:
    return {one.path: one.mode for one in states if one.kind is kind}


def _word(path: bytes, *, is_path: bool = True) -> str:
    """Return shell code that sets the variable v to a path."""
    if is_path and not path.startswith(b"/"):
        path = b"./" + path
    try:
        return f"v={shlex.quote(path.decode())}; "
    except UnicodeDecodeError:
        digits = "".join(f"\\{byte:03o}" for byte in path)
        return f"b '{digits}'; "


def _pieces(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield lines in chunks of a bounded size."""
    piece: list[str] = []
    num_bytes = 0
    for line in lines:
        if piece and num_bytes + len(line.encode()) > SCRIPT_BYTES_MAX:
            yield piece
            piece, num_bytes = [], 0
        piece.append(line)
        num_bytes += len(line.encode()) + 1
    if piece:
        yield piece


async def _run(sandbox: Sandbox, lines: Iterable[str], output_bytes_max: int = 4096) -> ExecResult:
    script = "\n".join([_SCRIPT, *lines])
    return await sandbox.exec(
        ["sh", "-c", script], timeout_s=LAY_OUT_S_MAX, output_bytes_max=output_bytes_max
    )
