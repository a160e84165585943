"""Routing tables: as bytes, in parts, and over a policy."""

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.core.table import (
    PARTS,
    SCHEMA,
    BadTable,
    Decay,
    Plan,
    Rollout,
    Seen,
    Step,
    Table,
    Target,
    Version,
    decode,
    effective,
    encode,
    parts_of,
    reweighed,
    started,
    strangers,
    table_version,
    weighed,
)
from sidecar.policy.schema import Endpoint, Service

FULL = Table(
    "chat",
    (
        Version("v1", 9500, "triton", (Target("http://h1", "z", "n"), Target("http://h2")), "a" * 64),
        Version("v2", 500, compatible=("a" * 64,), signature={"k": "v"}),
        Version("v3", 0, "deepspeed", front="gateway", engine_model="llama", chat_template="/templates/llama"),
    ),
    ("m-*",),
    {"z": Decay(0.1, 7, "slow")},
    Rollout("r", "v2", Plan("v1", (Step(500, 60.0, 100),)), since_us=5, why="begun", by="ann"),
    (Seen("u", b"digest", 7),),
)
FILES = Service(
    name="chat",
    endpoints=(
        Endpoint(url="http://h1", zone="z1", node="n1", models=("m",), local=True),
        Endpoint(url="http://h2", zone="z2"),
    ),
)


def packed(value: object) -> bytes:
    return bytes((SCHEMA,)) + zlib.compress(msgspec.msgpack.encode(value))


# As bytes.


def test_a_table_comes_back_as_it_was() -> None:
    assert decode(encode(FULL)) == FULL
    assert decode(encode(Table("chat"))) == Table("chat")


@pytest.mark.parametrize(
    ("blob", "word"),
    [
        (b"", "empty"),
        (b"\x02abc", "schema 2"),
        (b"\x01abc", "no routing table"),
        (encode(FULL)[:-1], "not whole"),
        (encode(FULL) + b"x", "not whole"),
        (packed([1]), "no routing table"),
        (packed({"service": "a/b"}), "no routing table"),
        (packed({"service": "chat", "versions": [{"name": "v 1", "weight": 1}]}), "no routing table"),
        (packed({"service": "chat", "versions": [{"name": "v1", "weight": -1}]}), "a weight"),
        (packed({"service": "chat", "versions": [{"name": "v1", "weight": 10_001}]}), "a weight"),
        (packed({"service": "chat", "versions": [{"name": "v1", "weight": 0}]}), "nobody"),
        (packed({"service": "chat", "versions": [{"name": "v1", "weight": 1}] * 101}), "no routing table"),
        (packed({"service": "chat", "versions": [{"name": "v1", "weight": 1, "front": "grpc"}]}), "no routing table"),
        (
            packed({"service": "chat", "versions": [{"name": "v1", "weight": 1, "engine_model": "\na"}]}),
            "no routing table",
        ),
        (bytes((SCHEMA,)) + zlib.compress(b"\0" * (9 << 20)), "more than 8388608 bytes"),
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(blob: bytes, word: str) -> None:
    with pytest.raises(BadTable, match=word):
        decode(blob)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_none(data: bytes) -> None:
    for blob in (data, bytes((SCHEMA,)) + data, bytes((SCHEMA,)) + zlib.compress(data)):
        try:
            decode(blob)
        except BadTable:
            pass


def test_what_a_later_release_adds_is_left_out() -> None:
    said = {"service": "chat", "colour": "red", "versions": [{"name": "v1", "weight": PARTS, "gpus": 8}]}
    assert decode(packed(said)) == Table("chat", (Version("v1", PARTS),))


def test_what_knew_of_no_fronts_is_read_and_reads() -> None:
    old = {"name": "v1", "weight": PARTS, "engine": "triton"}
    assert decode(packed({"service": "chat", "versions": [old]})) == Table("chat", (Version("v1", PARTS, "triton"),))
    new = Table("chat", (Version("v1", PARTS, "triton", front="openai"), Version("v2", 0, "triton")))
    said = msgspec.msgpack.decode(zlib.decompress(encode(new)[1:]))
    # To an older release one key that it does not know, and none where there is nothing to say.
    assert said["versions"] == [old | {"front": "openai"}, {"name": "v2", "weight": 0, "engine": "triton"}]


def test_a_version_of_a_table_only_grows() -> None:
    assert table_version(1_800_000_000, 5) < table_version(1_800_000_000, 6) < table_version(1_800_000_001, 1)
    assert table_version(1 << 32, 1 << 20) < 1 << 53


# In parts.


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0, 1e6), min_size=1, max_size=30))
def test_parts_are_a_whole_and_close(shares: dict[str, float]) -> None:
    parts = parts_of(shares)
    total = sum(shares.values())
    if total <= 0:
        assert not any(parts.values())
        return
    assert sum(parts.values()) == PARTS
    for name, share in shares.items():
        assert (parts[name] > 0) == (share > 0)
        assert abs(parts[name] - share / total * PARTS) <= len(shares)


