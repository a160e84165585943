"""Who may change routing tables over the descriptor stream; reading is for everybody who reaches the port.

1. Where a token is set, writers bring it: `authorization: Bearer TOKEN`. Nothing stands in for it, and no certificate.
2. Where none is set, who has a certificate of `--control-tls-ca` writes; and so does this machine (`wire.peer`), unless
   a proxy handed the call on. So a port that was opened to a network without any lock can be read there, not written.
   Where orders have a place of their own (`--operators`) this machine does not: in a pod it is the engine, too, and a
   table goes to all sidecars.
3. A token's file is read whenever a token is brought: Kubernetes changes mounted secrets under a running process. While
   it cannot be read, or is empty, nobody writes.
"""

import asyncio
import hmac
from pathlib import Path

import msgspec

from sidecar.wire.peer import FORWARDED, is_this_machine

DENIED_NOT_LOCAL = (
    "only clients of this machine may change tables here: the sidecar has no token for writers"
    " (--control-token-file) and no authority for their certificates (--control-tls-ca)"
)

DENIED_NO_LOCK = (
    "nobody may change tables here: this machine gives its orders elsewhere (--operators), and the sidecar has no token"
    " for writers (--control-token-file) and no authority for their certificates (--control-tls-ca)"
)


class Caller(msgspec.Struct, frozen=True):
    """Who opened a stream. `address`: its IP address. `name`: of its certificate, which was verified; empty: it has
    none. `token`: what it brought, None: nothing. `proxied`: a proxy handed the call on."""

    address: str = ""
    name: str = ""
    token: str | None = None
    proxied: bool = False

    def says(self, words: str) -> str:
        """Who an update is by: what is proven first, then what it says of itself."""
        said = "".join(char for char in words[:_WORDS] if char.isprintable()).strip()
        proven = self.name or f"stream@{self.address}"
        return f"{proven} ({said})" if said else proven


_WORDS = 60  # of each: a record's `by` has room for 128 characters


class Writers:
    """The rule for one port. `token` empty and `token_file` None: none is set; `local`: then this machine writes."""

    def __init__(self, token: str, token_file: Path | None, local: bool = True) -> None:
        self._token = token
        self._file = token_file
        self._local = local

    async def check(self) -> None:
        """Whether there is what the settings name. OSError says what is wrong with it."""
        if self._file is not None and not await asyncio.to_thread(_read, self._file):
            raise OSError(f"{self._file} is empty: it is to hold the token of those who write")

    async def why_not(self, caller: Caller) -> str:
        """The reason to refuse an update, or ""."""
        if not self._token and self._file is None:
            if caller.name or (self._local and is_this_machine(caller.address) and not caller.proxied):
                return ""
            return DENIED_NOT_LOCAL if self._local else DENIED_NO_LOCK
        if caller.token is None:
            return "writers bring a token: authorization: Bearer TOKEN"
        token = self._token
        if self._file is not None:
            try:
                token = await asyncio.to_thread(_read, self._file)
            except OSError:
                token = ""
            if not token:
                return "the token's file cannot be read at the moment"
        if not hmac.compare_digest(token.encode(), caller.token.encode()):
            return "that is not the token"
        return ""


def caller(peer: str, name: str, metadata: list[tuple[str, str]]) -> Caller:
    """Who opened a stream, by gRPC's word for its peer (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`), the name in
    its certificate ("" if none was verified), and the call's metadata with names in lower case."""
    kind, _, rest = peer.partition(":")
    address = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").replace("%25", "%").strip("[]")
    words = [value for key, value in metadata if key == "authorization"]
    token = None
    if len(words) == 1:  # of two nobody can say which was meant
        scheme, _, given = words[0].partition(" ")
        if scheme.lower() == "bearer" and given.strip():
            token = given.strip()
    proxied = any(key in FORWARDED for key, _ in metadata)
    shown = "".join(char for char in name[:_WORDS] if char.isprintable()) or ("certificate" if name else "")
    return Caller(address if kind in ("ipv4", "ipv6") else "", shown, token, proxied)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()  # a secret's file likes to end with a line feed
