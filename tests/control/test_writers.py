from pathlib import Path

import pytest

from sidecar.control.writers import DENIED_NO_LOCK, DENIED_NOT_LOCAL, Caller, Writers, caller

LOCAL = Caller("127.0.0.1")
REMOTE = Caller("10.0.0.9")


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[::1]:4711", "::1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::1%eth0"),
        ("unix:/run/a.sock", ""),
        ("unix:127.0.0.1:1", ""),
        ("", ""),
    ],
)
def test_the_address_of_a_peer(peer: str, address: str) -> None:
    assert caller(peer, "", []).address == address


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        pytest.param([], None, id="none"),
        pytest.param([("authorization", "Bearer secret")], "secret", id="bearer"),
        pytest.param([("authorization", "bearer  secret ")], "secret", id="spaces"),
        pytest.param([("authorization", "Basic secret")], None, id="another scheme"),
        pytest.param([("authorization", "secret")], None, id="no scheme"),
        pytest.param([("authorization", "Bearer ")], None, id="nothing after it"),
        pytest.param([("authorization", "Bearer a"), ("authorization", "Bearer b")], None, id="two"),
        pytest.param([("x-authorization", "Bearer secret")], None, id="another name"),
    ],
)
def test_the_token_that_a_call_brings(metadata: list[tuple[str, str]], token: str | None) -> None:
    assert caller("ipv4:1.2.3.4:5", "", metadata).token == token


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "x-envoy-external-address", "via"])
async def test_what_a_proxy_handed_on_is_not_this_machine_s(name: str) -> None:
    who = caller("ipv4:127.0.0.1:5", "", [(name, "10.0.0.1")])
    assert who.proxied
    assert await Writers("", None).why_not(who) == DENIED_NOT_LOCAL


@pytest.mark.parametrize(
    ("who", "may"),
    [
        pytest.param(LOCAL, True, id="this machine"),
        pytest.param(Caller("::1"), True, id="this machine by IPv6"),
        pytest.param(Caller("127.0.0.6"), False, id="a mesh's proxy"),
        pytest.param(REMOTE, False, id="another machine"),
        pytest.param(Caller(""), False, id="nobody knows"),
        pytest.param(Caller("10.0.0.9", name="ci"), True, id="a certificate"),
        pytest.param(Caller("10.0.0.9", name="ci", proxied=True), True, id="a certificate through a proxy"),
        pytest.param(Caller("10.0.0.9", token="secret"), False, id="a token where none is set"),
    ],
)
async def test_without_a_token_this_machine_writes_and_who_has_a_certificate(who: Caller, may: bool) -> None:
    assert (await Writers("", None).why_not(who) == "") is may


@pytest.mark.parametrize(
    ("who", "words"),
    [
        pytest.param(Caller("10.0.0.9", token="secret"), "", id="the token"),
        pytest.param(Caller("10.0.0.9", token="Secret"), "not the token", id="another"),
        pytest.param(Caller("10.0.0.9", token="secret "), "not the token", id="longer"),
        pytest.param(Caller("10.0.0.9", token="sécret"), "not the token", id="not ASCII"),
        pytest.param(LOCAL, "bring a token", id="none, from this machine"),
        pytest.param(Caller("10.0.0.9", name="ci"), "bring a token", id="none, with a certificate"),
    ],
)
@pytest.mark.parametrize("by", ["word", "file"])
async def test_where_a_token_is_set_nothing_stands_in_for_it(who: Caller, words: str, by: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    writers = Writers("secret", None) if by == "word" else Writers("", path)
    await writers.check()
    said = await writers.why_not(who)
    assert (words in said) if words else said == ""


async def test_a_changed_file_counts_at_once_and_a_lost_one_stops_all(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    writers = Writers("", path)
    old, new = Caller("10.0.0.9", token="old"), Caller("10.0.0.9", token="new")
    assert await writers.why_not(old) == ""
    path.write_text("new\n")
    assert (await writers.why_not(old), await writers.why_not(new)) == ("that is not the token", "")
    path.write_text("")
    for _ in range(2):
        assert await writers.why_not(Caller(token="")) != ""
        assert "cannot be read" in await writers.why_not(new)
        path.unlink(missing_ok=True)


async def test_a_file_without_a_token_is_told_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(OSError, match="token"):
        await Writers("", path).check()
    path.write_text(" \n")
    with pytest.raises(OSError, match="is empty"):
        await Writers("", path).check()


def test_who_an_update_is_by_begins_with_what_is_proven() -> None:
    assert LOCAL.says("") == "stream@127.0.0.1"
    assert LOCAL.says("argo/chat") == "stream@127.0.0.1 (argo/chat)"
    assert caller("ipv4:1.2.3.4:5", "ci.example", []).says("argo") == "ci.example (argo)"
    assert caller("ipv4:1.2.3.4:5", "\n", []).says("") == "certificate"
    assert LOCAL.says("a\x1b[31m\n" + "b" * 300) == "stream@127.0.0.1 (a[31m" + "b" * 53 + ")"
    assert len(caller("ipv6:%5B::1%5D:5", "c" * 300, []).says("d" * 300)) <= 128


@pytest.mark.parametrize(
    ("who", "may"),
    [
        pytest.param(LOCAL, False, id="this machine, which is the engine's as well"),
        pytest.param(Caller("10.0.0.9", name="ci"), True, id="a certificate"),
    ],
)
async def test_where_orders_have_their_own_place_this_machine_writes_no_tables(who: Caller, may: bool) -> None:
    assert await Writers("", None, local=False).why_not(who) == ("" if may else DENIED_NO_LOCK)
