"""Processor time by role: restarts are summed, reports and records agree, the split is right."""

from penstock.actors.monitor.fold import RunFold
from penstock.messages.control import RunFinished
from penstock.messages.telemetry import ActorReported, ProcessorUsed
from penstock.messages.training import MidtrainCompleted


def report(actor, role, at, gauges=None, **processor_s):
    return ActorReported(
        actor=actor,
        role=role,
        at=at,
        busy_s=0.0,
        uptime_s=1.0,
        num_handled=0,
        num_queued=0,
        gauges=gauges or {},
        processor_s=processor_s,
    )


def folded(*events):
    fold = RunFold()
    for at, event in events:
        fold.apply(event, at)
    return fold.state(fold.last_at).compute


MIDTRAINED = MidtrainCompleted(
    num_tokens=500,
    loss_first=1.0,
    loss_last=1.0,
    heldout_loss=1.0,
    heldout_perplexity=1.0,
    weights_digest="",
    wall_s=5.0,
)


def test_roles_are_grouped_and_split_at_the_end_of_mid_training():
    view = folded(
        (100.0, report("trainer", "trainer", 100.0, process=40.0)),
        (110.0, MIDTRAINED),
        (120.0, report("trainer", "trainer", 120.0, process=60.0)),
        (120.0, report("generator-west", "generator", 120.0, {"generated_tokens": 7.0})),
        (121.0, report("generator-west", "generator", 120.0, process=15.0)),
        (122.0, report("receiver-west", "receiver", 120.0, process=5.0)),
        (123.0, report("sandbox-h", "sandbox", 120.0, process=4.0, machines=10.0)),
        (124.0, report("pacer", "pacer", 120.0, process=1.0)),
        (130.0, ProcessorUsed(actor="launcher", role="launcher", processor_s={"process": 5.0})),
    )
    used = {name: role.processor_s for name, role in view.roles.items() if role.processor_s}
    assert used == {
        "trainer": 60.0, "generators": 20.0, "sandboxes": 14.0, "launcher": 5.0, "control": 1.0,
    }  # fmt: skip
    assert (view.processor_s, view.machines_s) == (100.0, 10.0)
    assert view.roles["trainer"].rl_processor_s == 10.0, "read off between two reports"
    assert view.roles["trainer"].share == 0.6
    assert view.roles["trainer"].tokens["mid_trained"] == 500
    assert view.roles["generators"].tokens["sampled"] == 7


def test_processor_time_of_the_rl_phase_ends_with_its_last_step():
    view = folded(
        (110.0, MIDTRAINED),
        (110.0, report("judge", "judge", 110.0, process=10.0)),
        (150.0, report("judge", "judge", 150.0, process=50.0)),
        (160.0, RunFinished(reason="steps_max", step=3)),
        (170.0, report("judge", "judge", 170.0, process=90.0)),
    )
    assert view.processor_s == 90.0
    assert view.rl_processor_s == 60.0, "half of what lies between the reports around its end"


def test_a_record_that_outlasts_its_reports_gives_the_same_sum():
    reports = [(float(at), report("judge", "judge", float(at), process=at / 2)) for at in range(9)]
    record = (9.0, ProcessorUsed(actor="judge", role="judge", processor_s={"process": 4.0}))
    both, alone = folded(*reports, record), folded(record)
    assert both.roles["judge"].processor_s == alone.roles["judge"].processor_s == 4.0


def test_an_engines_process_that_has_ended_is_counted_once():
    """Its time is then its parent's: the kernel adds it to that of children that have ended."""
    started = report("generator-west", "generator", 100.0, process=10.0, engine=30.0)
    ended = report("generator-west", "generator", 101.0, process=41.0)
    record = ProcessorUsed(
        actor="generator-west", role="generator", processor_s={"process": 10.0, "engine": 29.0}
    )
    assert folded((100.0, started)).processor_s == 40.0
    assert folded((100.0, started), (101.0, ended)).processor_s == 41.0
    assert folded((100.0, started), (101.0, ended), (102.0, record)).processor_s == 41.0
