"""Everything of a file: from a task's folder to a machine, between steps, and to grading.

Each kind is made by a program in an episode's machine, as an agent would, and compared with what is
in the machine that grades, which one shared container would give.
"""

import os

import msgspec
import pytest

from penstock.envs.backends import open_backend
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import BackendUnavailable
from penstock.envs.tasks.changes import Changes, read_changes
from penstock.envs.tasks.grading import run_hidden_tests
from penstock.envs.tasks.harbor.read import read_harbor
from penstock.envs.tasks.storage import GradedTask
from penstock.envs.tasks.workspace import contents_at, open_step, open_workspace, states_at
from penstock.messages.rollout import EpisodeFiles
from penstock.messages.task import FileKind

pytestmark = [pytest.mark.vm, pytest.mark.timeout(200)]

KINDS = {
    "plain": "echo a > a",
    "executable": "echo a > a; chmod +x a",
    "private": "echo a > a; chmod 600 a",
    "read_only": "echo a > a; chmod 444 a",
    "closed": "echo a > a; chmod 000 a",
    "set_user": "echo a > a; chmod 4755 a",
    "all_bits": "echo a > a; chmod 7777 a",
    "empty_file": ": > a",
    "link": "echo a > a; ln -s a b",
    "link_absolute": "ln -s /usr/bin/python3 python",
    "link_dangling": "ln -s nowhere b",
    "link_to_itself": "ln -s b b",
    "link_to_folder": "mkdir d; echo a > d/a; ln -s d e",
    "link_odd_target": r"ln -s $(printf 'no\303(where') b",
    "link_chain": "echo a > a; ln -s a b; ln -s b c",
    "hard_link": "echo a > a; ln a b; ln a c",
    "hard_link_mode": "echo a > a; mkdir d; ln a d/b; chmod 751 a",
    "empty_folder": "mkdir d",
    "folder_mode": "mkdir d; echo a > d/a; chmod 700 d",
    "folder_closed": "mkdir -p d/e; echo a > d/e/a; chmod 000 d/e; chmod 500 d",
    "folder_sticky": "mkdir -m 1777 d",
    "folders_nested": "mkdir -p a/b/c/d",
    "pipe": "mkfifo -m 640 p",
    "hole": "truncate -s 40M h",
    "odd_name": r"echo a > $(printf '\303(\201x'); chmod 640 $(printf '\303(\201x')",
    "odd_folder": r"mkdir $(printf '\377d'); echo a > $(printf '\377d')/a",
    "odd_link": r"echo a > a; ln -s a $(printf '\200l')",
    "name_newline": "echo a > $'x\\ny'; chmod 700 $'x\\ny'",
    "name_quotes": 'echo a > "it\'s \\"\\$x\\""; chmod 711 it*',
    "name_dash": "echo a > ./-rf; chmod 711 ./-rf; ln -s -- -rf ./-l",
    "time": "echo a > a; touch -d 2001-02-03T04:05:06.789 a",
    "order": "echo a > b; sleep 0.05; echo a > a; [ a -nt b ]",
    "unicode": "echo a > 'ä 漢.txt'; chmod +x 'ä 漢.txt'",
}
"""Made in an empty folder of the kind's name."""
CHANGES = {
    "given_deleted": "rm a",
    "given_mode": "chmod +x a",
    "given_mode_and_bytes": "chmod 750 a; echo more >> a",
    "given_not_executable": "chmod -x run.sh",
    "given_run_edited": "echo echo more >> run.sh",
    "given_to_link": "rm a; ln -s run.sh a",
    "given_to_folder": "rm a; mkdir a; echo b > a/b",
    "given_folder_to_file": "rm -r d; echo d > d",
    "given_folder_to_link": "rm -r d; ln -s /tmp d",
    "given_folder_gone": "rm -r d empty",
    "given_folder_emptied": "rm d/b",
    "given_link_gone": "rm link",
    "given_link_to_file": "rm link; echo a > link",
    "given_link_changed": "ln -sfn run.sh link",
    "given_link_written": "echo through >> link",
    "given_odd_gone": r"rm $(printf 'odd\377')",
    "given_odd_changed": r"echo b > $(printf 'odd\377')",
    "given_hard_edited": "echo b >> hard",
    "given_hard_split": "cp hard c; mv c hard",
    "given_moved": "mv run.sh moved.sh",
}
"""Made in a folder that the task ships."""
TELL = r"""
cd /work/"$1" && find . -mindepth 1 -printf '%P\0%y %m %n %s\0%l\0' -type d ! -perm -500 -exec chmod u+rwx {} \; &&
find . -type f -exec chmod u+r {} \; -exec cksum {} + | sort &&
find . -type f ! -newermt 2010-01-01 -printf '%P %T@\n' | sort
"""  # noqa: E501 - a command
TASK = {
    "task.toml": 'version = "1.0"\n[environment]\nallow_internet = false\n',
    "instruction.md": "Work.\n",
    "tests/test.sh": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n",
    "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY files/ /app/\n",
}


