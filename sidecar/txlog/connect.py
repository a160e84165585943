"""Connections to the log's servers, and what their errors mean.

On redis-py's connections and not on its clients: those retry, keep pools per event loop and parse every reply by the
command's name, which costs more than the commands of ours do. A connection here sends raw commands and reads raw
replies; signing in, TLS and the protocol stay redis-py's and hiredis's business.

1. Every error becomes a `StoreDown` with a word of a bounded set; one that a person must mend becomes `StoreUnfit` and
   says how. A password is in none of them: what is shown is the address.
2. Whatever goes wrong while a reply is awaited closes the connection, a cancellation too: a late reply must not be
   taken for the next one.
3. Nothing is tried again here.
"""

import socket
import ssl
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

import hiredis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from sidecar.txlog.functions import Command
from sidecar.txlog.store import StoreDown, StoreUnfit
from sidecar.txlog.target import Address, Target, Tls

WORDS: Final = frozenset(
    {
        "timeout",
        "refused",
        "reset",
        "unresolved",
        "readonly",
        "oom",
        "loading",
        "misconf",
        "busy",
        "masterdown",
        "clusterdown",
        "moved",
        "crowded",
        "server",
        "noauth",
        "noperm",
        "tls",
        "protocol",
        "version",
        "foreign",
    }
)
"""Every `StoreDown.word` of a server. The last six are a person's to mend."""

_BY_CODE: Final = {
    "READONLY": "readonly",
    "OOM": "oom",
    "LOADING": "loading",
    "MISCONF": "misconf",
    "NOREPLICAS": "misconf",
    "BUSY": "busy",
    "MASTERDOWN": "masterdown",
    "CLUSTERDOWN": "clusterdown",
    "MOVED": "moved",
    "ASK": "moved",
    "TRYAGAIN": "moved",
    "UNBLOCKED": "reset",
}
"""Server errors by their first word. Redis 6.2 puts what a script met into the middle of another error's text."""

_GRANT: Final = "~{PREFIX:* +@read +@write +@scripting +@connection +info +time +cluster +asking"
"""What a user needs, who is not the default one: what a function does is judged by its caller's rights."""

_FORBIDDEN: Final = ("NOPERM", "ACL failure in script", "user executing the script")
"""How servers say, in the midst of another error, that a script's caller may not do what the script does."""

# hiredis's own annotation says a tuple of one.
_pack: Final = cast(Callable[[Command], bytes], hiredis.pack_command)


class Link:
    """One connection, of one caller at a time: `send`, then `receive` as many replies as were asked for."""

    __slots__ = ("_connection", "address")

    def __init__(self, connection: Connection | UnixDomainSocketConnection, address: Address) -> None:
        self._connection = connection
        self.address = address

    async def connect(self) -> None:
        """Connect and sign in, if that is not done yet."""
        if not self._connection.is_connected:
            await self._connection.connect()  # type: ignore[no-untyped-call]

    async def is_usable(self) -> bool:
        """Whether a link that lay idle may be used: the server has not closed it, and owes no reply."""
        stream = self._connection._reader
        if stream is None or stream.exception() is not None:
            return False  # a reset is no end of the stream, which is all that `can_read` sees
        try:
            return not await self._connection.can_read()
        except (RedisError, OSError):
            return False

    async def send(self, commands: Sequence[Command]) -> None:
        """All commands in one piece."""
        data = b"".join([_pack(command) for command in commands])
        await self._connection.send_packed_command(data, check_health=False)

    async def receive(self, count: int) -> list[Any]:
        """That many replies; a server's refusal of one command is in its place, as the exception."""
        read = self._connection.read_response
        replies: list[Any] = []
        for _ in range(count):
            try:
                replies.append(await read(disable_decoding=True))
            except ResponseError as exc:
                replies.append(exc)
        return replies

    async def ask(self, *commands: Command) -> list[Any]:
        """Send and receive."""
        await self.send(commands)
        return await self.receive(len(commands))

    async def drop(self) -> None:
        """Close; nothing is raised and nothing awaited."""
        await self._connection.disconnect(nowait=True)


def link_to(address: Address, target: Target, *, sentinel: bool = False, known_as: Address | None = None) -> Link:
    """A link to a server of the target's, not connected yet; to one of its sentinels if asked for.

    It has no deadline of its own: who waits for it has one.

    `known_as`: the address that the link is kept under, if that is not the server's own.
    """
    name = known_as or address
    known: dict[str, Any] = {
        "username": (target.sentinel_username if sentinel else target.username) or None,
        "password": (target.sentinel_password if sentinel else target.password) or None,
        "db": 0 if sentinel else target.db,
        "protocol": 2,
        "driver_info": None,
        "socket_timeout": None,
        "socket_connect_timeout": None,
    }
    if address.path:
        return Link(UnixDomainSocketConnection(path=address.path, **known), name)
    known |= {"host": address.host, "port": address.port}
    if target.tls is None:
        return Link(Connection(**known), name)
    secured = SSLConnection(**known)
    secured.ssl_context.context = _context(target.tls)
    return Link(secured, name)


