"""Where one provider's keys come from, a file or a URL, and when they are read again.

1. They are read every `refresh`, a file every second if it changed on disk; and at once when a token names a key that
   they do not have, which is how a rotation is noticed, but at most once in `ASK_AGAIN_S` for all requests: whoever
   makes up names of keys must not have us ask for each.
2. What cannot be read, or is no set of keys, leaves the last good set in force for `stale`. A set without any key that
   can be used is such a fault, too: no provider takes all its keys back, and many have served an empty page. After
   `stale` there are no keys: those that may have been taken back long ago verify nothing.
3. After a failure it is tried again soon, then ever later, each wait shortened by chance, so that a provider that comes
   back is not met by its whole fleet at once.
4. A redirect is not followed, and no more than `MAX_SET_BYTES` are taken: what is configured is where keys are.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from sidecar.adapters.errand import Answer, Request
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.address import parse_page
from sidecar.policy.schema import Endpoint, JwtProvider
from sidecar.proxy.watchdog import Timers

if TYPE_CHECKING:
    from sidecar.jwt.keys import Keys

FETCH_S: Final = 5.0
"""For the whole answer of a provider, its connection included."""

POLL_S: Final = 1.0
"""Between two looks at a file, as at policies."""

READ_ANYWAY: Final = 10
"""Of a file every so many looks: it can change twice within one tick of its clock."""

ASK_AGAIN_S: Final = 10.0
"""Between two readings that unknown keys cause."""

FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
"""Between attempts that fail; while there are no keys at all, `LAST_BARE_RETRY_S`."""
LAST_BARE_RETRY_S: Final = 5.0

MAX_SET_BYTES: Final = 1 << 20

JITTER: Final = 0.2

_Marks = tuple[int, int, int, int]


class Ask(Protocol):
    """`upstream.ask.ask` over the relay's connections: one request to an endpoint, and its whole answer."""

    def __call__(
        self, key: EndpointKey, endpoint: Endpoint, request: Request, timeout_s: float
    ) -> Awaitable[Answer]: ...


class Unread(Exception):
    """Keys could not be read; its text says why, for operators."""


