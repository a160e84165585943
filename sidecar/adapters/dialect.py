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


class Signs(msgspec.Struct, frozen=True, gc=False):
    """Whether an engine gets anywhere with its requests.

    `mark`: numbers of which one moves, at least, while it does, the first with every token; empty: it tells none.
    `asleep`: it says that it answers nobody until it is woken.
    """

    mark: tuple[float, ...]
    asleep: bool


class Query(msgspec.Struct, frozen=True, gc=False):
    """What is asked: GET, or POST where there is a JSON `body`."""

    path: bytes
    body: bytes = b""


class Dialect(Protocol):
    """One front's way of saying that it lives, how busy it is and what it serves.

    `alive`: a page that it has while its process lives, which says nothing of the engine behind it. `load`: the page
    that `read_load` and `read_signs` read; None: there is none. `load_apart`: that one is on a port of its own, which
    the policy has to name (`metrics_url`). `models`: the page that `read_models` reads; None: it tells none.
    `models_every`: how many polls apart that is looked at, from 1. `nameless`: a request that names no model is served,
    by the engine's own.
    """

    @property
    def alive(self) -> Query: ...

    @property
    def load(self) -> Query | None: ...

    @property
    def load_apart(self) -> bool: ...

    @property
    def models(self) -> Query | None: ...

    @property
    def models_every(self) -> int: ...

    @property
    def nameless(self) -> bool: ...

    def read_load(self, text: bytes) -> Load | None:
        """The load that a page tells; None: it tells none."""

    def read_signs(self, text: bytes) -> Signs:
        """The signs of life on the page that tells a load."""

    def read_models(self, body: bytes, engine_model: str = "") -> frozenset[str] | None:
        """The names, the engine's own, that it serves now; perhaps none of them. None: the page does not say.

        `engine_model`, the policy's word for one of them, is among them if it serves that, however it is written.
        """


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
