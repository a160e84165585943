"""What a sidecar has to say to an engine and to read from it, as Protocols; one object per engine and front.

Pure translation: whoever asks owns sockets and deadlines. All readers are total: they take bytes that a stranger sent
and answer None where these do not say what was asked, for a page that is not understood must not be taken for an idle
engine, nor stop the one who asks.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from sidecar.adapters.ask import Ask
from sidecar.adapters.reading import Reading


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


class Outgoing:
    """A translated request: POST with a JSON body. `target` is the request target, percent-encoded."""

    __slots__ = ("body", "target")

    def __init__(self, target: bytes, body: bytes) -> None:
        self.target = target
        self.body = body


class Translator(Protocol):
    """How one front of an engine is asked what OpenAI clients ask, and how its answers are read.

    `name` in words, for errors: "DeepSpeed-MII's OpenAI front". `lacks`: needs (`ask.needs_of`) it cannot meet, each
    with why, in words for the client. `applies_template`: it makes a prompt of a chat itself.
    """

    @property
    def name(self) -> str: ...

    @property
    def lacks(self) -> Mapping[str, str]: ...

    @property
    def applies_template(self) -> bool: ...

    def outgoing(self, ask: Ask) -> Outgoing:
        """The engine's request. Raises `SidecarError` (`BAD_REQUEST`) for a value it cannot be told."""

    def reading(self, ask: Ask) -> Reading:
        """Who reads the answer to it."""
