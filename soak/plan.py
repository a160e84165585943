"""What happens in a soak, drawn from a seed: who asks what in which manner, what breaks when, which policy comes when.

Pure: the same seed gives the same plan. What it cannot fix is the interleaving: how fast turns are taken follows the
sidecar's CPU, and which of two packets comes first is the kernel's affair.
"""

import random
from collections.abc import Iterator
from enum import StrEnum
from typing import TypeVar

import msgspec

from sidecar.demo.script import Fault
from sidecar.demo.script import Kind as FaultKind

T = TypeVar("T")

ENGINES = 4
"""Three serve chat, the last of them as canary; one serves the small model, and chat's fallback."""

SESSIONS = 2000
"""Names of sessions; far more than the policy's bound, so that sessions are forgotten all the time."""


class Kind(StrEnum):
    """What is asked for."""

    CHAT_STREAM = "chat_stream"
    CHAT = "chat"
    COMPLETION_STREAM = "completion_stream"
    COMPLETION = "completion"
    MESSAGES_STREAM = "messages_stream"
    RESPONSES_STREAM = "responses_stream"
    EMBEDDINGS = "embeddings"
    LONG_STREAM = "long_stream"  # megabytes as fast as they go: back-pressure
    MODELS = "models"
    MODELS_HEAD = "models_head"
    NOT_FOUND = "not_found"
    ECHO = "echo"
    ECHO_CHUNKED = "echo_chunked"
    BULK = "bulk"  # megabytes up and down
    BAD_JSON = "bad_json"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"


MIX: tuple[tuple[Kind, float], ...] = (
    (Kind.CHAT_STREAM, 45),
    (Kind.CHAT, 10),
    (Kind.COMPLETION_STREAM, 8),
    (Kind.COMPLETION, 4),
    (Kind.MESSAGES_STREAM, 4),
    (Kind.RESPONSES_STREAM, 4),
    (Kind.EMBEDDINGS, 5),
    (Kind.LONG_STREAM, 0.3),
    (Kind.MODELS, 6),
    (Kind.MODELS_HEAD, 2),
    (Kind.NOT_FOUND, 2),
    (Kind.ECHO, 4),
    (Kind.ECHO_CHUNKED, 2),
    (Kind.BULK, 0.3),
    (Kind.BAD_JSON, 1.5),
    (Kind.UNKNOWN_MODEL, 1.5),
    (Kind.TOO_LARGE, 0.5),
    (Kind.MALFORMED, 2),
)

CHOSEN: tuple[tuple[str, float], ...] = (("chat-large", 5), ("chat-fast", 3), ("small", 2))
"""Models by how often they are asked for. The small one's engine is alone: while it is down, all of its are refused."""

STREAMS = frozenset(
    {Kind.CHAT_STREAM, Kind.COMPLETION_STREAM, Kind.MESSAGES_STREAM, Kind.RESPONSES_STREAM, Kind.LONG_STREAM}
)
INFERENCE = STREAMS | {
    Kind.CHAT,
    Kind.COMPLETION,
    Kind.EMBEDDINGS,
    Kind.BAD_JSON,
    Kind.UNKNOWN_MODEL,
    Kind.TOO_LARGE,
}
UPLOADS = frozenset({Kind.ECHO, Kind.ECHO_CHUNKED, Kind.BULK})
HEAVY = frozenset({Kind.LONG_STREAM, Kind.BULK})
REFUSED_HEADS = frozenset({Kind.TOO_LARGE, Kind.MALFORMED})
"""What never becomes a request: counted by the sidecar, and in no line of its log."""

PIPELINED = (Kind.CHAT, Kind.EMBEDDINGS, Kind.MODELS, Kind.CHAT_STREAM, Kind.ECHO)


class Carriage(StrEnum):
    """Whose connection it is, and which protocol."""

    KEPT = "kept"
    ONCE = "once"
    HTTP_10 = "http_10"
    HTTP_10_KEPT = "http_10_kept"


class Manner(StrEnum):
    """How the client behaves besides."""

    PLAIN = "plain"
    DRIBBLE = "dribble"  # the request comes in small pieces
    CONTINUE = "continue"  # the body waits for 100 Continue
    SLOW = "slow"  # reads nothing for a while, then goes on
    DEAF = "deaf"  # reads nothing for longer than it may


class When(StrEnum):
    """When a client leaves."""

    IN_REQUEST = "in_request"
    SENT = "sent"
    IN_ANSWER = "in_answer"


class Abort(msgspec.Struct, frozen=True):
    """A client that leaves. `part`: how much of the request was sent, 0 to 1; `after_s` from the request sent;
    `after_bytes` of the answer's body. `reset`: RST, else a close."""

    when: When
    reset: bool
    part: float = 0.0
    after_s: float = 0.0
    after_bytes: int = 0


class Ask(msgspec.Struct, frozen=True):
    """One request. `number` is its id; `size` the bytes of its prompt, or of what is uploaded; `fault` what its own
    header asks of the engine (JSON, empty for none); `variant` picks among malformed heads."""

    number: int
    kind: Kind
    model: str = ""
    session: str = ""
    tokens: int = 0
    size: int = 0
    fault: str = ""
    usage: bool = False
    variant: int = 0


