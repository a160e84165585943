"""Tokens that were believed and refused, and how it stands with the keys that they are held against.

By the word of what was wrong and by issuer, both from us and the policy; nothing of a token is ever told.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from sidecar.telemetry.series import Kind, header, label_text


class KeysView(Protocol):
    """One issuer's keys. `age_s`: since they were last read well, `stale_s`: since they could not be any more; -1.0:
    never, not."""

    @property
    def issuer(self) -> str: ...

    @property
    def keys(self) -> int: ...

    @property
    def age_s(self) -> float: ...

    @property
    def stale_s(self) -> float: ...

    @property
    def fetches(self) -> int: ...

    @property
    def failures(self) -> int: ...


class Tokens(Protocol):
    """Who verifies tokens, as far as he counts. Implemented by jwt."""

    @property
    def verified(self) -> int: ...

    @property
    def refused(self) -> Mapping[str, int]: ...

    @property
    def unavailable(self) -> int: ...

    @property
    def signatures(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    def views(self) -> Sequence[KeysView]:
        """The keys of each issuer; none: no token is verified here."""


TOKEN_METRICS: Final[tuple[tuple[str, Kind, str, Callable[[Tokens], int]], ...]] = (
    (
        "sidecar_jwt_verified_total",
        "counter",
        "Requests whose token is good",
        lambda tokens: tokens.verified,
    ),
    (
        "sidecar_jwt_unavailable_total",
        "counter",
        "Requests whose token nobody could judge, since its issuer's keys could not be read",
        lambda tokens: tokens.unavailable,
    ),
    (
        "sidecar_jwt_signatures_total",
        "counter",
        "Signatures that were calculated: tokens that were not known yet",
        lambda tokens: tokens.signatures,
    ),
    ("sidecar_jwt_waiting", "gauge", "Requests that wait for an issuer's keys", lambda tokens: tokens.waiting),
)

KEY_METRICS: Final[tuple[tuple[str, Kind, str, Callable[[KeysView], float | None]], ...]] = (
    ("sidecar_jwt_keys", "gauge", "Keys of an issuer that are known", lambda view: view.keys),
    (
        "sidecar_jwt_keys_age_seconds",
        "gauge",
        "Since an issuer's keys were last read",
        lambda view: view.age_s if view.age_s >= 0.0 else None,
    ),
    (
        "sidecar_jwt_keys_stale_seconds",
        "gauge",
        "Since an issuer's keys cannot be read any more; 0 while they can",
        lambda view: max(0.0, view.stale_s),
    ),
    ("sidecar_jwt_key_reads_total", "counter", "Times that an issuer's keys were read", lambda view: view.fetches),
    (
        "sidecar_jwt_key_failures_total",
        "counter",
        "Those of them that failed",
        lambda view: view.failures,
    ),
)


def pieces(tokens: Tokens) -> Iterator[str]:
    """The text; may be suspended between pieces while requests go on. Headers alone where no token is verified."""
    views = tokens.views()
    for name, kind, text, count in TOKEN_METRICS:
        yield header(name, text, kind)
        if views:
            yield f"{name} {count(tokens)}\n"
    refused = "sidecar_jwt_refused_total"
    yield header(refused, "Requests that were refused for their token, by what is wrong with it", "counter")
    for word, number in list(tokens.refused.items()) if views else ():
        yield f"{refused}{{{label_text(('why',), (word,))}}} {number}\n"
    for name, kind, text, read in KEY_METRICS:
        yield header(name, text, kind)
        for view in views:
            value = read(view)
            if value is not None:
                yield f"{name}{{{label_text(('issuer',), (view.issuer,))}}} {value!r}\n"
