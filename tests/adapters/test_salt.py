"""Salts of prefix caches: one for each tenant, and no client's own, whatever its body says."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.salt import salt_of, salted
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.call import Api, read_call

KEY = b"a key that nobody guesses"
SALT = b"0123456789abcdef0123456789abcdef"
STOLEN = "00000000000000000000000000000000"


def read(body: bytes) -> tuple[Any, list[tuple[str, Any]]]:
    """The body as vLLM reads it, and the members of its outermost object in order."""
    members: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members[:] = pairs  # the outermost is the last to be whole
        return dict(pairs)

    return json.loads(body, object_pairs_hook=keep), members


# --- salts ------------------------------------------------------------------------------------------------------------


def test_salt_is_hex_that_vllm_takes_and_the_same_every_time() -> None:
    salt = salt_of(KEY, "chat", "acme", 0)
    assert len(salt) == 32
    assert set(salt) <= set(b"0123456789abcdef")
    assert salt == salt_of(KEY, "chat", "acme", 0)


names = st.text(max_size=8)


@given(st.lists(st.tuples(st.sampled_from([KEY, KEY + b"!"]), names, names, st.integers(0, 1 << 40)), unique=True))
def test_no_two_share_a_salt(owners: list[tuple[bytes, str, str, int]]) -> None:
    assert len({salt_of(*owner) for owner in owners}) == len(owners)


ALIKE = [("a", "b1", 0), ("ab", "1", 0), ("a", "b", 10), ("a1:b", "", 0), ("", "a1:b", 0), ("a", "", 0), ("", "a", 0)]


def test_names_that_read_alike_have_salts_of_their_own() -> None:
    assert len({salt_of(KEY, *owner) for owner in ALIKE}) == len(ALIKE)


# --- bodies -----------------------------------------------------------------------------------------------------------

BODIES = [
    pytest.param(b'{"model":"m"}', b'{"model":"m","cache_salt":"%b"}', id="plain"),
    pytest.param(b'{"model":"m"}\r\n \t', b'{"model":"m","cache_salt":"%b"}', id="space after"),
    pytest.param(b' {"model":"m" }', b' {"model":"m" ,"cache_salt":"%b"}', id="space within"),
    pytest.param(b"{}", b'{"cache_salt":"%b"}', id="empty"),
    pytest.param(b"\n{ \n}\n", b'\n{ \n"cache_salt":"%b"}', id="empty, with space"),
    pytest.param(b'{"a":{}}', b'{"a":{},"cache_salt":"%b"}', id="ends with an empty object"),
    pytest.param(b'\xef\xbb\xbf{"a":1}', b'\xef\xbb\xbf{"a":1,"cache_salt":"%b"}', id="byte order mark"),
    pytest.param('{"a":"\ud83d"}'.encode("utf-16", "surrogatepass"), b"", id="half an emoji in UTF-16"),
    *(
        pytest.param('{"a":"é"}\n'.encode(code), b'{"a":"\xc3\xa9","cache_salt":"%b"}', id=code)
        for code in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
    ),
]


@pytest.mark.parametrize(("body", "expected"), BODIES)
def test_salt_is_the_last_member_of_the_body_as_it_was(body: bytes, expected: bytes) -> None:
    whole = salted(body, SALT)
    assert json.loads(whole) == json.loads(body) | {"cache_salt": SALT.decode()}
    if expected:
        assert whole == expected % SALT


def test_salted_body_is_no_second_salting_in_vain() -> None:
    again = salted(salted(b'{"a":1}', SALT), b"f" * 32)
    assert json.loads(again)["cache_salt"] == "f" * 32


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(STOLEN),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("cache_salt"), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text() | st.just("cache_salt"), values, max_size=5), st.booleans(), st.integers(0, 2))
def test_all_else_is_as_the_client_said_it(body: dict[str, Any], ascii_only: bool, indent: int) -> None:
    data = json.dumps(body, ensure_ascii=ascii_only, indent=indent or None).encode("utf-8", "surrogatepass")
    said, members = read(salted(data, SALT))
    assert members[-1] == ("cache_salt", SALT.decode())
    assert said == body | {"cache_salt": SALT.decode()}


SALTS = [
    b'"cache_salt":"%b"',
    b'"cache_salt":"%b","cache_salt":"%b"',
    b'"cache\\u005fsalt":"%b"',
    b'"cache_salt":null,"x":{"cache_salt":"%b"}',
    b'"x":"}","cache_salt":"%b","y":"{"',
    b'"cache_salt":"%b","":{}',
]


@pytest.mark.parametrize("said", SALTS)
def test_salt_that_a_client_sends_gives_way(said: bytes) -> None:
    said = said.replace(b"%b", STOLEN.encode())
    for body in (b"{%b}" % said, b'{"model":"m",%b}' % said, b'{%b,"model":"m"}\n' % said):
        whole = salted(body, SALT)
        assert json.loads(whole)["cache_salt"] == SALT.decode()
        assert msgspec.json.decode(whole)["cache_salt"] == SALT.decode()
        assert msgspec.json.decode(whole, type=dict[str, Any])["cache_salt"] == SALT.decode()


pieces = st.lists(
    st.sampled_from(
        ["{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "a", "1", '"cache_salt"', f'"{STOLEN}"', '"x":', "\0", "é"]
    ),
    max_size=14,
).map("".join)


@given(pieces, st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32"]))
def test_whatever_the_bytes_are_no_engine_reads_another_salt(text: str, code: str) -> None:
    for body in (text.encode(code), ('{"cache_salt":"' + STOLEN + '",' + text).encode(code), b"{" + text.encode(code)):
        try:
            whole = salted(body, SALT)
        except (SidecarError, UnicodeDecodeError):
            with pytest.raises(SidecarError):
                read_call(Api.CHAT, body)  # it would not have come this far
            continue
        try:
            said, members = read(whole)
        except ValueError:
            continue  # an engine refuses it
        assert isinstance(said, dict)
        assert members[-1] == ("cache_salt", SALT.decode())


@pytest.mark.parametrize("body", [b"", b" ", b"[]", b"null", b"}x", b"\0\0\0\0"])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(SidecarError) as refused:
        salted(body, SALT)
    assert refused.value.reason is Reason.BAD_REQUEST
