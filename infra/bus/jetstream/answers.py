"""What a NATS server answers besides messages, and the errors made of it."""

from nats.aio.msg import Msg

from penstock.messages.errors import BusError

NO_RESPONDERS = "503"
RETRY_S = 0.1
"""Between two attempts."""


class ConnectionLostError(BusError):
    """The connection broke while something was outstanding; it may have been done or not."""


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
