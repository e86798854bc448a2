"""Tests and code under test as two processes of this host, for code that these tests wrote."""

import socket
import subprocess
import sys

from penstock.envs.tasks.apart.programs import TESTS_FOLDER, modules_peer, suite_argv, suite_files
from penstock.messages.sandbox import ExecResult


def _start(end, command, folder, **streams):
    exec_ = ["bash", "-c", f'exec "$@" 3<&{end.fileno()}', "bash", sys.executable, *command[1:]]
    return subprocess.Popen(exec_, pass_fds=[end.fileno()], cwd=folder, **streams)


def lay_out(folder, files):
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def run_apart(folder, argv, peer, files, own):
    """Run tests whose files are `own` against the code in `files`, as a machine would."""
    work, tests = folder / "work", folder / "verifier"
    lay_out(work, files)
    lay_out(tests, {path.removeprefix(f"{TESTS_FOLDER}/"): text for path, text in own.items()})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = _start(theirs, peer, work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        command = [word.replace(TESTS_FOLDER, str(tests)) for word in argv]
        done = _start(ours, command, "/", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = done.communicate(timeout=60)
    finally:
        code.kill()
        code.wait()
    return ExecResult(exit_code=done.returncode, stdout=out, stderr=err)


def suite_lines(folder, code, tests, wanted=()):
    """Return what the tests of `tests` say of `code`, by name, both by path."""
    modules = [path for path in tests if path.rsplit("/", 1)[-1].startswith("test")]
    own = suite_files(tests, code, modules, wanted)
    done = run_apart(folder, suite_argv(), modules_peer(), code, own)
    lines = done.stdout.decode().splitlines()
    assert done.exit_code == 0, done.stderr.decode()
    return dict(line.rsplit(" ", 1) for line in lines)
