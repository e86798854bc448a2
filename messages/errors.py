"""Exceptions that Penstock raises on purpose, in one hierarchy.

To add an error, derive it from the nearest class here and from the standard-library type that a
caller who does not know Penstock would catch. Pass plain values to `super().__init__` so that it
pickles. Name the field and what was expected in the text.
"""


class PenstockError(Exception):
    """Root of all errors that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """A configuration key is unknown, missing, or has a wrong value; the text gives its path."""


class CodecError(PenstockError, ValueError):
    """Bytes do not decode to the expected message; the text gives the path inside it."""


class ErasedError(CodecError):
    """A user's content cannot be read because its key was erased."""


class FormatError(PenstockError, ValueError):
    """Data was stored in another format version; the text names both and what to do."""


class StartAgainError(PenstockError, RuntimeError):
    """A process asks to be restarted because its state belongs to another client."""


class BusError(PenstockError, ConnectionError):
    """The event bus could not carry out an operation."""


class BusClosedError(BusError):
    """The bus was closed by this process."""


class PublishConflictError(BusError):
    """Another event with the same key is already on the stream."""


class DeadlineError(PenstockError, TimeoutError):
    """A wait timed out; the text says what was awaited and for how long."""


class QueueFullError(PenstockError, BlockingIOError):
    """A bounded queue refused one more entry; try again later."""


class StoreFullError(PenstockError, OSError):
    """An object store is full; nothing was stored, and the same put may succeed later."""


class StoreUnreachableError(PenstockError, ConnectionError):
    """An object store is away or denies access; the operation may still have taken effect."""


class NotFoundError(PenstockError, LookupError):
    """A named run, object, task or backend does not exist; the text lists the choices."""


class CorruptDataError(PenstockError, ValueError):
    """A digest does not match its bytes; nothing was written."""


class RemoteCallError(PenstockError, RuntimeError):
    """The server answered a request with `RemoteError`.

    Attributes:
        kind: Value of `RemoteErrorKind`, e.g. busy.
        text: Error text from the server.

    """

    def __init__(self, kind: str, text: str) -> None:
        # Both arguments, or unpickling would fail.
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
