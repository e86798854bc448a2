"""The whole loop, tiny: from the command line to the closing table."""

import json

import pytest

from .launched import Launched, gone, machines, penstock

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]

FIELDS = {
    "midtrain": "tokens loss_first loss_last heldout_loss heldout_perplexity",
    "rl": "steps rollouts turns_mean segments_mean summaries summary_token_share "
    "heldout_pass_before heldout_pass_after staleness_max staleness_seen_max",
    "sandbox": "backend isolation_class vms boot_ms_p50",
    "sync": "regions versions empty_deltas full_uploads_after_v0 digest_mismatches",
    "ledger": "generated_tokens trained stale filtered infra_failed judge_failed not_reproducible "
    "greedy erased skipped withheld in_flight balanced",
    "live": "requests feedback trained_samples",
    "utilization": "trainer_busy generator_busy",
    "replay": "steps identical speedup",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    before = machines()
    launched = Launched(tmp_path_factory.mktemp("runs"))
    code = launched.wait(220.0)
    assert code == 0, launched.output
    launched.machines_left = machines() - before
    return launched


def test_the_summary_has_every_figure(run):
    run.check_sound(steps=4)
    found = run.summary
    assert found["wall_s"] > 0 and found["seed"] == 0
    for section, names in FIELDS.items():
        missing = [name for name in names.split() if found[section].get(name) is None]
        assert not missing, section
    assert found["rl"]["rollouts"] == 4 * 2 * 4
    assert found["sync"]["versions"] == 5
    something_changed = found["sync"]["empty_deltas"] < 4
    assert (found["sync"]["ratio_median"] is not None) == something_changed
    assert found["sandbox"]["backend"] == "uml"
    assert found["live"]["requests"] > 0 and found["live"]["feedback"] > 0
    assert all(0 < share <= 1 for share in found["utilization"].values())
    ledger = found["ledger"]
    fates = FIELDS["ledger"].split()[1:-1]
    assert ledger["generated_tokens"] == sum(ledger[fate] for fate in fates) > 0


def test_the_report_is_there_and_nothing_is_left_behind(run):
    assert "r1" in (run.folder / "report.html").read_text()
    assert gone(run.machines_left)
    assert run.processes() == {}


def test_its_solved_rollouts_are_traces(run, tmp_path):
    told = penstock(run.runs, "log", "cat", "r1", "--type", "Verdict")
    verdicts = [json.loads(line) for line in told.stdout.splitlines()]
    solved = {
        one["rollout_id"]
        for one in verdicts
        if one["purpose"] == "train" and one["outcome"] == "solved"
    }
    file = tmp_path / "traces.jsonl"
    done = penstock(run.runs, "export", "r1", "--format", "traces", "-o", str(file), "--json")
    assert done.returncode == 0, done.stderr
    traces = [json.loads(line) for line in file.read_text().splitlines()]
    assert json.loads(done.stdout.splitlines()[-1])["traces"] == len(traces)
    assert {trace["metadata"]["rollout_id"] for trace in traces} <= solved
    again = penstock(run.runs, "export", "r1", "--format", "traces", "-o", str(file))
    assert again.returncode != 0 and "exists; name a new file" in again.stderr


@pytest.mark.parametrize("with_keys", [True, False])
def test_its_log_travels_in_one_file(run, tmp_path, with_keys):
    file = tmp_path / "r1.penstock"
    options = ["--with-keys"] if with_keys else []
    exported = penstock(run.runs, "log", "export", "r1", "-o", str(file), *options)
    assert exported.returncode == 0
    assert not with_keys or "content keys of" in exported.stderr
    other = tmp_path / "elsewhere"
    brought = penstock(other, "log", "import", str(file))
    assert brought.returncode == 0, brought.stderr
    replayed = penstock(other, "replay", "r1", "--json")
    assert replayed.returncode == 0, replayed.stderr
    figures = json.loads(replayed.stdout)
    recorded = run.summary["replay"]
    num_unread = figures["steps_erased"]  # Users' content keys stay behind.
    assert figures["identical"] and figures["steps_compared"] + num_unread == recorded["steps"]
    if with_keys:
        assert num_unread == 0
        assert figures["weights_digest"] == recorded["weights_digest"]
        assert figures["live_s"] == pytest.approx(recorded["live_s"])
    status = penstock(other, "status", "r1", "--json")
    assert json.loads(status.stdout)["run"]["phase"] == "finished"


def test_a_run_id_in_use_and_a_damaged_file_are_refused(run, tmp_path):
    again = penstock(run.runs, "run", "--config", str(run.folder / "config.toml"), "--run-id", "r1")
    assert again.returncode == 2
    assert "run r1: exists" in again.stderr and "--resume r1" in again.stderr
    cut = tmp_path / "cut.penstock"
    penstock(run.runs, "log", "export", "r1", "-o", str(cut))
    cut.write_bytes(cut.read_bytes()[:-1000])
    refused = penstock(tmp_path / "elsewhere", "log", "import", str(cut))
    assert refused.returncode == 2
    assert str(cut) in refused.stderr
    assert not (tmp_path / "elsewhere" / "r1").exists()