class Turn(msgspec.Struct, frozen=True):
    """What one client does: one request, or several written at once."""

    asks: tuple[Ask, ...]
    carriage: Carriage
    manner: Manner = Manner.PLAIN
    abort: Abort | None = None


OWN_FAULTS: tuple[Fault, ...] = (
    Fault(FaultKind.STATUS, status=500),
    Fault(FaultKind.STATUS, status=429, retry_after="1"),
    Fault(FaultKind.STATUS, status=400, message="max_tokens is too large"),
    Fault(FaultKind.STATUS, status=400, message="this model's maximum context length is 4096 tokens"),
    Fault(FaultKind.IN_BAND_ERROR, after=3),
    Fault(FaultKind.IN_BAND_ERROR),
    Fault(FaultKind.CUT_RST, after=4, torn=True),
    Fault(FaultKind.CUT_FIN, after=2, torn=True),
    Fault(FaultKind.CUT_NO_TERMINATOR, after=5),
    Fault(FaultKind.MALFORMED_EVENT, after=2),
    Fault(FaultKind.EMPTY),
    Fault(FaultKind.WRONG_MEDIA_TYPE),
    Fault(FaultKind.STALL, after=3),
    Fault(FaultKind.FIN_BEFORE_HEAD),
    Fault(FaultKind.RST_BEFORE_HEAD),
    Fault(FaultKind.BAD_HTTP),
    Fault(FaultKind.EXTRA_BYTES),
    Fault(FaultKind.STALE),
    Fault(FaultKind.SLOW_DRIP, size=200, period_s=0.01),
)
"""What a request's own header asks for."""

ENGINE_FAULTS: tuple[Fault, ...] = (
    Fault(FaultKind.STALL, after=3, torn=True),
    Fault(FaultKind.CUT_RST, after=6, torn=True),
    Fault(FaultKind.CUT_FIN, after=6),
    Fault(FaultKind.CUT_NO_TERMINATOR, after=2),
    Fault(FaultKind.IN_BAND_ERROR, after=5),
    Fault(FaultKind.STATUS, status=500),
    Fault(FaultKind.STATUS, status=503, retry_after="1"),
    Fault(FaultKind.HANG),
    Fault(FaultKind.RST_BEFORE_HEAD),
    Fault(FaultKind.COMMENTS_ONLY),
    Fault(FaultKind.HEADERS_ONLY),
)
"""What befalls a whole engine for a while."""


