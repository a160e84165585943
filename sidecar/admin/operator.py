"""Who may change things over the admin port: somebody on this machine who is no web page.

1. The peer's address decides; no header can vouch for it. A unix socket is this machine, and so are 127.0.0.1 and ::1;
   the rest of loopback is not: a mesh's proxy in the pod hands the world's requests on from 127.0.0.6. What any proxy
   has forwarded is refused, too.
2. A browser on this machine sends whatever page it has open: a request with an `Origin` is obeyed only if it names the
   very address that it was sent to, and that is this machine's by number or as `localhost`. Any other name may have
   been pointed here by its owner (DNS rebinding).
"""

from urllib.parse import urlsplit

from sidecar.policy.address import names_loopback
from sidecar.wire.peer import FORWARDED as FORWARDED
from sidecar.wire.peer import is_this_machine


def why_not(peer: object, unix: bool, forwarded: bool, origin: str | None, asked: str) -> str:
    """The reason to refuse a change, or "".

    `peer` is the transport's `peername`, `forwarded` whether a header says that a proxy handed the request on, `asked`
    the scheme and host that it was sent to (`http://127.0.0.1:9401`).
    """
    if not unix and not (isinstance(peer, tuple) and peer and is_this_machine(str(peer[0]))):
        return "only from this machine"
    if forwarded:
        return "only from this machine, and not through a proxy"
    if origin is not None and not (origin == asked and names_this_machine(asked)):
        return "not from a web page"
    return ""


def names_this_machine(url: str) -> bool:
    """Whether a URL's host is `localhost` or a loopback address."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return names_loopback(host)