def fill(place):
    """Make the files that a task's folder ships, of every kind that a folder can hold."""
    (place / "d").mkdir(parents=True)
    (place / "empty").mkdir()
    (place / "a").write_text("a\n")
    (place / "run.sh").write_text("echo run\n")
    (place / "run.sh").chmod(0o755)
    (place / "d" / "b").write_text("b\n")
    (place / "link").symlink_to("a")
    (place / "hard").write_text("h\n")
    os.link(place / "hard", place / "hard2")
    (place / os.fsdecode(b"odd\xff")).write_text("odd\n")
    (place / "secret").write_text("s\n")
    (place / "secret").chmod(0o600)


def write_task(root):
    for name, text in TASK.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for kind in CHANGES:
        fill(root / "environment" / "files" / kind)
    return root


@pytest.fixture
async def pool():
    try:
        backend = open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    async with Pool(backend, size=0, live_max=6, boot_timeout_s=60.0) as pool:
        yield pool


async def machine_of(pool):
    return (await pool.acquire(200.0, timeout_s=60.0)).sandbox


async def tell(machine, kind):
    done = await machine.exec(["sh", "-c", TELL, "tell", kind], timeout_s=20.0)
    assert done.exit_code == 0, (kind, done.stderr)
    head, _, rest = done.stdout.rpartition(b"\0")
    fields = head.split(b"\0")
    entries = sorted(zip(fields[::3], fields[1::3], fields[2::3], strict=True))
    return entries, rest


async def left_in(machine, task, step=0):
    return await read_changes(
        machine,
        contents_at(task, step),
        states=states_at(task, step),
        num_files_max=500,
        num_bytes_max=1 << 20,
    )


async def through_log(changes: Changes) -> Changes:
    """Return changes as the log gives them back."""
    files = EpisodeFiles(changed=changes.files, states=changes.states)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(files), type=EpisodeFiles)
    return msgspec.structs.replace(changes, files=again.changed, states=again.states)


async def grade(pool, graded, changes):
    machine = await machine_of(pool)
    done = await run_hidden_tests(
        machine,
        graded,
        changes.files,
        deleted=changes.deleted,
        states=changes.states,
        output_bytes_max=65_536,
    )
    assert done.stdout.endswith(b"1\n"), done.stderr
    return machine


async def test_every_kind_reaches_grading_as_one_machine_would_have_it(pool, tmp_path):
    candidate = read_harbor(write_task(tmp_path / "task"))
    agent = await machine_of(pool)
    await open_workspace(agent, candidate.task, "r", has_git=True)
    for kind, script in {**KINDS, **CHANGES}.items():
        made = f"mkdir -p /work/{kind}; cd /work/{kind}; umask 022; {script}"
        done = await agent.exec(["bash", "-c", made], timeout_s=20.0)
        assert done.exit_code == 0, (kind, done.stderr)
    changes = await left_in(agent, candidate.task)
    assert await left_in(agent, candidate.task) == changes  # Reading changed nothing.
    graded = GradedTask(task=candidate.task, hidden=candidate.hidden)
    grader = await grade(pool, graded, await through_log(changes))
    older = await grader.exec(["test", "/work/order/a", "-ot", "/work/order/b"], timeout_s=9.0)
    assert older.exit_code == 1
    different = {
        kind: (told, found)
        for kind in {**KINDS, **CHANGES}
        if (told := await tell(agent, kind)) != (found := await tell(grader, kind))
    }
    assert different == {}


