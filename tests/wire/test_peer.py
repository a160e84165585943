import pytest

from sidecar.wire.peer import came_by_loopback, is_this_machine


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1"])
def test_this_machine(address: str) -> None:
    assert is_this_machine(address)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.6", "127.0.0.2", "10.0.0.1", "::2", "::ffff:10.0.0.1", "localhost", "", "127.0.0.1:80", "fe80::1%lo"],
)
def test_others(address: str) -> None:
    assert not is_this_machine(address)


@pytest.mark.parametrize(
    ("peername", "sockname"),
    [
        (("127.0.0.1", 5), ("127.0.0.1", 6)),
        (("127.0.0.6", 5), ("10.0.0.1", 6)),
        (("::1", 5, 0, 0), ("::1", 6, 0, 0)),
        (("::ffff:127.0.0.1", 5, 0, 0), ("::ffff:10.0.0.1", 6, 0, 0)),
        ("", "/run/sidecar.sock"),
        (None, "/run/sidecar.sock"),
        ("", b"\0abstract"),
    ],
)
def test_over_loopback(peername: object, sockname: object) -> None:
    assert came_by_loopback(peername, sockname)


@pytest.mark.parametrize(
    ("peername", "sockname"),
    [
        (("10.0.0.1", 5), ("127.0.0.1", 6)),
        (("::2", 5, 0, 0), ("::1", 6, 0, 0)),
        (("::6", 5, 0, 0), ("::1", 6, 0, 0)),
        (("::10", 5, 0, 0), ("::1", 6, 0, 0)),
        (("::ffff:10.127.0.1", 5, 0, 0), ("::1", 6, 0, 0)),
        (("1127.0.0.1", 5), ("10.0.0.1", 6)),
        # Who reset the connection before it was accepted has no address, and is no unix socket for that.
        (None, ("10.0.0.1", 6)),
        (None, None),
        ((), ("10.0.0.1", 6)),
        ((7,), ("10.0.0.1", 6)),
    ],
)
def test_from_elsewhere(peername: object, sockname: object) -> None:
    assert not came_by_loopback(peername, sockname)