class Source:
    """One provider's keys. Methods are the loop's; `look` may be called on any thread, but not twice at once.

    `keys` None: there are none, not yet or not any more. `fetches`, `failures`: attempts and those of them that failed;
    `read_at`: when the last good set came, `stale_since`: when the first attempt after it failed; -1.0: never, not.
    """

    __slots__ = (
        "_asked",
        "_looks",
        "_marks",
        "_reading",
        "_text",
        "asked_at",
        "due",
        "failed_in_a_row",
        "failures",
        "fetches",
        "keys",
        "provider",
        "read_at",
        "stale_since",
        "why",
    )

    def __init__(self, provider: JwtProvider) -> None:
        self.provider = provider
        self.keys: Keys | None = None
        self.read_at = -1.0
        self.stale_since = -1.0
        self.asked_at = -1.0  # when a token with an unknown key last caused a reading
        self.due = 0.0
        self._reading = False
        self.fetches = 0
        self.failures = 0
        self.failed_in_a_row = 0
        self.why = ""
        self._asked = asyncio.Event()
        self._marks: _Marks | None = None
        self._looks = 0
        self._text = b""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What makes it another source: keys of one that stays need not be read again when its rules change."""
        provider = self.provider
        return provider.issuer, provider.jwks_file, provider.jwks_url, provider.tls_ca

    @property
    def reading(self) -> bool:
        """Whether keys are being read, or are about to be."""
        return self._reading or self._asked.is_set()

    def ask(self, now: float) -> bool:
        """A token names a key that is not there. Whether it is worth waiting: a reading is under way, or begins."""
        if not self.reading:
            if self.keys is not None and self.asked_at >= 0.0 and now < self.asked_at + ASK_AGAIN_S:
                return False
            if self.failed_in_a_row and now < self.due:
                return False  # it was just tried, and will be again
            self.asked_at = now
            self._asked.set()
        return True

    def retry_after_s(self, now: float) -> float:
        """When asking again may find keys."""
        return max(1.0, self.due - now)

    async def wait(self, timers: Timers) -> None:
        """Until it is to be read again."""
        if self.due <= timers.time():
            return
        timer = timers.call_at(self.due, self._asked.set)
        try:
            await self._asked.wait()
        finally:
            timer.cancel()

    async def read(self, ask: Ask, now: Callable[[], float], chance: Callable[[], float]) -> bool:
        """One reading; whether there are other keys now. Never raises; cancelled, it leaves all as it was."""
        self._reading = True
        self._asked.clear()
        try:
            keys = await self._read(ask)
        except Unread as exc:
            return self._failed(str(exc), now(), chance())
        finally:
            self._reading = False
        return self._took(keys, now(), chance())

    def look(self) -> "Keys | None":
        """The keys in the file if it changed since the last look; None: it did not. Raises `Unread`."""
        path = Path(self.provider.jwks_file)
        try:
            stat = path.stat()
            marks = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            self._looks += 1
            if marks == self._marks and self._looks % READ_ANYWAY:
                return None
            if not path.is_file():
                raise Unread(f"{path} is not a file")  # a pipe or a device could keep us reading for ever
            with path.open("rb") as file:
                text = file.read(MAX_SET_BYTES + 1)
        except OSError as exc:
            raise Unread(f"{path}: {exc.strerror or exc}") from exc
        if text == self._text:
            self._marks = marks
            return None
        keys = _keys_in(text, str(path))
        self._marks, self._text = marks, text
        return keys

    def take(self, keys: "Keys | None", now: float, chance: float) -> bool:
        """What `look` gave, where it was called by others; whether there are other keys now."""
        return self._took(keys, now, chance)

    def fail(self, why: str, now: float, chance: float) -> bool:
        """That `look` raised, where it was called by others; whether there are other keys now."""
        return self._failed(why, now, chance)

    async def _read(self, ask: Ask) -> "Keys | None":
        self.fetches += 1
        if self.provider.jwks_file:
            return await asyncio.to_thread(self.look)
        url = self.provider.jwks_url
        endpoint, request = _request(url, self.provider.tls_ca)
        key = EndpointKey(endpoint.url.partition("://")[2])
        answer = await ask(key, endpoint, request, FETCH_S)
        if answer.status != 200:
            raise Unread(f"{url}: " + (f"answered {answer.status}" if answer.status else answer.detail))
        return await asyncio.to_thread(_keys_in, answer.body, url)

    def _took(self, keys: "Keys | None", now: float, chance: float) -> bool:
        """`keys` None: they are what they were."""
        self.read_at = now
        self.stale_since = -1.0
        self.failed_in_a_row = 0
        self.why = ""
        wait_s = POLL_S if self.provider.jwks_file else float(self.provider.refresh_s)
        self.due = now + wait_s * (1.0 - JITTER * chance)
        if keys is None:
            return False
        before, self.keys = self.keys, keys
        return before is None or before.marks != keys.marks

    def _failed(self, why: str, now: float, chance: float) -> bool:
        self.failures += 1
        self.failed_in_a_row += 1
        self.why = why
        if self.stale_since < 0.0:
            self.stale_since = now
        if self.provider.jwks_file:
            wait_s = POLL_S
        else:
            last = LAST_RETRY_S if self.keys is not None else LAST_BARE_RETRY_S
            wait_s = min(last, FIRST_RETRY_S * 2.0 ** min(10, self.failed_in_a_row - 1))
        self.due = now + wait_s * (1.0 - JITTER * chance)
        if self.keys is None:
            return False
        over = self.read_at + self.provider.stale_s
        if now < over:
            self.due = min(self.due, over)
            return False
        self.keys = None
        self._marks, self._text = None, b""
        return True


def _keys_in(text: bytes, where: str) -> "Keys":
    # Imported where a policy has providers: most have none, and cryptography takes a while.
    from sidecar.jwt.keys import BadKeys, read_keys

    if len(text) > MAX_SET_BYTES:
        raise Unread(f"{where}: exceeds {MAX_SET_BYTES} bytes")
    try:
        return read_keys(text)
    except BadKeys as exc:
        raise Unread(f"{where}: {exc}") from exc


def _request(url: str, tls_ca: str) -> tuple[Endpoint, Request]:
    """A page's address taken apart. Port 80 and 443 are left out: some name their host without it and know no other."""
    address = parse_page(url)
    host = f"[{address.host}]" if ":" in address.host else address.host
    usual = 443 if address.scheme == "https" else 80
    origin = f"{address.scheme}://{host}" + ("" if address.port == usual else f":{address.port}")
    after = url.partition("://")[2]
    at = min((place for mark in "/?" if (place := after.find(mark)) >= 0), default=len(after))
    target = after[at:]
    if not target.startswith("/"):
        target = "/" + target
    return Endpoint(url=origin, tls_ca=tls_ca), Request(b"GET", target.encode())
