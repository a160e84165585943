"""Who is at the other end of a connection, as far as an address and what proxies leave on a request can tell.

`127.0.0.1` and `::1` are this machine; the rest of loopback is not: a mesh's proxy in the pod hands on what the world
asks from 127.0.0.6. What only the pod's own proxy may say is believed from all of it (`came_by_loopback`), since the
kernel takes none of its addresses from a network. What a URL names is another question: `policy.address`.
"""

from ipaddress import ip_address

FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-client-cert", "x-envoy-external-address", "via")
"""Headers that proxies leave on what they hand on."""

_THIS_MACHINE = frozenset({ip_address("127.0.0.1"), ip_address("::1")})


def is_this_machine(address: str) -> bool:
    """Whether an IP address, perhaps an IPv4 one in IPv6 form, is one that only this machine connects from."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return (mapped or ip) in _THIS_MACHINE


def came_by_loopback(peername: object, sockname: object) -> bool:
    """Whether a connection comes over loopback, all of it, or a unix socket, by its addresses as transports tell them.

    `sockname` tells of a unix socket, and not that there is no peer: a client that has reset its connection has no
    address any more either, and what it sent before can still be read.
    """
    if isinstance(sockname, str | bytes):
        return True
    address = peername[0] if isinstance(peername, tuple) and peername else ""
    # As inet_ntop writes them: no other form of the same address comes from a socket.
    return isinstance(address, str) and (address.startswith(_LOOPBACK) or address == "::1")


_LOOPBACK = ("127.", "::ffff:127.")
