"""What kernels refuse."""

from penstock.messages.errors import PenstockError


class KernelArgumentError(PenstockError, ValueError):
    """A tensor's shape, dtype, device or values do not fit; the text says what does."""


class KernelUnavailableError(PenstockError, RuntimeError):
    """The compiler, driver or library of a requested device is missing; the text says which."""