def test_the_rest_keeps_its_proportions() -> None:
    table = Table("chat", (Version("a", 6000), Version("b", 3000), Version("c", 1000), Version("d", 0)))
    made = weighed(table, "c", 4000)
    assert made is not None and made.weights == {"a": 4000, "b": 2000, "c": 4000, "d": 0}
    assert weighed(Table("chat", (Version("a", PARTS),)), "a", 5000) is None
    whole = weighed(table, "d", PARTS)
    assert whole is not None and whole.weights == {"a": 0, "b": 0, "c": 0, "d": PARTS}


# Over a policy.


def test_a_table_begins_with_what_the_file_says() -> None:
    assert started(FILES) == Table("chat", (Version("v1", PARTS),))
    other = Endpoint(url="http://h3", version="v2", engine="triton")
    two = replace(FILES, endpoints=(*FILES.endpoints, other))
    assert started(two) == Table("chat", (Version("v1", 6667), Version("v2", 3333, "triton")))
    assert started(replace(two, split={"v2": 3.0, "v1": 1.0})).weights == {"v1": 2500, "v2": 7500}
    assert started(replace(FILES, endpoints=())) == Table("chat")


def test_what_a_table_begins_with_changes_nothing() -> None:
    made = effective(FILES, started(FILES))
    assert made.endpoints == FILES.endpoints and made.split == {"v1": 10_000.0}


def test_a_tables_endpoints_are_beside_the_files() -> None:
    table = Table("chat", (Version("v1", 9000), Version("v2", 1000, "triton", (Target("http://h9", "z9", "n9"),))))
    made = effective(FILES, table)
    assert made.endpoints[:2] == FILES.endpoints
    assert made.endpoints[2] == Endpoint(url="http://h9", engine="triton", version="v2", zone="z9", node="n9")
    assert made.split == {"v1": 9000.0, "v2": 1000.0}


def test_an_endpoint_of_both_is_the_tables_with_the_files_rest() -> None:
    table = Table("chat", (Version("v2", PARTS, "triton", (Target("http://h1:80", "", "n7"),)),))
    made = effective(FILES, table).endpoints[0]
    assert made == replace(FILES.endpoints[0], version="v2", engine="triton", node="n7")


def test_a_table_without_versions_leaves_the_split() -> None:
    policy = replace(FILES, split={"v1": 1.0})
    assert effective(policy, Table("chat", zones={"z1": Decay(0.1, 0)})) == policy


def test_versions_that_a_table_does_not_name_serve_where_nobody_else_is() -> None:
    table = Table("chat", (Version("v1", PARTS), Version("v2", 0, "triton", (Target("http://h9"),))))
    anew = replace(FILES, endpoints=tuple(replace(each, version="v7") for each in FILES.endpoints))
    made = effective(anew, table)
    assert made.split == {"v1": 0.0, "v2": 0.0, "v7": float(PARTS)} and strangers(made, table) == ["v7"]
    assert reweighed(anew, made, table, table) == made
    # Not what the table names, nor what the file gives nothing.
    second = replace(anew, endpoints=(*anew.endpoints, Endpoint(url="http://h5", version="v8")), split={"v8": 1.0})
    assert effective(second, table).split == {"v1": 0.0, "v2": 0.0, "v8": float(PARTS)}
    third = replace(anew, endpoints=tuple(replace(each, version="v2") for each in FILES.endpoints))
    assert effective(third, table).split == {"v1": float(PARTS), "v2": 0.0}
    # One endpoint with a weight is enough.
    some = Table("chat", (Version("v1", PARTS - 1), Version("v2", 1, "triton", (Target("http://h9"),))))
    assert effective(anew, some).split == {"v1": PARTS - 1.0, "v2": 1.0}
    assert not strangers(effective(anew, some), some) and not strangers(effective(FILES, table), table)
    assert effective(replace(FILES, endpoints=()), table).split == {"v1": float(PARTS), "v2": 0.0}


