"""Channels, the candidate and its gates on the page and in `penstock status`."""

import io

import pytest
from rich.console import Console
from tests.unit.monitor.gate_story import chosen, decided, evaluated, gate_story, moved, started

from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import MonitorState, decode_state, encode_state
from penstock.infra.commands.status import render


def state_of(*events) -> MonitorState:
    fold = RunFold()
    for at, event in enumerate(events):
        fold.apply(event, 100.0 + at)
    return decode_state(encode_state(fold.state(200.0)))


def test_a_candidate_is_shown_with_what_blocks_it():
    view = state_of(*gate_story()).gates
    assert view.channels == {"stable": 3, "candidate": 7}
    assert view.candidate.blocked_by.startswith("reply_length")
    assert view.decided == []


@pytest.mark.parametrize("place", range(5))
def test_a_report_may_come_before_what_it_is_about(place):
    *log, report = gate_story()
    log.insert(place, report)
    view = state_of(*log).gates
    assert view.candidate.blocked_by.startswith("reply_length")
    assert view.candidate.phase == "arms"


def test_without_the_gatekeepers_reports_the_log_alone_is_shown():
    view = state_of(chosen(), moved(0, candidate=7), started()).gates
    assert (view.candidate.phase, view.candidate.share) == ("arms", 0.5)


@pytest.mark.parametrize("late", [[], [evaluated()]])
def test_a_decision_stays_although_a_report_comes_later(late):
    view = state_of(*gate_story(), decided(), *late).gates
    assert (view.candidate.phase, view.candidate.blocked_by) == ("rolled_back", "")
    assert [one.reason for one in view.decided] == ["reply_length: 2, stable 6"]


def test_status_shows_gates_and_arms_and_nothing_of_them_in_a_run_without():
    def shown(state: MonitorState) -> str:
        console = Console(width=180, record=True, file=io.StringIO())
        console.print(render(state))
        return console.export_text()

    text = shown(state_of(*gate_story()))
    assert "stable version 3" in text
    assert "blocked by reply_length" in text
    assert "0.7012" in text
    assert "channels" not in shown(state_of())
