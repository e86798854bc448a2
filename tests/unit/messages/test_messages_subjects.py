"""Subjects name an event once and for all, and let nothing else in."""

import pytest
from tests.contract.bus.bus_world import saved, step

from penstock.messages.errors import ConfigError
from penstock.messages.streams import (
    check_run_id,
    check_token,
    event_subject,
    service_subject,
    type_filter,
)
from penstock.messages.training import StepCompleted


def test_a_subject_names_run_stream_type_and_key():
    assert event_subject("r1", step(7)) == "ps.r1.training.StepCompleted.7"
    assert event_subject("r1", step(7)) != event_subject("r1", saved(7))
    assert type_filter("r1", StepCompleted) == "ps.r1.training.StepCompleted.>"
    assert service_subject("r1", "generate.train") == "ps.r1.rpc.generate.train"


@pytest.mark.parametrize("token", ["", "a b", "a.*", ">", ".a", "a.", "a..b", "a\n", "é", "$x"])
def test_a_token_cannot_widen_or_break_a_subject(token):
    with pytest.raises(ConfigError, match="feedback_id"):
        check_token(token, "feedback_id")


@pytest.mark.parametrize("token", ["a", "r1.0", "a-b_c=d+e:f.9"])
def test_good_tokens_pass(token):
    assert check_token(token, "key") == token


def test_a_run_id_is_one_token():
    assert check_run_id("2026-11-20_a") == "2026-11-20_a"
    with pytest.raises(ConfigError, match="no dot"):
        check_run_id("a.b")
