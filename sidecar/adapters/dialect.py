"""What a sidecar asks of an engine besides inference, as a Protocol: where it stands and what the answer means.

As small as what is used today. Pure translation: whoever asks owns sockets and deadlines. Both readers are total: they
take bytes that a stranger sent and answer None where these do not say what was asked, for a page that is not
understood must not be taken for an idle engine, nor stop the one who asks.
"""

from typing import Protocol

import msgspec


class Load(msgspec.Struct, frozen=True, gc=False):
    """Requests inside an engine: being generated, and queued for it. Both from 0."""

    running: int
    waiting: int


class Dialect(Protocol):
    """One engine's way of saying how busy it is and what it serves."""

    @property
    def load_path(self) -> bytes:
        """Where GET gives the page that `read_load` reads."""

    @property
    def models_path(self) -> bytes:
        """Where GET gives the page that `read_models` reads."""

    def read_load(self, text: bytes) -> Load | None:
        """The load that a page tells; None: it tells none."""

    def read_models(self, body: bytes) -> frozenset[str] | None:
        """The names that requests may ask for; never empty. None: the page does not say."""