def _context(tls: Tls) -> ssl.SSLContext:
    """What redis-py would build for each connection anew, which takes the loop milliseconds; rotated files are read."""
    try:
        stamp = tuple(Path(path).stat().st_mtime_ns for path in (tls.ca, tls.certificate, tls.key) if path)
        return _build_context(tls, stamp)
    except OSError as exc:  # an ssl.SSLError is one, too
        raise StoreUnfit("tls", f"the files for TLS cannot be used ({exc}): see ssl_ca_certs, ssl_certfile") from exc


@lru_cache(maxsize=8)
def _build_context(tls: Tls, stamp: tuple[int, ...]) -> ssl.SSLContext:
    del stamp  # files that changed are other files
    context = ssl.create_default_context(cafile=tls.ca or None)
    if tls.certificate:
        context.load_cert_chain(tls.certificate, tls.key or None)
    context.check_hostname = tls.check_name
    context.verify_mode = ssl.CERT_REQUIRED if tls.verify else ssl.CERT_NONE
    return context


def down(exc: BaseException, where: object) -> StoreDown:
    """What an error of the client or of a socket means. `where` is shown and has no password."""
    if isinstance(exc, StoreDown):
        return exc
    if isinstance(exc.__cause__, RedisError):
        exc = exc.__cause__  # a unix socket's connection signs in while it connects, and wraps what came of it
    if isinstance(exc, TimeoutError):
        return StoreDown("timeout", f"{where} did not answer in time")
    if isinstance(exc, AuthenticationError | AuthorizationError):
        return StoreUnfit(
            "noauth", f"{where} refuses the user or the password ({exc}): set them in the URL, USER:PASSWORD@HOST"
        )
    if isinstance(exc, NoPermissionError):
        return _not_permitted(exc, where)
    if isinstance(exc, BusyLoadingError):
        return StoreDown("loading", f"{where} is loading its data")
    if isinstance(exc, InvalidResponse | hiredis.ProtocolError):
        return StoreUnfit("protocol", f"{where} does not speak Redis's protocol: is the address right?")
    if isinstance(exc, ResponseError):
        return _refused(exc, where)
    return _broken(exc, where)


def _not_permitted(exc: ResponseError, where: object) -> StoreUnfit:
    return StoreUnfit("noperm", f"{where} does not permit it ({exc}): grant the user {_GRANT}")


def _refused(exc: ResponseError, where: object) -> StoreDown:
    text = str(exc)
    code = exc.status_code or text.partition(" ")[0]
    if any(words in text for words in _FORBIDDEN):
        return _not_permitted(exc, where)
    if code == "WRONGTYPE" or "WRONGTYPE" in text:
        return StoreUnfit("foreign", f"{where} has another program's keys under this prefix: set another prefix")
    word = _BY_CODE.get(code)
    if word is None:
        word = next((word for code, word in _BY_CODE.items() if f"-{code} " in text), "server")
    return StoreDown(word, f"{where} refused: {text}")


def _broken(exc: BaseException, where: object) -> StoreDown:
    """A connection that failed. redis-py keeps the socket's own error as the context of its own."""
    text = str(exc)
    if "max number of clients" in text:
        return StoreDown("crowded", f"{where} has too many clients")
    cause: BaseException | None = exc
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    match cause:
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return StoreDown("reset", f"{where} closed the connection")
        case ssl.SSLError():
            return StoreUnfit("tls", f"{where}: TLS failed ({_reason(cause)}): see ssl_ca_certs, rediss:// or redis://")
        case socket.gaierror():
            return StoreDown("unresolved", f"{where}: the name has no address ({cause.strerror})")
        case PermissionError():
            return StoreUnfit("noperm", f"{where}: no permission to open the socket")
        case ConnectionRefusedError() | FileNotFoundError():
            return StoreDown("refused", f"{where} refuses connections")
        case None if not isinstance(exc, ConnectionError):
            return StoreDown("server", f"{where}: {type(exc).__name__}")
        case _:
            return StoreDown("reset", f"{where} closed the connection")


def _reason(exc: ssl.SSLError) -> str:
    verify: str = getattr(exc, "verify_message", "")
    return verify or str(exc)
