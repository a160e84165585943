"""Records as bytes: what was written is read, what is not ours is not, and other releases read what this one writes."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.core.breaker import Scope
from sidecar.txlog.codec import (
    HEAD,
    MAX_EXACT,
    MAX_RECORD_BYTES,
    MAX_TABLE_BYTES,
    MAX_TENANT_BYTES,
    MAX_U32,
    SCHEMA,
    SHARDS,
    Code,
    Kind,
    Record,
    Unreadable,
    budget_key,
    budget_shard,
    decode,
    encode,
    encode_body,
    encode_head,
    parse_key,
    register_key,
    route_key,
    shard_of,
)

RECORD = Record(
    kind=Kind.OVERRIDE,
    state=Code.OPEN,
    epoch=0x01020304,
    version=5,
    tx=bytes(range(16)),
    key="node:chat/a:80",
    service="chat",
    by="one",
    why="w",
    evidence="e",
    n=6,
    ts_us=0x0006_5C3B_8A1F_0007,
    held=True,
    doublings=8,
    proofs=9,
    wait_ms=10,
    base_ms=11,
    max_ms=12,
    ramp_ms=13,
    expires_us=14,
    blob=b"b",
    trace="t",
)
GOLDEN = (
    bytes.fromhex("01 02 02 01 08 0009 01020304 0000000000000005 0000000000000006 00065c3b8a1f0007")
    + bytes.fromhex("0000000a 0000000b 0000000c 0000000d 000000000000000e 000102030405060708090a0b0c0d0e0f")
    + b"\x97\xaenode:chat/a:80\xa4chat\xa3one\xa1w\xa1e\xc4\x01b\xa1t"
)

u8, u16 = st.integers(0, 0xFF), st.integers(0, 0xFFFF)
u32, exact = st.integers(0, MAX_U32), st.integers(0, MAX_EXACT)
words = st.text(max_size=40)
keys = st.builds(
    "{}:{}/{}".format, st.sampled_from([*Scope, "route"]), st.from_regex(r"[^/]{1,20}", fullmatch=True), words
)
records = st.builds(
    Record,
    kind=st.sampled_from(list(Kind)),
    state=st.sampled_from(list(Code)),
    epoch=u32,
    version=exact,
    tx=st.binary(min_size=16, max_size=16),
    key=keys,
    service=words,
    by=words,
    why=words,
    evidence=words,
    n=exact,
    ts_us=exact,
    held=st.booleans(),
    doublings=u8,
    proofs=u16,
    wait_ms=u32,
    base_ms=u32,
    max_ms=u32,
    ramp_ms=u32,
    expires_us=exact,
    blob=st.binary(max_size=40),
    trace=words,
)


# --- what was written is read -----------------------------------------------------------------------------------------


@given(records)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    data = encode(record)
    assert decode(data) == record
    assert encode(decode(data)) == data
    assert data[: HEAD.size] == encode_head(record)


def test_the_layout_is_the_one_that_other_releases_read() -> None:
    assert HEAD.size == 75
    assert encode(RECORD) == GOLDEN
    assert decode(GOLDEN) == RECORD


def test_a_usual_record_is_small() -> None:
    record = replace(RECORD, why="rate 0.61 of 23 against 0.02", by="chat-6d5f7c9b8-x2v4q", trace="0" * 32)
    assert len(encode(record)) < 250


@pytest.mark.parametrize("words", [3, 4, 5, 6])
def test_a_body_of_an_earlier_release_has_defaults_for_what_it_lacks(words: int) -> None:
    body = msgspec.msgpack.encode(["node:chat/a:80", "chat", "one", "w", "e", b"b"][:words])
    expected = {"why": "w", "evidence": "e", "blob": b"b"}
    defaults = dict.fromkeys(list(expected)[max(0, words - 3) :], "")
    if "blob" in defaults:
        expected["blob"] = b""
    for name in set(defaults) - {"blob"}:
        expected[name] = ""
    read = decode(encode_head(RECORD) + body)
    assert (read.why, read.evidence, read.blob, read.trace) == (*expected.values(), "")


@pytest.mark.parametrize("more", [["x"], [1, None, {"a": [b"b"]}], [[]] * 50])
def test_what_a_later_release_adds_to_a_body_is_ignored(more: list[object]) -> None:
    body = msgspec.msgpack.encode(["node:chat/a:80", "chat", "one", "w", "e", b"b", "t", *more])
    assert decode(encode_head(RECORD) + body) == RECORD


# --- what is not ours is not ------------------------------------------------------------------------------------------


def test_every_truncation_is_unreadable() -> None:
    for end in range(len(GOLDEN)):
        with pytest.raises(Unreadable):
            decode(GOLDEN[:end])


@given(st.integers(0, len(GOLDEN) - 1), u8)
def test_a_changed_byte_makes_another_record_or_none(at: int, byte: int) -> None:
    data = GOLDEN[:at] + bytes([byte]) + GOLDEN[at + 1 :]
    try:
        record = decode(data)
    except Unreadable:
        return
    assert decode(encode(record)) == record


@settings(max_examples=300)
@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda data: bytes([SCHEMA]) + data))
def test_foreign_bytes_raise_nothing_else(data: bytes) -> None:
    try:
        decode(data)
    except Unreadable as exc:
        assert str(exc)


@pytest.mark.parametrize("schema", sorted(set(range(256)) - {SCHEMA}))
def test_an_unknown_schema_is_named(schema: int) -> None:
    with pytest.raises(Unreadable, match=f"schema {schema} is not known"):
        decode(bytes([schema]) + GOLDEN[1:])


@pytest.mark.parametrize(
    "changes",
    [
        *({"kind": kind} for kind in (0, 5, 255)),
        *({"state": state} for state in (3, 255)),
        *({name: MAX_EXACT + 1} for name in ("version", "n", "ts_us", "expires_us")),
    ],
    ids=lambda changes: "{}={}".format(*next(iter(changes.items()))),
)
def test_a_number_that_is_none_of_ours_is_unreadable(changes: dict[str, int]) -> None:
    with pytest.raises(Unreadable):
        decode(encode(replace(RECORD, **changes)))


@pytest.mark.parametrize("key", ["", "stranger", "node", "node:", "node:chat", "node:/a", "pod:chat/a", "xnode:chat/a"])
def test_a_key_that_is_none_is_unreadable(key: str) -> None:
    """Its reader would go by it."""
    with pytest.raises(Unreadable, match=f"{key!r} is no register's key"):
        decode(encode(replace(RECORD, key=key)))


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc0", b"\x80", b"\xa3abc", b"\x92\xa1a\xa1b", b"\x93\x01\x02\x03", b"\x93\xa1\xff\xa1a\xa1a", GOLDEN],
    ids=["none", "nil", "a map", "a word", "too few", "numbers", "not UTF-8", "a record"],
)
def test_a_body_that_is_none_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(encode_head(RECORD) + body)


def test_bytes_after_a_body_are_unreadable() -> None:
    with pytest.raises(Unreadable):
        decode(GOLDEN + b"\x00")


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(kind, MAX_TABLE_BYTES if kind is Kind.ROUTE else MAX_RECORD_BYTES) for kind in Kind],
    ids=[kind.name.lower() for kind in Kind],
)
def test_a_record_has_a_longest_length(kind: Kind, limit: int) -> None:
    empty = replace(RECORD, kind=kind, blob=b"x" * 70_000 if kind is Kind.ROUTE else b"x" * 300)
    fits = replace(empty, blob=b"x" * (len(empty.blob) + limit - len(encode(empty))))
    assert len(encode(fits)) == limit
    assert decode(encode(fits)) == fits
    with pytest.raises(Unreadable, match=f"{limit + 1} bytes"):
        decode(encode(replace(fits, blob=fits.blob + b"x")))


# --- which is the later -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"epoch": RECORD.epoch + 1, "version": 1}, {"version": 6}, {"tx": b"\xff" * 16}],
    ids=["epoch", "version", "tx"],
)
@pytest.mark.parametrize("n", [0, 9])
def test_the_later_record_is_the_greater(changes: dict[str, object], n: int) -> None:
    assert replace(RECORD, n=n, ts_us=0, **changes).order > RECORD.order


def test_of_one_version_the_more_severe_is_the_greater() -> None:
    of_each = [replace(RECORD, state=state, tx=b"\0" * 16).order for state in Code]
    assert of_each == sorted(of_each)
    assert list(Code) == [Code.CLOSED, Code.HALF_OPEN, Code.OPEN]


# --- keys and shards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", list(Scope), ids=[scope.value for scope in Scope])
@pytest.mark.parametrize("name", ["10.0.0.7:8000", "[::1]:80", "/v1/x?y=1/z", "a:b/c", "", "ü/"])
def test_a_key_names_scope_service_and_name(scope: Scope, name: str) -> None:
    assert parse_key(register_key(scope, "chat", name)) == (scope.value, "chat", name)


def test_a_routing_table_has_a_key() -> None:
    assert parse_key(route_key("chat")) == ("route", "chat", "")


@pytest.mark.parametrize("key", ["", "node", "node:", "node:chat", "node:/a", "chat/a"])
def test_what_is_no_key_is_none(key: str) -> None:
    with pytest.raises(ValueError, match="SCOPE:SERVICE/NAME"):
        parse_key(key)


def test_what_is_counted_together_lies_together() -> None:
    for service in ("chat", "embed", "s3"):
        shards = {
            shard_of(register_key(scope, service, f"{i}")) for i in range(50) for scope in (Scope.NODE, Scope.REQUEST)
        }
        assert shards == {shard_of(route_key(service))}


@pytest.mark.parametrize(
    ("tenant", "name"),
    [
        ("acme", "acme"),
        ("", ""),
        ("a/b:c d", "a/b:c d"),
        ("ü\ud83d", "ü\\ud83d"),
        ("\0\r\n", "\0\r\n"),
        ("x" * MAX_TENANT_BYTES, "x" * MAX_TENANT_BYTES),
    ],
    ids=ascii,
)
def test_a_tenant_of_any_letters_has_a_budget(tenant: str, name: str) -> None:
    key = budget_key("gold", tenant)
    assert parse_key(key) == ("budget", "gold", name)
    assert key.encode().decode() == key and 0 <= budget_shard(key) < SHARDS


def test_a_long_tenant_has_a_short_key_of_its_own() -> None:
    most = MAX_TENANT_BYTES
    keys = {budget_key("gold", tenant) for tenant in ("x" * (most + 1), "x" * (most + 2), "ü" * most, "x" * 10**6)}
    assert len(keys) == 4 and {len(key) for key in keys} == {len("budget:gold/blake2b:") + 32}


def test_budgets_are_spread_over_all_shards() -> None:
    found = Counter(budget_shard(budget_key("gold", f"{i:x}")) for i in range(16_000))
    assert len(found) == SHARDS and max(found.values()) < 1300


@pytest.mark.parametrize(
    "key", ["", "gold/acme", "node:chat/a:80", "budget:gold", "budget:/acme", "budget:gold/\ud800"]
)
def test_what_is_no_budget_has_no_shard(key: str) -> None:
    with pytest.raises(ValueError):
        budget_shard(key)


def test_sessions_and_services_are_spread_over_all_shards() -> None:
    sessions = Counter(shard_of(register_key(Scope.SESSION, "chat", f"{i:x}")) for i in range(16_000))
    services = Counter(shard_of(route_key(f"service-{i}")) for i in range(16_000))
    for spread in (sessions, services):
        assert set(spread) == set(range(SHARDS))
        assert max(spread.values()) < 1300


def test_a_key_stays_in_its_shard_across_releases() -> None:
    keys = ["node:chat/a:80", "session:chat/s-1", "session:chat/s-2", "route:embed/"]
    assert [shard_of(key) for key in keys] == [12, 15, 12, 9]


def test_words_alone_are_a_body() -> None:
    assert encode(RECORD) == encode_head(RECORD) + encode_body("node:chat/a:80", "chat", "one", "w", "e", b"b", "t")
