"""Label values that stay few, whatever clients send.

A model's name comes from the client. It gets a label of its own once a request for it succeeded, up to
`MAX_MODELS`; a name that never succeeded only while less than `MAX_UNPROVEN` such names are held, so that a client
that makes names up can hide neither the real models nor the memory. Everything else is `other`.
"""

from http import HTTPStatus
from types import MappingProxyType

OTHER = "other"
MAX_MODELS = 100
MAX_UNPROVEN = 20
MAX_LENGTH = 128
"""Characters of a model's name; the longest public ones have about 100."""

STATUS_WORD = MappingProxyType(
    {status.value: str(status.value) for status in HTTPStatus} | {0: "0", 499: "499", 529: "529"}
)
"""Statuses with a label of their own: the registered ones, 0 (no head), 499 (client left), 529 (overloaded)."""


def status_word(status: int) -> str:
    """The status itself where it is a known one, else its class (`5xx`)."""
    word = STATUS_WORD.get(status)
    if word is None:
        word = f"{status // 100}xx" if 100 <= status <= 599 else OTHER
    return word


class ModelNames:
    """Which model names have a label of their own."""

    __slots__ = ("_proven", "_unproven")

    def __init__(self) -> None:
        self._proven: dict[str, str] = {}
        self._unproven: dict[str, str] = {}

    def label(self, name: str, succeeded: bool) -> str:
        """The label for `name`; `succeeded`: the request that asks ended well, so some engine serves it."""
        known = self._proven.get(name)
        if known is not None:
            return known
        if not name:
            return ""
        # Not printable covers lone surrogates, which no exposition format can encode.
        if len(name) > MAX_LENGTH or not name.isprintable():
            return OTHER
        if succeeded and len(self._proven) < MAX_MODELS:
            self._unproven.pop(name, None)
            self._proven[name] = name
            return name
        if name in self._unproven:
            return name
        if len(self._unproven) < MAX_UNPROVEN:
            self._unproven[name] = name
            return name
        return OTHER
