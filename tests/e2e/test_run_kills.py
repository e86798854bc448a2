"""kill -9 of every part at a random moment: the run ends as if nothing had been."""

import json
import random
import signal
import time

import msgspec
import pytest
from tests.ladder import prepared

from penstock.envs.tasks.harbor.write import write_harbor
from penstock.infra.run.task_sources import drawn_tasks

from .launched import Launched, gone, machines, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 10
VICTIMS = {
    "trainer": ("actor", "trainer"),
    "generator": ("actor", "generator:west"),
    "generator of users": ("actor", "generator:east"),
    "gateway": ("actor", "gateway"),
    "worker": ("actor", "rollout_worker"),
    "machines": ("actor", "sandbox_host"),
    "control": ("actor", "pacer"),
    "nats-server": ("-c",),
}


@pytest.fixture
def launch(tmp_path):
    started = []

    def launched(*settings, **options):
        started.append(Launched(tmp_path, f"trainer.steps_max={STEPS}", *settings, **options))
        return started[-1]

    def resumed():
        started.append(Launched(tmp_path, resume=True))
        return started[-1]

    launched.resumed = resumed
    yield launched
    for run in started:
        run.end()


@pytest.mark.parametrize("victim", sorted(VICTIMS))
def test_a_killed_part_comes_back_and_nothing_is_lost(launch, victim):
    before = machines()
    moments = random.Random(f"kill {victim}")
    run = launch()
    run.until("mid-training done")
    time.sleep(moments.uniform(0.0, 6.0))
    run.kill(*VICTIMS[victim])
    assert run.wait() == 0, run.output
    assert "restarting it" in run.output
    run.check_sound(steps=STEPS)
    assert gone(machines() - before)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_kills_in_one_run(launch, seed):
    before = machines()
    moments = random.Random(seed)
    run = launch("trainer.steps_max=40")
    run.until("mid-training done")
    for _ in range(8):
        time.sleep(moments.uniform(0.2, 3.0))
        run.kill(*VICTIMS[moments.choice(sorted(VICTIMS))])
    assert run.wait(200.0) == 0, run.output
    run.check_sound(steps=40)
    assert gone(machines() - before)


def test_a_killed_launcher_leaves_nothing_behind_and_the_run_resumes(launch):
    before = machines()
    run = launch()
    run.until("step 2: ")
    of_run = set(run.processes()) | (machines() - before)
    run.process.kill()
    assert gone(of_run | (machines() - before))
    again = launch.resumed()
    assert again.wait() == 0, again.output
    again.check_sound(steps=STEPS)


def test_ctrl_c_saves_and_the_run_resumes(launch):
    before = machines()
    run = launch()
    run.until("step 2: ")
    of_run = set(run.processes()) | (machines() - before)
    run.ctrl_c()
    assert run.wait() == 130
    assert "--resume r1" in run.output
    assert "restarting it" not in run.output
    assert gone(of_run | (machines() - before))
    again = launch.resumed()
    assert again.wait() == 0, again.output
    again.check_sound(steps=STEPS)


def test_a_preparation_ends_within_seconds_of_a_sigterm(launch):
    before = machines()
    run = launch("prepare.corpora.settings.num_demonstrations=1_000_000")
    run.until("preparing ")
    began = time.monotonic()
    run.process.terminate()
    assert run.wait() == 130
    assert time.monotonic() - began < 20.0
    assert gone(set(run.processes()) | (machines() - before))
    assert "--resume r1" in run.output


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ended_while_it_prepared_resumes(launch, sent):
    before = machines()
    run = launch()
    run.until("preparing ")
    run.process.send_signal(sent)
    assert run.wait() == (130 if sent == signal.SIGTERM else -signal.SIGKILL)
    assert "mid-training done" not in run.output
    assert gone(set(run.processes()) | (machines() - before))
    again = launch.resumed()
    assert again.wait() == 0, again.output
    again.check_sound(steps=STEPS)


def test_mid_training_goes_on_after_kill_9_to_the_same_bits(launch):
    settings = (
        "trainer.steps_max=1", "trainer.midtrain.num_tokens=150_000", "users.num_requests=0",
    )  # fmt: skip
    run = launch(*settings, "trainer.midtrain.save_s=0.1")
    seen = set()
    for _ in range(2):
        seen = until_saved(run, seen)
        run.kill(*VICTIMS["trainer"])
        seen |= saves(run)  # One may have come in between; the next is the next process's.
    assert run.wait() == 0, run.output
    whole = launch(*settings, run_id="r2")
    assert whole.wait() == 0, whole.output
    [disturbed, undisturbed] = [midtrained(each) for each in (run, whole)]
    assert disturbed["weights_digest"] == undisturbed["weights_digest"]
    assert disturbed["num_resumed"] == run.summary["midtrain"]["resumed"] == 2
    assert disturbed["num_saves"] >= 2 and "num_saves" not in undisturbed
    run.check_sound(steps=1)
    assert not saves(run)


def saves(run):
    return set(run.folder.rglob("midtrain/saves/*"))


def until_saved(run, known):
    """Wait for a save that is not known; return all."""
    deadline = time.monotonic() + 60.0
    while not (found := saves(run)) - known:
        assert time.monotonic() < deadline and run.process.poll() is None, run.output
        time.sleep(0.02)
    return known | found


def midtrained(run):
    told = penstock(run.runs, "log", "cat", run.folder.name, "--type", "MidtrainCompleted")
    [event] = [json.loads(line) for line in told.stdout.splitlines()]
    return event


def test_a_run_whose_machines_fail_halts_and_says_why(launch, tmp_path):
    small = prepared(num_train_tasks=12, num_heldout_tasks=4)
    for split, candidates in drawn_tasks(small, 0).items():
        for one in candidates:
            task = msgspec.structs.replace(one.task, image="image-that-no-host-has")
            write_harbor(msgspec.structs.replace(one, task=task), split, tmp_path / "tasks")
    run = launch(
        f"prepare.tasks={tmp_path / 'tasks'}",
        "trainer.infrastructure_num_min=8",
        "users.num_requests=0",
    )
    assert run.wait() == 1, run.output
    assert "the run was given up: infrastructure: of the newest" in run.output
    found = run.summary
    assert found["rl"]["given_up"] is True
    assert found["rl"]["finish_reason"].startswith("infrastructure: of the newest")
    assert found["ledger"]["balanced"] is True
    told = penstock(run.runs, "status", "r1")
    assert "finished: infrastructure" in told.stdout


def test_ctrl_c_stops_mid_training_within_seconds(launch):
    run = launch("trainer.midtrain.num_tokens=2_000_000")
    run.until("mid-training   1%")
    began = time.monotonic()
    run.ctrl_c()
    assert run.wait() == 130
    assert time.monotonic() - began < 20.0
    assert "mid-training continues from its last save" in run.output
    assert gone(set(run.processes()))
