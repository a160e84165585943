"""Who may change things: every kind of peer, and every kind of web page."""

import pytest

from sidecar.admin.operator import names_this_machine, why_not

HERE = "http://127.0.0.1:9401"
LOCAL = ("127.0.0.1", 40000)
REMOTE = ("10.0.0.7", 40000)


@pytest.mark.parametrize(
    ("peer", "unix", "allowed"),
    [
        pytest.param(LOCAL, False, True, id="loopback"),
        pytest.param(("::1", 40000, 0, 0), False, True, id="IPv6 loopback"),
        pytest.param(("::ffff:127.0.0.1", 40000, 0, 0), False, True, id="dual-stack socket"),
        pytest.param(("127.0.0.6", 40000), False, False, id="the mesh's proxy handing on"),
        pytest.param(("::ffff:127.0.0.6", 1, 0, 0), False, False, id="the mesh's proxy, dual-stack"),
        pytest.param(REMOTE, False, False, id="another machine"),
        pytest.param(("fe80::1%eth0", 1, 0, 2), False, False, id="neighbour"),
        pytest.param("", True, True, id="unix socket"),
        pytest.param("", False, False, id="no address, no unix socket"),
        pytest.param(None, False, False, id="unknown"),
        pytest.param((), False, False, id="empty"),
    ],
)
def test_only_this_machine_may(peer: object, unix: bool, allowed: bool) -> None:
    assert why_not(peer, unix, False, None, HERE) == ("" if allowed else "only from this machine")


@pytest.mark.parametrize(
    ("origin", "asked", "allowed"),
    [
        pytest.param(None, HERE, True, id="no browser"),
        pytest.param(None, "http://sidecar.example:9401", True, id="no browser, any name"),
        pytest.param(HERE, HERE, True, id="our own page"),
        pytest.param("http://localhost:9401", "http://localhost:9401", True, id="our own page by name"),
        pytest.param("http://[::1]:9401", "http://[::1]:9401", True, id="our own page by IPv6"),
        pytest.param("http://evil.example", HERE, False, id="another page"),
        pytest.param("http://127.0.0.1:8080", HERE, False, id="another port here"),
        pytest.param("https://127.0.0.1:9401", HERE, False, id="another scheme"),
        pytest.param("null", HERE, False, id="sandboxed page"),
        pytest.param("", HERE, False, id="empty"),
        pytest.param("http://evil.example:9401", "http://evil.example:9401", False, id="rebound name"),
        pytest.param("http://127.0.0.1.evil.example", "http://127.0.0.1.evil.example", False, id="number as a name"),
        pytest.param("http://[", "http://[", False, id="no address at all"),
        pytest.param("http://", "http://", False, id="no host"),
    ],
)
@pytest.mark.parametrize(("peer", "unix"), [(LOCAL, False), ("", True)], ids=["loopback", "unix"])
def test_no_foreign_page_may(peer: object, unix: bool, origin: str | None, asked: str, allowed: bool) -> None:
    assert why_not(peer, unix, False, origin, asked) == ("" if allowed else "not from a web page")


def test_remote_is_refused_whatever_it_claims() -> None:
    assert why_not(REMOTE, False, False, HERE, HERE) == "only from this machine"


@pytest.mark.parametrize(
    "url",
    ["http://localhost", "http://LOCALHOST:1", "http://127.0.0.1", "http://[::1]:9401", "http://[::ffff:127.0.0.1]:1"],
)
def test_names_of_this_machine(url: str) -> None:
    assert names_this_machine(url)


@pytest.mark.parametrize(("peer", "unix"), [(LOCAL, False), ("", True)], ids=["loopback", "unix"])
def test_what_a_proxy_handed_on_is_refused(peer: object, unix: bool) -> None:
    assert "not through a proxy" in why_not(peer, unix, True, None, HERE)