def test_a_change_of_weights_keeps_the_endpoints_as_they_are() -> None:
    table = Table("chat", (Version("v1", 9000), Version("v2", 1000, "triton", (Target("http://h9"),))))
    made = effective(FILES, table)
    later = decode(encode(replace(table, versions=(replace(table.versions[0], weight=0), table.versions[1]))))
    fast = reweighed(FILES, made, table, later)
    assert fast == effective(FILES, later)
    assert fast is not None and fast.endpoints is made.endpoints


def test_a_change_of_more_is_none_of_weights() -> None:
    table = Table("chat", (Version("v1", 9000), Version("v2", 1000, "triton", (Target("http://h9"),))))
    made = effective(FILES, table)
    one, two = table.versions
    for changed in (
        (one,),
        (one, replace(two, engine="vllm")),
        (one, replace(two, name="v3")),
        (one, replace(two, endpoints=(Target("http://h9", "z"),))),
        (replace(one, endpoints=(Target("http://h8"),)), two),
        (),
    ):
        assert reweighed(FILES, made, table, replace(table, versions=changed)) is None
    assert reweighed(FILES, made, table, replace(table, versions=(one, two, Version("v3", 0)))) is not None


# How endpoints are spoken to.


MII = Endpoint(url="http://h1", engine="deepspeed", front="gateway", engine_model="llama", chat_template="/t")


def spoken(policy: Service, *versions: Version) -> dict[str, tuple[str, str, str, str]]:
    made = effective(policy, Table("chat", versions))
    return {each.url: (each.engine, each.front, each.engine_model, each.chat_template) for each in made.endpoints}


def test_all_endpoints_of_a_version_are_spoken_to_alike() -> None:
    version = Version(
        "v2", PARTS, "triton", (Target("http://h8"), Target("http://h9")), engine_model="m", chat_template="/t"
    )
    alike = ("triton", "", "m", "/t")
    assert spoken(FILES, version) == {
        "http://h1": ("vllm", "", "", ""),
        "http://h2": ("vllm", "", "", ""),
        "http://h8": alike,
        "http://h9": alike,
    }


@pytest.mark.parametrize(
    ("version", "found"),
    [
        pytest.param(Version("v1", PARTS, "deepspeed"), ("deepspeed", "gateway", "llama", "/t"), id="as the file says"),
        pytest.param(Version("v1", PARTS, "triton"), ("triton", "", "", ""), id="another engine"),
        pytest.param(
            Version("v1", PARTS, "deepspeed", front="api_server"),
            ("deepspeed", "api_server", "", ""),
            id="another front",
        ),
        pytest.param(
            Version("v1", PARTS, "deepspeed", engine_model="m"), ("deepspeed", "", "m", ""), id="all that it says"
        ),
    ],
)
def test_an_endpoint_that_both_name_is_spoken_to_as_the_table_says(
    version: Version, found: tuple[str, str, str, str]
) -> None:
    policy = Service(name="chat", endpoints=(MII,))
    assert spoken(policy, replace(version, endpoints=(Target("http://h1"),))) == {"http://h1": found}
    assert spoken(policy, version) == {"http://h1": ("deepspeed", "gateway", "llama", "/t")}


def test_a_table_begins_with_how_the_file_speaks() -> None:
    policy = Service(name="chat", endpoints=(*FILES.endpoints, replace(MII, url="http://h3", version="v2")))
    assert started(policy).versions == (
        Version("v1", 6667),
        Version("v2", 3333, "deepspeed", front="gateway", engine_model="llama", chat_template="/t"),
    )


@pytest.mark.parametrize("change", [{"front": "openai"}, {"engine_model": "m"}, {"chat_template": "/t"}], ids=str)
def test_to_speak_otherwise_is_no_change_of_weights(change: dict[str, str]) -> None:
    table = Table("chat", (Version("v2", PARTS, "triton", (Target("http://h9"),)),))
    made = effective(FILES, table)
    changed = replace(table, versions=(replace(table.versions[0], **change),))
    assert reweighed(FILES, made, table, changed) is None
