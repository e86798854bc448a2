"""What JetStream answers: refused for good, or for a moment."""

import json

import pytest
from nats.aio.msg import Msg

from penstock.infra.bus.jetstream.connection import LOST, JetStreamError, check_answer


def answer(code: int) -> Msg:
    error = {"error": {"code": 409, "err_code": code, "description": "words"}}
    return Msg(_client=None, data=json.dumps(error).encode())


@pytest.mark.parametrize("code", [10008, 10118, 10119, 10158, 10163])
def test_what_holds_for_a_moment_is_asked_again(code):
    with pytest.raises(LOST, match=f"{code}.*words"):
        check_answer(answer(code), "STREAM.CREATE")


@pytest.mark.parametrize("code", [10047, 10059, 10071])
def test_a_refusal_is_not(code):
    with pytest.raises(JetStreamError, match=f"{code}.*words") as caught:
        check_answer(answer(code), "STREAM.CREATE")
    assert not isinstance(caught.value, LOST)