class Traffic:
    """Turns without end, one after another from the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"traffic {seed}")
        self._number = 0

    @property
    def asked(self) -> int:
        """How many requests were drawn."""
        return self._number

    def __iter__(self) -> Iterator[Turn]:
        while True:
            yield self.turn()

    def turn(self) -> Turn:
        """The next turn."""
        chance = self._random.random
        kind = _weighted(self._random, MIX)
        if kind in REFUSED_HEADS:
            return Turn((self._ask(kind),), Carriage.ONCE)
        if chance() < 0.03:
            kinds = [self._random.choice(PIPELINED) for _ in range(self._random.randint(2, 5))]
            abort = self._abort(Kind.CHAT_STREAM) if chance() < 0.15 else None
            if abort is not None and abort.when is When.IN_REQUEST:
                abort = None
            return Turn(tuple(self._ask(each) for each in kinds), Carriage.KEPT, Manner.PLAIN, abort)
        ask = self._ask(kind)
        carriage = _weighted(
            self._random,
            ((Carriage.KEPT, 70), (Carriage.ONCE, 22), (Carriage.HTTP_10, 5), (Carriage.HTTP_10_KEPT, 3)),
        )
        abort = self._abort(kind) if chance() < 0.12 else None
        return Turn((ask,), carriage, self._manner(kind, carriage, abort), abort)

    def calm(self) -> Turn:
        """A turn without any fault or unusual manner, to see that what was broken is whole again."""
        model = self._random.choice(("chat-large", "small"))
        ask = Ask(self._next(), Kind.CHAT, model, tokens=2)
        return Turn((ask,), Carriage.KEPT)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(self, kind: Kind) -> Ask:
        rng = self._random
        number = self._next()
        if kind in (Kind.MODELS, Kind.MODELS_HEAD, Kind.NOT_FOUND):
            return Ask(number, kind)
        if kind is Kind.MALFORMED:
            return Ask(number, kind, variant=rng.randrange(1 << 16))
        if kind is Kind.BULK:
            return Ask(number, kind, size=rng.randint(2 << 20, 3 << 20))
        if kind in UPLOADS:
            return Ask(number, kind, size=int(rng.expovariate(1 / 8192)))
        # Some sessions come again and again, others hardly ever.
        name = int(rng.paretovariate(0.6)) % SESSIONS if rng.random() < 0.5 else rng.randrange(SESSIONS)
        session = f"s{name}" if rng.random() < 0.6 else ""
        size = min(int(rng.expovariate(1 / 1500)), 100_000)
        if kind is Kind.LONG_STREAM:
            return Ask(number, kind, "small", session, rng.randint(4000, 12000), size)
        model = "nobody-has-this" if kind is Kind.UNKNOWN_MODEL else _weighted(rng, CHOSEN)
        # No fewer than the faults' `after`: one that strikes behind the last token has nothing to tear.
        tokens = 8 + min(int(rng.expovariate(1 / 35)), 200)
        fault = ""
        if rng.random() < 0.04 and kind not in (Kind.BAD_JSON, Kind.TOO_LARGE):
            fault = msgspec.json.encode(rng.choice(OWN_FAULTS)).decode()
        return Ask(number, kind, model, session, tokens, size, fault, rng.random() < 0.3)

    def _abort(self, kind: Kind) -> Abort:
        rng = self._random
        when = rng.choice(tuple(When))
        reset = rng.random() < 0.5
        if when is When.IN_REQUEST:
            return Abort(when, reset, part=rng.random())
        if when is When.SENT:
            return Abort(when, reset, after_s=rng.choice((0.0, rng.uniform(0, 0.03), rng.uniform(0, 1.0))))
        reach = 500_000 if kind in HEAVY else 8000 if kind in STREAMS else 300
        return Abort(when, reset, after_bytes=int(rng.uniform(0, reach)))

    def _manner(self, kind: Kind, carriage: Carriage, abort: Abort | None) -> Manner:
        chance = self._random.random()
        if abort is not None:
            return Manner.PLAIN
        if kind in HEAVY:
            return Manner.SLOW if chance < 0.4 else Manner.DEAF if chance < 0.55 else Manner.PLAIN
        if chance < 0.03 and kind is not Kind.MODELS_HEAD:
            return Manner.SLOW
        if chance < 0.06:
            return Manner.DRIBBLE
        http_10 = carriage in (Carriage.HTTP_10, Carriage.HTTP_10_KEPT)
        if chance < 0.10 and not http_10 and kind in (Kind.CHAT, Kind.CHAT_STREAM, Kind.ECHO, Kind.ECHO_CHUNKED):
            return Manner.CONTINUE
        return Manner.PLAIN


class What(StrEnum):
    """What befalls an engine."""

    FREEZE = "freeze"  # SIGSTOP: its port takes connections and nothing answers
    KILL = "kill"  # SIGKILL, and a new process on the same port
    SCRIPT = "script"  # a scripted fault in every answer


class Trouble(msgspec.Struct, frozen=True):
    """One fault of one engine (numbered from 0), seconds from the start."""

    at_s: float
    engine: int
    what: What
    for_s: float
    fault: Fault | None = None

    def __str__(self) -> str:
        name = f" {self.fault.kind.value}" if self.fault is not None else ""
        return f"{self.at_s:6.1f} s  engine-{self.engine + 1} {self.what.value}{name} for {self.for_s:.1f} s"


def troubles(seed: int, duration_s: float) -> list[Trouble]:
    """Faults in order of time, one at a time per engine, all over before `duration_s`."""
    rng = random.Random(f"troubles {seed}")
    free_at = [0.0] * ENGINES
    planned: list[Trouble] = []
    at = rng.uniform(1.0, 3.0)
    while True:
        what = _weighted(rng, ((What.FREEZE, 3), (What.KILL, 3), (What.SCRIPT, 4)))
        for_s = rng.uniform(0.5, 4.0)
        engine = rng.randrange(ENGINES)
        fault = rng.choice(ENGINE_FAULTS) if what is What.SCRIPT else None
        if at + for_s + 2.0 > duration_s:
            return planned
        if at >= free_at[engine]:
            planned.append(Trouble(round(at, 2), engine, what, round(for_s, 2), fault))
            # An engine that was killed takes a while to come up again.
            free_at[engine] = at + for_s + 3.0
        at += rng.uniform(1.5, 6.0)


class Reload(msgspec.Struct, frozen=True):
    """A policy that comes into force. `at_s` from the start; `hangup`: SIGHUP tells of it."""

    at_s: float
    variant: str
    hangup: bool

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s  policy {self.variant}{' and SIGHUP' if self.hangup else ''}"


def reloads(seed: int, duration_s: float, variants: tuple[str, ...]) -> list[Reload]:
    """Policies in order of time; none comes twice in a row, the first of `variants` is in force at the start."""
    rng = random.Random(f"reloads {seed}")
    planned: list[Reload] = []
    current = variants[0]
    at = rng.uniform(4.0, 8.0)
    while at + 4.0 < duration_s:
        current = rng.choice([each for each in variants if each != current])
        planned.append(Reload(round(at, 2), current, rng.random() < 0.5))
        # The watcher wants to read a change twice, a second apart.
        at += rng.uniform(5.0, 12.0)
    return planned


def _weighted(rng: random.Random, table: tuple[tuple[T, float], ...]) -> T:
    return rng.choices([each for each, _ in table], [weight for _, weight in table])[0]
