"""Damage during a run: each is told where it is seen, and the run goes on to a sound end."""

import asyncio
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request

import msgspec
import nats
import pytest

from penstock.envs.tasks.storage import hidden_tests_key
from penstock.infra.config.file import load_config
from penstock.infra.run.prepare import build
from penstock.infra.run.runs import RunDir
from penstock.messages.task import HiddenTests, Split

from .launched import PENSTOCK, TINY, Launched, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def launch(tmp_path):
    started = []

    def launched(*settings, runs=tmp_path, **options):
        started.append(Launched(runs, *settings, **options))
        return started[-1]

    yield launched
    for run in started:
        run.end()


def events(run, name):
    told = penstock(run.runs, "log", "cat", run.folder.name, "--type", name)
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


def watch(run):
    """Run `penstock top` beside a run."""
    argv = [*PENSTOCK, "--runs-dir", str(run.runs), "top", run.folder.name]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def refused_key(url):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x"}]})
    headers = {"Authorization": "Bearer psk-wrong", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body.encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=20.0)
    return refusal.value.code, json.loads(refusal.value.read())


async def publish_garbage(url, subject):
    client = await nats.connect(url)
    await client.jetstream().publish(subject, b"\xc1 no message of ours")
    await client.close()


def test_damage_during_a_run(launch):
    run = launch("trainer.steps_max=14")
    run.until("step 2: ")
    folder = RunDir(run.folder)

    code, answer = refused_key(folder.gateway_url.read_text().strip())
    assert code == 401
    assert answer["error"]["code"] == "invalid_api_key"

    second = penstock(run.runs, "run", "--resume", "r1")
    assert second.returncode == 2
    assert "run r1: another process is running it" in second.stderr

    status = penstock(run.runs, "status", "r1", "--json")
    assert json.loads(status.stdout)["run"]["run_id"] == "r1"

    top = watch(run)
    state = folder.read_state()
    assert state is not None
    asyncio.run(publish_garbage(state.url, "ps.r1.trajectories.RolloutFinished.garbage"))

    stored = sorted((folder.regions / "west").rglob("*"))
    damaged = [p for p in stored if p.is_file() and (folder.objects / p.relative_to(
        folder.regions / "west")).is_file()]  # fmt: skip
    assert damaged
    whole = {path: path.read_bytes() for path in damaged}
    for path, data in whole.items():
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    run.kill("actor", "generator:west")

    assert run.wait() == 0, run.output
    said, _ = top.communicate(timeout=60.0)
    assert top.returncode == 0
    assert "finished: steps_max" in said
    run.check_sound(steps=14)
    rejected = events(run, "MessageRejected")
    assert {event["source_stream"] for event in rejected} == {"trajectories"}
    assert all(event["cause"] for event in rejected)
    readers = [folder.logs / "generator-west.log", folder.logs / "control.log"]  # Who comes first.
    assert any("repaired from the origin" in log.read_text() for log in readers)
    assert any(path.exists() and path.read_bytes() == data for path, data in whole.items())


def test_a_broken_task_is_the_judges_error_and_the_run_goes_on(launch, tmp_path):
    config = load_config(TINY)
    folder = RunDir(tmp_path / "r1")
    folder.path.mkdir()
    folder.config.write_bytes(TINY.read_bytes())
    objects = build(config, threading.Event())
    key = hidden_tests_key(Split.TRAIN)
    tests = msgspec.msgpack.decode(objects[key], type=list[HiddenTests])
    broken = [msgspec.structs.replace(h, files={"_hidden.py": "def ("}) for h in tests[::2]]
    objects[key] = msgspec.msgpack.encode([*broken, *tests[1::2]])
    for key, data in objects.items():
        asyncio.run(folder.store().put(key, data))
    run = launch(resume=True)
    assert run.wait() == 0, run.output
    run.check_sound(steps=4)
    assert run.summary["ledger"]["judge_failed"] > 0
    causes = {v["detail"] for v in events(run, "Verdict") if v["outcome"] == "judge_error"}
    assert all("does not parse" in cause for cause in causes)
    assert len(causes) > 0


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_the_run_in_order_and_it_resumes(launch, small_disk):
    run = launch(runs=small_disk)
    run.until("step 1: ")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 20))
    assert run.wait() == 2
    assert f"{run.folder}: 0 MiB free" in run.output
    assert "free space, then: penstock run --resume r1" in run.output
    refused = penstock(small_disk, "run", "--resume", "r1")
    assert refused.returncode == 2
    assert str(run.folder) in refused.stderr
    filler.unlink()
    time.sleep(0.1)
    again = launch(runs=small_disk, resume=True)
    assert again.wait() == 0, again.output
    again.check_sound(steps=4)
