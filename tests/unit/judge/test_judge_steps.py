"""A step's finding as it is stored, and read again after a restart."""

from penstock.actors.judge.reward import Findings
from penstock.actors.judge.task_steps import _read, _written
from penstock.messages.reward import CheatFinding, CheatKind, Outcome
from penstock.messages.rollout import SandboxRecord


def test_a_finding_is_read_as_it_was_written() -> None:
    found = Findings(
        outcome=Outcome.FAILED,
        score=0.5,
        num_tests_passed=1,
        num_tests=2,
        sandbox=SandboxRecord(
            backend="uml", isolation_class="x", kernel_digest="k", image_digest="i"
        ),
        detail="why",
        cheats=[CheatFinding(kind=CheatKind.MACHINE, where="turn 0, call 0", detail="kill 1")],
    )
    stored = _written(found, "g0-m0", 1, "6")
    assert (stored.key(), stored.judge_version) == ("g0-m0.1", "6")
    assert stored.findings == found.cheats
    assert _read(stored) == found
