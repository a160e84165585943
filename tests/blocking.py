"""That nothing of the sidecar blocks the event loop while a test runs."""

import contextlib
import gc
from collections.abc import Iterator

from blockbuster import blockbuster_ctx


@contextlib.contextmanager
def nothing_blocks(*excluded: str) -> Iterator[None]:
    """Whatever of the sidecar blocks the loop fails the test; `excluded` are modules of it that may.

    No garbage is collected meanwhile: an earlier test's gRPC channel that is found then waits for its thread, in the
    midst of whatever line of the sidecar's made the collector look.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with blockbuster_ctx("sidecar", excluded_modules=list(excluded)):
            yield
    finally:
        if collects:
            gc.enable()
