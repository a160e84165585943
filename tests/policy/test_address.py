import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policy.address import (
    UNIX_PATH_MAX_BYTES,
    URL_PATTERN,
    Address,
    endpoint_key,
    is_local,
    names_loopback,
    parse_page,
    parse_url,
)

GOOD = {
    "http://127.0.0.1:8000": ("http", "127.0.0.1", 8000, "127.0.0.1:8000"),
    "http://127.0.0.1:8000/": ("http", "127.0.0.1", 8000, "127.0.0.1:8000"),
    "http://localhost": ("http", "localhost", 80, "localhost:80"),
    "https://engine.example.com": ("https", "engine.example.com", 443, "engine.example.com:443"),
    "https://Engine-0.ENGINES.svc:8443": ("https", "engine-0.engines.svc", 8443, "engine-0.engines.svc:8443"),
    "http://vllm_0.example.com.:1": ("http", "vllm_0.example.com.", 1, "vllm_0.example.com.:1"),
    "http://[::1]:8000": ("http", "::1", 8000, "[::1]:8000"),
    "http://[2001:DB8:0::1]": ("http", "2001:db8::1", 80, "[2001:db8::1]:80"),
    "http://[fe80::1%eth0]:65535": ("http", "fe80::1%eth0", 65535, "[fe80::1%eth0]:65535"),
    "http://10.0.0.1.nip.io": ("http", "10.0.0.1.nip.io", 80, "10.0.0.1.nip.io:80"),
}
BAD = {
    "": "is not one of",
    "127.0.0.1:8000": "is not one of",
    "ftp://a": "is not one of",
    "HTTP://a": "is not one of",
    "http:/a": "is not one of",
    "http://": "no host",
    "http://:8000": "no host",
    "http://a:": "port",
    "http://a:0": "port 0",
    "http://a:080": "port",
    "http://a:65536": "port",
    "http://a:-1": "port",
    "http://a:+1": "port",
    "http://a:\u0661": "port",
    "http://a/v1": "path",
    "http://a//": "path",
    "http://a?x": "path",
    "http://a#x": "path",
    "http://u:p@a": "user information",
    "http://u@a": "user information",
    "http://a b": "white space",
    "http://a\tb": "white space",
    "http://a\n": "white space",
    "http://a\x00": "white space",
    "http://\x7f": "white space",
    "http://a..b": "not a name",
    "http://-a": "not a name",
    "http://a-": "not a name",
    "http://ä.de": "not a name",
    "http://a\\b": "not a name",
    "http://%61": "not a name",
    "http://" + "a" * 64: "not a name",
    "http://" + ".".join(["a" * 50] * 6): "not a name",
    "http://1.2.3": "IPv4",
    "http://1.2.3.256": "IPv4",
    "http://1.2.3.04": "IPv4",
    "http://2130706433": "IPv4",
    "http://[::1": "not one of|host",
    "http://[]": "IPv6",
    "http://[1.2.3.4]": "IPv6",
    "http://[::g]": "IPv6",
    "http://[::1]x": "path",
    "http://[fe80::1%]": "IPv6",
    "http://[fe80::1%'a]": "IPv6",
    "unix:/run/a.sock": "is not one of",
    "unix://run/a.sock": "relative",
    "unix://": "relative",
    "unix:///": "directory",
    "unix:///run/": "directory",
    "unix:///" + "a" * UNIX_PATH_MAX_BYTES: "more than 107 bytes",
}
# Lengths, and the inside of an IPv6 address: the pattern leaves them to the parser.
ONLY_THE_PARSER_KNOWS = {
    "http://[1.2.3.4]",
    "http://" + ".".join(["a" * 50] * 6),
    "unix:///" + "a" * UNIX_PATH_MAX_BYTES,
}


@pytest.mark.parametrize(("url", "parts"), GOOD.items())
def test_a_url_is_taken_apart_and_named(url: str, parts: tuple[str, str, int, str]) -> None:
    address = parse_url(url)
    assert (address.scheme, address.host, address.port, endpoint_key(url)) == parts
    assert re.search(URL_PATTERN, url)


@pytest.mark.parametrize(
    ("url", "path"),
    [("unix:///run/vllm.sock", "/run/vllm.sock"), ("unix:///" + "a" * 106, "/" + "a" * 106), ("unix:///é", "/é")],
)
def test_a_socket_is_named_by_its_path(url: str, path: str) -> None:
    assert parse_url(url) == Address("unix", "", 0, path)
    assert endpoint_key(url) == path
    assert re.search(URL_PATTERN, url)


