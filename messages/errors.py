"""The one exception tree.

To add an error: derive from the nearest class here and from the standard-library type that a
caller without Penstock would catch; pass plain values to `super().__init__` so that it pickles;
name the field and what was expected in the text.
"""


class PenstockError(Exception):
    """Root of all errors that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """A configuration key is unknown, missing, or has a wrong value; the text gives its path."""


class CodecError(PenstockError, ValueError):
    """Bytes do not decode to the expected message; the text gives the path inside it."""


class ErasedError(CodecError):
    """A user's content, whose key was erased: nobody can read it again."""


class FormatError(PenstockError, ValueError):
    """Data was stored by a version of another format; the text names both and what to do."""


class StartAgainError(PenstockError, RuntimeError):
    """A process asks to be started again: its state is another client's."""


class BusError(PenstockError, ConnectionError):
    """The event bus cannot do what was asked."""


class BusClosedError(BusError):
    """The bus was closed by this process."""


class PublishConflictError(BusError):
    """Another event with the same key is already on the stream."""


class DeadlineError(PenstockError, TimeoutError):
    """An awaited thing did not come in time; the text says what was awaited and for how long."""


class QueueFullError(PenstockError, BlockingIOError):
    """A bounded queue refused one more entry; try again later."""


class StoreFullError(PenstockError, OSError):
    """An object store has no room; nothing was stored, and the same put may succeed later."""


class StoreUnreachableError(PenstockError, ConnectionError):
    """An object store cannot do what was asked: away, or it refuses us; it may have been done."""


class NotFoundError(PenstockError, LookupError):
    """A named thing (run, object, task, backend) does not exist; the text lists the choices."""


class CorruptDataError(PenstockError, ValueError):
    """A digest does not match its bytes; nothing was written."""


class RemoteCallError(PenstockError, RuntimeError):
    """The server of a request answered with `RemoteError`.

    Attributes:
        kind: A `RemoteErrorKind` value, e.g. busy.
        text: The server's words.

    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
