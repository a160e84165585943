"""Where an endpoint is: its URL taken apart, and the one name it goes by.

Our own reader and not `urlsplit` alone, which drops tabs and line feeds in silence and takes nearly anything for a
path. A path in an endpoint's URL is refused: requests keep their own path, so a `/v1` here would be ignored or doubled.
"""

import ipaddress
import re
from functools import lru_cache
from typing import Final, Literal

import msgspec

from sidecar.kernel.ids import EndpointKey

_URL = re.compile(r"(https?)://(\[[^\[\]/]*\]|[^\[\]/:@?#]*)(?::([^/?#@]*))?(.*)")
_DEFAULT_PORT = {"http": 80, "https": 443}

_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1?[1-9]?[0-9]|1[0-9]{2})"
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_IPV4 = re.compile(rf"{_BYTE}(\.{_BYTE}){{3}}")

URL_PATTERN = (
    r"^unix:///([^\u0000- \u007f]*[^\u0000-/\u007f])$"
    rf"|^https?://(\[[0-9A-Fa-f:.]+(%[0-9A-Za-z]+)?\]|{_BYTE}(\.{_BYTE}){{3}}|(?![0-9.]+(:|/|$)){_LABEL}(\.{_LABEL})*\.?)"
    rf"(:{_PORT})?/?$"
)
"""For the JSON Schema: what `parse_url` takes, but for the inside of IPv6 addresses and the lengths of names."""

KEPT: Final = 1 << 14
"""Keys that are remembered: of an endpoint it is asked at each change of its service's routes, and reading a URL takes
ten times as long."""

HOST_PORT_PATTERN = (
    r"^unix:///([^\x00- \x7f]*[^\x00-/\x7f])$"
    rf"|^https?://(\[[0-9A-Fa-f:.]+\]|{_BYTE}(\.{_BYTE}){{3}}|({_LABEL}\.)*[A-Za-z_]([A-Za-z0-9_-]{{0,61}}[A-Za-z0-9_])?\.?)"
    rf"(:{_PORT})?/?$"
)
"""The same for Kubernetes, whose patterns have no look-ahead: the last label of a name begins with a letter, then."""

# sun_path of Linux holds 108 bytes with its closing NUL.
UNIX_PATH_MAX_BYTES = 107


class Address(msgspec.Struct, frozen=True):
    """A socket to connect to. `path` is set for `unix` only; there `host` is empty and `port` 0.

    `host` is lower case and without the brackets of an IPv6 address.
    """

    scheme: Literal["http", "https", "unix"]
    host: str
    port: int
    path: str = ""

    @property
    def key(self) -> EndpointKey:
        """`host:port` (IPv6 in brackets), or the socket's path."""
        if self.scheme == "unix":
            return EndpointKey(self.path)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return EndpointKey(f"{host}:{self.port}")


def parse_url(url: str) -> Address:
    """`http://host[:port]`, `https://host[:port]` or `unix:///path`; ValueError says what is wrong with it."""
    if any(char <= " " or char == "\x7f" for char in url):
        raise ValueError("contains white space or control characters")
    if url.startswith("unix://"):
        return _unix(url.removeprefix("unix://"))
    scheme, host, port, rest = _web(url, "http://host:port, https://host:port, unix:///path")
    if rest not in ("", "/"):
        raise ValueError(
            f'has a path, query or fragment ("{rest[:40]}"): requests keep their own, write {scheme}://host:port'
        )
    return Address(scheme, host, port)


def parse_page(url: str) -> Address:
    """Where a page is that we get ourselves: `http://host[:port]/path` or https; ValueError says what is wrong."""
    if any(char <= " " or char == "\x7f" for char in url):
        raise ValueError("contains white space or control characters")
    scheme, host, port, rest = _web(url, "http://host/path, https://host/path")
    if "#" in rest:
        raise ValueError("has a fragment, which is not sent")
    return Address(scheme, host, port)


def _web(url: str, forms: str) -> tuple[Literal["http", "https"], str, int, str]:
    """Scheme, host, port and what follows; ValueError otherwise, with the `forms` that would do."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError("has user information, which is not sent: write http://host:port")
    form = _URL.fullmatch(url)
    if form is None:
        raise ValueError(f"is not one of {forms}")
    scheme, host, port, rest = form.groups()
    if rest and rest[0] not in "/?#":
        raise ValueError(f"is not one of {forms}")
    number = _DEFAULT_PORT[scheme] if port is None else parse_port(port)
    if number == 0:
        raise ValueError("has port 0, which nothing can connect to")
    return ("https" if scheme == "https" else "http"), parse_host(host), number, rest


def names_loopback(host: str) -> bool:
    """Whether a URL's host, lower case and without brackets, is loopback: `localhost`, 127.0.0.0/8, ::1, or one of
    these IPv4 addresses in IPv6's form. A zone is no part of what is asked.

    It is asked what somebody wrote, not who has connected: that is `wire.peer`'s to say.
    """
    if ":" in host:
        try:
            ip = ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            return False
        return (ip.ipv4_mapped or ip).is_loopback
    return host == "localhost" or (host.startswith("127.") and _IPV4.fullmatch(host) is not None)


def is_local(url: str) -> bool:
    """Whether it is in our own pod: loopback, or a unix socket. A bad URL is not; the check tells of it."""
    try:
        address = parse_url(url)
    except ValueError:
        return False
    return address.scheme == "unix" or names_loopback(address.host)


@lru_cache(KEPT)
def endpoint_key(url: str) -> EndpointKey:
    """What breakers, metrics and headers call the endpoint at `url`. ValueError as `parse_url`."""
    return parse_url(url).key


def parse_host(host: str) -> str:
    """A host name, IPv4 address or bracketed IPv6 address, in lower case without brackets; ValueError otherwise."""
    if host.startswith("["):
        form = re.fullmatch(r"\[([^%]*)(%[0-9A-Za-z._-]+)?\]", host)
        try:
            if form is not None:
                return str(ipaddress.IPv6Address(form[1])) + (form[2] or "")
        except ValueError:
            pass
        raise ValueError(f'has a host that is not an IPv6 address: "{host[:60]}"')
    if _IPV4.fullmatch(host) is not None:
        return host  # nearly all are: a table of 1,000 endpoints is read while requests wait
    if not host:
        raise ValueError("has no host")
    if len(host) > 253 or _HOST.fullmatch(host) is None:
        raise ValueError(f'has a host that is not a name or an address: "{host[:60]}"')
    if re.fullmatch(r"[0-9.]+", host):
        raise ValueError(f'has a host that is not an IPv4 address: "{host}"')
    return host.lower()


def parse_port(port: str) -> int:
    """A decimal port, 0-65535; ValueError otherwise. What 0 means is the caller's business."""
    if re.fullmatch(rf"0|{_PORT}", port) is None:
        raise ValueError(f'has a port that is not 1-65535: "{port[:20]}"')
    return int(port)


def _unix(path: str) -> Address:
    if not path.startswith("/"):
        raise ValueError("has a relative socket path: write unix:///absolute/path")
    if path.endswith("/"):
        raise ValueError("has a socket path that is a directory")
    if len(path.encode()) > UNIX_PATH_MAX_BYTES:
        raise ValueError(f"has a socket path of more than {UNIX_PATH_MAX_BYTES} bytes")
    return Address("unix", "", 0, path)
