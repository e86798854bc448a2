"""What a killed process leaves behind ends with it; what is ours stays."""

import subprocess
import sys

import pytest

from penstock.infra.run import runs
from penstock.infra.run.runs import DiskFullError, check_space

LAUNCHER = """
import os, signal, subprocess, time
from pathlib import Path
from penstock.infra.orphans import adopt_orphans, end_orphans

adopt_orphans()
helper = subprocess.Popen(["sleep", "60"])
other = subprocess.Popen(["sleep", "60"], start_new_session=True)
actor = subprocess.Popen(
    ["sh", "-c", "setsid sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
)
left = int(actor.stdout.readline())
while not Path(f"/proc/{left}/cmdline").read_bytes().startswith(b"sleep"):
    time.sleep(0.01)
actor.kill()
actor.wait()
print(end_orphans({other.pid, actor.pid}), Path(f"/proc/{left}").exists())
print(helper.poll(), other.poll())
helper.kill()
other.kill()
"""


def test_orphans_are_ended_and_children_of_ours_are_not():
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout.splitlines() == ["1 False", "None None"]


REAPER = """
import subprocess, time
from pathlib import Path
from penstock.infra.orphans import adopt_orphans, reap_ended

adopt_orphans()
own = subprocess.Popen(["true"], start_new_session=True)
actor = subprocess.Popen(
    ["sh", "-c", "exec 3<&0; setsid sh -c 'echo $$; read end <&3' &"], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, start_new_session=True,
)
left = int(actor.stdout.readline())
actor.wait()
print(reap_ended({own.pid, actor.pid}), Path(f"/proc/{left}").exists())
actor.stdin.close()
actor.stdout.read()
while Path(f"/proc/{left}/stat").read_text().split()[2] != "Z":
    time.sleep(0.01)
print(reap_ended({own.pid, actor.pid}), Path(f"/proc/{left}").exists(), own.wait())
"""


def test_adopted_children_are_reaped_when_they_have_ended():
    done = subprocess.run(
        [sys.executable, "-c", REAPER], capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout.splitlines() == ["0 True", "1 False 0"]


def test_a_disk_without_room_is_named(tmp_path, monkeypatch):
    check_space(tmp_path)
    monkeypatch.setattr(runs, "DISK_FREE_MIB_MIN", 1 << 40)
    with pytest.raises(DiskFullError, match=f"{tmp_path}: .* --resume {tmp_path.name}"):
        check_space(tmp_path)
