"""A server's URL, read: where it is and how to get in. Its text for people has no password.

Not redis-py's own reading: that knows no Sentinel, passes options that it does not know on to a constructor, and brings
the whole client along, which `sidecar --help` shall not load.

```
redis://[USER:PASSWORD@]HOST[:6379][/DB]        rediss:// the same over TLS; either may be any node of a cluster
unix://[USER:PASSWORD@]/PATH[?db=DB]
redis+sentinel://[USER:PASSWORD@]HOST[:26379][,HOST...]/MASTER[/DB]     rediss+sentinel:// the same over TLS
```

Options (`?name=value&...`): over TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (paths), `ssl_check_hostname` (yes
or no), `ssl_cert_reqs` (required or none); with Sentinel `sentinel_username`, `sentinel_password`; `db` everywhere.
"""

from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_TLS_PATHS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_YES_OR_NO: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


class Address(msgspec.Struct, frozen=True):
    """One server's socket: `path` of a unix socket, else host and port."""

    host: str = ""
    port: int = PORT
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Tls(msgspec.Struct, frozen=True):
    """Whom to trust and who we are; an empty path is the system's trust, or no certificate of ours."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    check_name: bool = True
    verify: bool = True


class Target(msgspec.Struct, frozen=True):
    """What a URL says. `master`: the name that sentinels at `addresses` are asked for; empty without them."""

    addresses: tuple[Address, ...]
    db: int = 0
    tls: Tls | None = None
    master: str = ""
    username: str = ""
    password: str = ""
    sentinel_username: str = ""
    sentinel_password: str = ""

    def __str__(self) -> str:
        if self.addresses[0].path:
            return str(self.addresses[0])
        scheme = ("rediss" if self.tls else "redis") + ("+sentinel" if self.master else "")
        end = f"/{self.master}" if self.master else ""
        return f"{scheme}://{','.join(str(address) for address in self.addresses)}{end}"

    __repr__ = __str__  # a password shall not come out in a traceback either

    def gives_away(self, text: str) -> bool:
        """Whether a text has a password in it."""
        return any(secret and secret in text for secret in (self.password, self.sentinel_password))


def parse_target(url: str) -> Target:
    """Read a URL. ValueError says what is wrong with it, without the password."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"a server's URL begins with one of {', '.join(name + '://' for name in _SCHEMES)}")
    try:
        parts = urlsplit(url)
    except ValueError:
        if "@" not in url:
            raise
        # Its own words may quote what stands before the host: the password.
        why = "it is no URL: in a password what is not ASCII, and : / ? # @ [ ], is written as %XX"
        raise ValueError(why) from None
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in options:
            raise ValueError(f"the option {name} is there twice")
        options[name] = value
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    path = unquote(parts.path)
    master = ""
    if scheme == "unix":
        if hosts or len(path) < 2:
            raise ValueError("a unix socket's URL is unix:///PATH")
        addresses: tuple[Address, ...] = (Address(path=path),)
        path = ""
    elif scheme.endswith("+sentinel"):
        addresses = tuple(_address(host, SENTINEL_PORT) for host in hosts.split(","))
        master, _, path = path.lstrip("/").partition("/")
        if not master:
            raise ValueError("sentinels are asked for a master: redis+sentinel://HOST,HOST/MASTER")
    else:
        addresses = (_address(hosts, PORT),)
        path = path.lstrip("/")
    target = Target(
        addresses=addresses,
        db=_db(options.pop("db", path)),
        tls=_tls(options) if scheme.startswith("rediss") else None,
        master=master,
        username=unquote(username),
        password=unquote(password),
        sentinel_username=options.pop("sentinel_username", "") if master else "",
        sentinel_password=options.pop("sentinel_password", "") if master else "",
    )
    if options:
        raise ValueError(f"{scheme}:// has no option {', '.join(sorted(options))}")
    return target


def _address(text: str, port: int) -> Address:
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed:
            raise ValueError("an IPv6 address is written [ADDRESS]:PORT")
        digits = rest.removeprefix(":")
    else:
        host, _, digits = text.partition(":")
    if not host:
        raise ValueError("the URL has no host")
    if digits and (not digits.isascii() or not digits.isdigit() or not 0 < int(digits) < 1 << 16):
        raise ValueError("a port is a number from 1 to 65535")
    return Address(unquote(host), int(digits) if digits else port)


def _db(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 5:
        raise ValueError("a database is a number")
    return int(text)


def _tls(options: dict[str, str]) -> Tls:
    ca, certificate, key = (options.pop(name, "") for name in _TLS_PATHS)
    check_name = options.pop("ssl_check_hostname", "yes").lower()
    if check_name not in _YES_OR_NO:
        raise ValueError("ssl_check_hostname is yes or no")
    verify = options.pop("ssl_cert_reqs", "required").lower()
    if verify not in ("required", "none"):
        raise ValueError("ssl_cert_reqs is required or none")
    return Tls(ca, certificate, key, _YES_OR_NO[check_name] and verify == "required", verify == "required")
