"""What a NATS server answers besides messages, and the errors made of it."""

import json
from typing import Any

from nats.aio.msg import Msg

from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.rpc import RetryPolicy

NO_RESPONDERS = "503"
WRONG_LAST_SEQUENCE = {10071, 10164}
NAME_IN_USE = 10058
NO_MESSAGE = 10037
_UNAVAILABLE = {
    10008: "JetStream is temporarily unavailable",
    10118: "the stream is offline",
    10119: "the consumer is offline",
    10158: "a message of this id is being stored",
    10163: "the last sequence of the subject is being determined",
}
"""What JetStream answers for a moment, mostly in clusters; the texts are for readers of this."""
RETRY = RetryPolicy(pause_s=0.1)


class ConnectionLostError(BusError):
    """The connection broke while something was outstanding; it may have been done or not."""


class UnavailableError(ConnectionLostError):
    """JetStream cannot do it now: a cluster without a leader, or a copy that is still in work."""


LOST = (ConnectionLostError, DeadlineError)
"""Errors after which the same request may be sent again."""


class JetStreamError(BusError):
    """JetStream refused a call; `code` is its err_code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code

    def __str__(self) -> str:
        return f"JetStream error {self.args[0]}: {self.args[1]}"


def status(message: Msg) -> str:
    """Return the status code of a control message; empty for any other."""
    if message.data or not message.headers:
        return ""
    return message.headers.get("Status", "")


def check_answer(message: Msg, what: str) -> dict[str, Any]:
    """Decode JetStream's answer to `what`.

    Raises:
        JetStreamError: It refused.
        UnavailableError: It refuses for now.

    """
    answer: dict[str, Any] = json.loads(message.data)
    if error := answer.get("error"):
        code, text = error.get("err_code", 0), f"{what}: {error.get('description', '')}"
        if code in _UNAVAILABLE:
            raise UnavailableError(f"JetStream error {code}: {text}")
        raise JetStreamError(code, text)
    return answer
