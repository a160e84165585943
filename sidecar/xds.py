"""`sidecar xds`: the routing tables for Envoys, from a process that relays nothing.

It is a sidecar that takes no traffic: it reads the same policy files, follows the same log, has the same admin pages,
and serves xDS. In a mesh of Envoys one or two of these are enough; where sidecars run anyway, any of them does the same
with `--xds`.
"""

from msgspec.structs import replace

from sidecar.main import run as run_sidecar
from sidecar.settings import Settings


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Nothing is settled or drained: Envoys keep what they were told, and
    come back to another server."""
    return run_sidecar(replace(settings, relay=False))
