"""Runs a module in a session of its own, bound to its parent's life: `python -m soak.apart MODULE [ARGUMENT ...]`.

Ctrl-C at a terminal reaches every process of the session: the engines and the sidecar would stop with the soak, and
nothing would be left to look at. And a soak that is killed must leave no frozen engine behind. Linux only.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Cut loose, then be that module."""
    with contextlib.suppress(PermissionError):  # a group's leader already
        os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
