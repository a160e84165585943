"""The fold: a maximum over records, whatever order they come in, and how often."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.core.breaker import Scope
from sidecar.txlog.codec import SHARDS, Code, Kind, Record, encode, register_key, shard_of
from sidecar.txlog.fold import Fold, order_of
from sidecar.txlog.store import CLOSED_TTL_MS, OPEN_TTL_MS

NODE = register_key(Scope.NODE, "chat", "h1:80")
SHARD = shard_of(NODE)
RECORD = Record(Kind.TRANSITION, Code.OPEN, 7, 1, b"t" * 16, NODE, "chat", "pod-1", ts_us=10, max_ms=1000)


def taken(fold: Fold, record: Record) -> bool:
    return fold.take(record, encode(record))


def test_what_is_not_there_is_closed() -> None:
    fold = Fold()
    assert (fold.get(NODE), fold.raw(NODE), fold.version(NODE), fold.state(NODE)) == (None, b"", (0, 0), Code.CLOSED)
    assert len(fold) == 0 and fold.shard(SHARD) == []


def test_the_latest_is_kept() -> None:
    fold = Fold()
    assert taken(fold, RECORD)
    assert not taken(fold, RECORD), "again"
    assert not taken(fold, replace(RECORD, n=9)), "the same record with another number"
    later = replace(RECORD, version=2, state=Code.HALF_OPEN)
    assert taken(fold, later) and not taken(fold, RECORD)
    assert fold.get(NODE) == later
    assert (fold.version(NODE), fold.state(NODE), fold.raw(NODE)) == ((7, 2), Code.HALF_OPEN, encode(later))
    assert taken(fold, replace(RECORD, epoch=8)), "a later register begins again"
    assert fold.version(NODE) == (8, 1)


def test_registers_lie_in_their_shards() -> None:
    fold = Fold()
    keys = [register_key(Scope.SESSION, "chat", f"s{number}") for number in range(200)]
    for key in keys:
        taken(fold, replace(RECORD, key=key))
    assert len(fold) == 200
    assert sorted(key for shard in range(SHARDS) for key, _ in fold.shard(shard)) == sorted(keys)
    assert all(shard_of(key) == shard for shard in range(SHARDS) for key, _ in fold.shard(shard))


ORDERS = st.builds(
    lambda epoch, version, state, tx: replace(RECORD, epoch=epoch, version=version, state=state, tx=bytes([tx]) * 16),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(list(map(int, Code))),
    st.integers(0, 255),
)


@given(st.lists(ORDERS, min_size=1, max_size=12), st.randoms())
def test_any_order_and_any_repetition_come_to_the_same(some: list[Record], chance: Random) -> None:
    once, again = Fold(), Fold()
    for record in some:
        taken(once, record)
    shuffled = some * 2
    chance.shuffle(shuffled)
    for record in shuffled:
        taken(again, record)
    assert once.raw(NODE) == again.raw(NODE) == encode(max(some, key=lambda record: record.order))


@given(ORDERS)
def test_the_order_is_read_without_decoding(record: Record) -> None:
    assert order_of(encode(record)) == record.order


def test_what_nobody_needs_is_forgotten_later_than_by_the_server() -> None:
    for state, ttl_ms in ((Code.CLOSED, CLOSED_TTL_MS), (Code.OPEN, OPEN_TTL_MS + 2 * RECORD.max_ms)):
        fold = Fold()
        taken(fold, replace(RECORD, state=state))
        over_us = RECORD.ts_us + 2 * ttl_ms * 1000
        assert fold.forget(SHARD, over_us) == 0
        assert fold.forget(SHARD, over_us + 1) == 1
        assert len(fold) == 0


def test_what_an_order_holds_is_never_forgotten() -> None:
    fold = Fold()
    taken(fold, replace(RECORD, kind=Kind.OVERRIDE, state=Code.CLOSED, held=True))
    assert fold.forget(SHARD, 1 << 52) == 0 and len(fold) == 1


def test_a_routing_table_is_never_forgotten() -> None:
    """As in the server: else nobody could restore what it lost."""
    fold = Fold()
    taken(fold, replace(RECORD, kind=Kind.ROUTE, state=Code.CLOSED))
    assert fold.forget(SHARD, 1 << 52) == 0 and len(fold) == 1