async def test_a_task_ships_every_kind_and_an_idle_episode_changes_none(pool, tmp_path):
    candidate = read_harbor(write_task(tmp_path / "task"))
    agent = await machine_of(pool)
    await open_workspace(agent, candidate.task, "r", has_git=True)
    assert not await left_in(agent, candidate.task)
    entries, _ = await tell(agent, "given_moved")
    told = {name: (what.split()[:3], target) for name, what, target in entries}
    assert told[b"run.sh"][0] == [b"f", b"755", b"1"]
    assert told[b"secret"][0] == [b"f", b"600", b"1"]
    assert told[b"hard"][0] == told[b"hard2"][0] == [b"f", b"644", b"2"]
    assert told[b"link"][1] == b"a"
    assert told[b"empty"][0][0] == b"d"
    assert told[b"odd\xff"][0][0] == b"f"


async def test_a_step_finds_what_the_one_before_left_and_brings_its_own(pool, tmp_path):
    root = write_task(tmp_path / "task")
    with (root / "task.toml").open("a") as file:
        file.write('[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for name in ("one", "two"):
        (root / "steps" / name).mkdir(parents=True)
        (root / "steps" / name / "instruction.md").write_text("Go on.\n")
    fill(root / "steps" / "two" / "workdir" / "second")
    candidate = read_harbor(root)
    agent = await machine_of(pool)
    await open_workspace(agent, candidate.task, "r", has_git=False)
    await agent.exec(["sh", "-c", "mkdir -m 711 kept; ln -s kept l; mkdir second"], timeout_s=9.0)
    await open_step(agent, candidate.task.steps[0])
    await agent.exec(["sh", "-c", "rm second/link; chmod 700 second/a"], timeout_s=9.0)
    changes = await left_in(agent, candidate.task, 1)
    graded = GradedTask(task=candidate.task, hidden=candidate.hidden).at_step(1)
    grader = await grade(pool, graded, changes)
    for kind in ("second", "given_moved", "."):
        assert await tell(agent, kind) == await tell(grader, kind)


async def test_an_edit_keeps_a_files_mode_and_a_read_only_file_can_be_edited(pool):
    machine = await machine_of(pool)
    await machine.write_files({"a.sh": b"echo a\n", "new": b""})
    for mode in ("755", "444", "4700"):
        await machine.exec(["chmod", mode, "a.sh"], timeout_s=9.0)
        await machine.write_files({"a.sh": mode.encode() * 60_000})
        done = await machine.exec(["stat", "-c", "%a %s", "a.sh", "new"], timeout_s=9.0)
        assert done.stdout.split() == [mode.encode(), b"%d" % (60_000 * len(mode)), b"644", b"0"]


async def test_a_hostile_name_runs_nothing(pool, tmp_path):
    candidate = read_harbor(write_task(tmp_path / "task"))
    agent = await machine_of(pool)
    await open_workspace(agent, candidate.task, "r", has_git=False)
    script = r"""
name='$(id>ran);`id>ran`'; mkdir "$name"; chmod 700 "$name"
odd=$(printf '\377\047;id>ran;\047%%s\n.'); : > "$odd"; ln -s "$odd" "$name/$odd"
"""
    await agent.exec(["bash", "-ec", script], timeout_s=9.0)
    changes = await left_in(agent, candidate.task)
    assert {one.kind for one in changes.states} == {FileKind.FOLDER, FileKind.FILE, FileKind.LINK}
    graded = GradedTask(task=candidate.task, hidden=candidate.hidden)
    grader = await grade(pool, graded, changes)
    assert await tell(agent, ".") == await tell(grader, ".")
    for machine in (agent, grader):
        found = await machine.exec(["find", "/work", "/tmp", "-name", "ran"], timeout_s=9.0)
        assert found.stdout == b""