@pytest.mark.parametrize(("url", "why"), BAD.items())
def test_a_url_that_nothing_can_connect_to_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_url(url)
    assert re.fullmatch(URL_PATTERN, url) is None or url in ONLY_THE_PARSER_KNOWS


@given(st.text() | st.text(alphabet="htps:/[]@?#.-_%0123456789abx \t\n", max_size=30).map("http://".__add__))
def test_any_text_is_an_address_or_a_value_error(url: str) -> None:
    try:
        address = parse_url(url)
    except ValueError:
        return
    assert parse_url(_url(address)) == address


@given(st.from_regex(r"https?://[0-9a-f.]{1,12}(:[0-9]{1,6})?/?", fullmatch=True))
def test_the_pattern_of_the_json_schema_says_what_the_parser_says(url: str) -> None:
    try:
        parse_url(url)
        good = True
    except ValueError:
        good = False
    assert (re.fullmatch(URL_PATTERN, url) is not None) == good


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://login.example.com/.well-known/jwks.json", "login.example.com:443"),
        ("http://127.0.0.1:8080/keys?v=1", "127.0.0.1:8080"),
        ("http://[::1]?v=1", "[::1]:80"),
        ("https://A", "a:443"),
    ],
)
def test_a_page_may_have_a_path_and_a_query(url: str, key: str) -> None:
    assert parse_page(url).key == key


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("/keys", "is not one of http://host/path, https://host/path"),
        ("unix:///run/keys", "is not one of"),
        ("ftp://a/keys", "is not one of"),
        ("https://[::1]keys", "is not one of"),
        ("https://a/keys#first", "has a fragment"),
        ("https://a/ke ys", "contains white space"),
        ("https://a/keys\n", "contains white space"),
        ("https://me:pw@a/keys", "has user information"),
        ("https:///keys", "has no host"),
        ("https://a:0/keys", "has port 0"),
        ("https://a:99999/keys", "has a port"),
    ],
)
def test_a_page_that_cannot_be_got_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_page(url)


@given(st.text() | st.text(alphabet="htps:/[]@?#.-_%0123456789abx \t\n", max_size=30).map("http://".__add__))
def test_any_text_is_a_page_or_a_value_error(url: str) -> None:
    try:
        address = parse_page(url)
    except ValueError:
        return
    assert address.scheme in ("http", "https") and address.host and 0 < address.port < 65536 and not address.path


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://localhost", True),
        ("http://LOCALHOST:8000", True),
        ("http://127.9.9.9", True),
        ("http://[0:0::1]", True),
        ("http://localhost.example.com", False),
        ("http://10.0.0.1", False),
        ("http://[::2]", False),
        ("http://127.example.com", False),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://[::ffff:7f09:1]", True),
        ("http://[::ffff:10.0.0.7]", False),
        ("http://[::1%lo]", True),
        ("http://[fe80::1%lo]", False),
        ("http://[::6]", False),
        ("http://0.0.0.0", False),
        ("http://[::]", False),
    ],
)
def test_this_machine_is_told_from_others(url: str, near: bool) -> None:
    assert names_loopback(parse_url(url).host) is near


@pytest.mark.parametrize("host", ["", ":", "127.0.0.1.evil.example", "127.0.0.256", "127.1", "[::1]", "LOCALHOST"])
def test_what_is_no_host_of_an_address_is_nobody_s_loopback(host: str) -> None:
    assert not names_loopback(host)


@pytest.mark.parametrize(
    ("url", "near"),
    [("http://127.0.0.1:8000", True), ("unix:///run/a", True), ("http://10.0.0.1", False), ("http://", False)],
)
def test_loopback_and_sockets_are_in_our_own_pod(url: str, near: bool) -> None:
    assert is_local(url) is near


def test_one_socket_has_one_name_however_it_is_written() -> None:
    assert endpoint_key("http://A") == endpoint_key("http://a:80/") == "a:80"
    assert endpoint_key("http://[0:0::1]:80") == endpoint_key("http://[::1]") == "[::1]:80"


def _url(address: Address) -> str:
    return f"unix://{address.path}" if address.scheme == "unix" else f"{address.scheme}://{address.key}"
