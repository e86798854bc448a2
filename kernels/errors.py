"""What kernels refuse."""

from penstock.messages.errors import PenstockError


class KernelArgumentError(PenstockError, ValueError):
    """A tensor's shape, dtype or device is not what the kernel takes; the text says what is."""


class KernelUnavailableError(PenstockError, RuntimeError):
    """A device was asked for whose compiler, driver or library is missing; the text says which."""


class StaleRoutesError(PenstockError, ValueError):
    """Recorded routes are of another policy version, or of other tokens, than the ones asked."""
