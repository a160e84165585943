"""What one sidecar counted since it last looked: the shapes alone, between who counts (`telemetry`) and who tells."""

import msgspec

from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result

Ended = dict[tuple[Ending | None, Result], int]
"""How many ended so, and said that of their endpoint. None: an ending that another release told, not known here."""


class EndpointTally(msgspec.Struct, frozen=True):
    """The attempts on one endpoint that ended: by how, and by what that said of the endpoint.

    `copies` of them were probes by copy. `first_tokens` is a sketch (`core.sketch`) of the seconds to the first token.
    `runs` are failures in a row: before the first success, at most, and after the last; all the same where none
    succeeded.
    """

    endpoint: EndpointKey
    version: str
    ended: Ended
    copies: dict[Result, int] = {}
    first_tokens: dict[int, int] = {}
    runs: tuple[int, int, int] = (0, 0, 0)


class ServiceTally(msgspec.Struct, frozen=True):
    """What ended in one service; only the endpoints where anything did."""

    service: str
    endpoints: list[EndpointTally]
