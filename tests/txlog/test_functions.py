"""The server's functions as text, and calls as commands; what they do is the contract's to test, on real servers."""

import struct

import pytest

from sidecar.core.breaker import MOST_TIMES
from sidecar.txlog import codec, store
from sidecar.txlog.codec import SHARDS, Kind, budget_key, budget_shard, encode_body, route_key, shard_of
from sidecar.txlog.functions import NAMES, SLOTS, Packer, library, slot_of
from sidecar.txlog.store import (
    Ask,
    Beat,
    Call,
    Draw,
    Propose,
    Release,
    Renew,
    Report,
    Restore,
    Share,
    Unit,
    Window,
)

KEY = "node:chat/a:1"
BUDGET = budget_key("gold", "acme")
TX = bytes(range(16))
CALLS: dict[str, Call] = {
    "propose": Propose(
        key=KEY, service="chat", kind=Kind.TRANSITION, state=2, epoch=1, version=2, tx=TX, body=b"b", by="me"
    ),
    "ask": Ask(
        key=KEY,
        service="chat",
        by="me",
        lease_ms=1,
        probes=1,
        successes=1,
        tx=TX,
        body=b"b",
        reopened_tx=TX,
        reopened_body=b"r",
    ),
    "report": Report(
        key=KEY,
        service="chat",
        by="me",
        epoch=1,
        version=2,
        seq=3,
        ok=None,
        again=True,
        lease_ms=1,
        probes=1,
        successes=1,
        tx=TX,
        closed_body=b"c",
        reopened_body=b"r",
    ),
    "renew": Renew(key=KEY, service="chat", epoch=1, version=2, seq=3, lease_ms=4),
    "release": Release(key=KEY, service="chat", epoch=1, version=2, seq=3, tx=TX, body=b"b"),
    "restore": Restore(key=KEY, service="chat", record=b"record"),
    "beat": Beat(by="me"),
    "share": Share(service="chat", blob=b"blob", keep_ms=1000),
    "draw": Draw(key=BUDGET, by="me", windows=(Window(Unit.TOKENS, 60_000, 1000, want=5),)),
}


def test_every_call_has_a_function() -> None:
    assert set(CALLS) == set(NAMES)
    assert {type(call) for call in CALLS.values()} == set(Call.__args__)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("functions", [True, False], ids=["functions", "scripts"])
def test_all_keys_of_a_call_share_the_shards_tag(call: Call, functions: bool) -> None:
    shard, command = Packer("dtl", functions=functions).pack(call)
    keys = command[3 : 3 + int(command[2])]
    assert keys
    assert all(key.startswith(b"{dtl:%02d}:" % shard) for key in keys)
    assert command[0] == (b"FCALL" if functions else b"EVALSHA")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_goes_to_its_own_function(name: str) -> None:
    _, (_, function, *_) = Packer("dtl", functions=True).pack(CALLS[name])
    assert function == f"{library().name}_{name}".encode()
    assert f"redis.register_function('{function.decode()}', functions.{name})" in library().code
    _, (_, script, *_) = Packer("dtl", functions=False).pack(CALLS[name])
    assert script == library().hashes[name]
    assert library().scripts[name].endswith(f"return functions.{name}(KEYS, ARGV)\n")


def test_the_shard_is_the_codecs() -> None:
    pack = Packer("dtl", functions=True).pack
    assert {pack(CALLS[name])[0] for name in NAMES if name not in ("beat", "share", "draw")} == {shard_of(KEY)}
    assert pack(CALLS["share"])[0] == shard_of(route_key("chat"))
    assert pack(CALLS["beat"])[0] == 0
    assert pack(CALLS["draw"])[0] == budget_shard(BUDGET)


def test_the_rules_numbers_are_the_stores() -> None:
    code = library().code
    assert f"local SCHEMA = {codec.SCHEMA}\n" in code
    assert f"local HEAD_BYTES = {codec.HEAD.size}\n" in code
    assert f"local MOST_TIMES = {MOST_TIMES}\n" in code
    numbers = [name for name, value in vars(store).items() if name.isupper() and isinstance(value, int)]
    assert len(numbers) >= 12
    for name in numbers:
        assert f"local {name} = {getattr(store, name)}\n" in code, f"{name} is not in the functions"


def test_the_heads_layout_is_said_twice_and_is_one() -> None:
    lua = {"I4": "I", "I8": "Q", "c16": "16s", "B": "B", "H": "H"}
    (text,) = (line.split("'")[1] for line in library().code.splitlines() if line.startswith("local HEAD ="))
    python = ">"
    rest = text.removeprefix(">")
    while rest:
        (found,) = (name for name in lua if rest.startswith(name))
        python, rest = python + lua[found], rest.removeprefix(found)
    assert python == codec.HEAD.format
    assert struct.calcsize(python) == codec.HEAD.size


def test_another_text_is_another_library() -> None:
    """Two releases whose rules differ must not load over one another: the name has a hash of the text."""
    name, code = library().name, library().code
    assert code.startswith(f"#!lua name={name}\n")
    assert name.startswith("dtl_1_")
    assert len(name) == len("dtl_1_") + 8
    assert all(f"'{name}_{function}'" in code for function in NAMES)


@pytest.mark.parametrize("prefix", ["dtl", "team-a.prod"])
def test_the_slots_are_those_of_the_tags(prefix: str) -> None:
    slots = {slot_of(shard.tag) for shard in Packer(prefix, functions=True).shards}
    assert len(slots) == SHARDS
    assert all(0 <= slot < SLOTS for slot in slots)


def test_a_slot_is_the_clusters_own_reckoning() -> None:
    # CLUSTER KEYSLOT of the specification's own example, and of `{dtl:07}:log`.
    assert slot_of(b"{123456789}") == 0x31C3
    assert slot_of(b"{dtl:07}") == slot_of(b"{dtl:07}:log")


def test_names_of_any_letters_are_bytes() -> None:
    key = "session:chät/ü 1"
    call = Restore(key=key, service="chät", record=encode_body(key, "chät", "me"))
    _, command = Packer("dtl", functions=True).pack(call)
    assert any(word.endswith(":probes:session:chät/ü 1".encode()) for word in command)


def test_a_draw_s_numbers_are_cut_and_not_refused() -> None:
    """A number that does not fit its place must not end the loop that packs it."""
    pack = Packer("dtl", functions=True).pack
    windows = (Window(Unit.TOKENS, 1 << 80, 1 << 80, -1, 1 << 63, -(1 << 70), -1, 1 << 90),) * 1000
    _, command = pack(Draw(key=BUDGET, by="me", windows=windows, slots_limit=-5, slots_want=1 << 99))
    numbers = command[-2]
    assert numbers[:24] == struct.pack(">QQQ", 0, 0, store.MOST_DRAWN)
    most = store.MOST_DRAWN
    assert numbers[24:] == struct.pack(">BIQQQQQQ", 0, 0xFFFF_FFFF, most, 0, most, 0, 0, codec.MAX_EXACT) * 5
