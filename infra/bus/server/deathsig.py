"""Run a program that ends when its parent does: `deathsig.py PARENT_PID PROGRAM ARGS...`.

A separate step rather than a hook between fork and exec: the parent has threads, and Python code
in the child of a threaded process may deadlock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for SIGTERM at the parent's death, then become the program; its files are private."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):  # It died before the request above.
        sys.exit(1)
    os.umask(0o077)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606


if __name__ == "__main__":
    main()
