"""Whether what callers were told can have been told by one register per key that does one call at a time.

A general search for an order (Wing and Gong) is not needed: every answer carries the register after the call, with its
version, so the versions are the order, and what remains is to hold it against time and against the calls. Per key:

1. One record per version: all who saw a version saw the same one. Of two calls with one expectation one won.
2. Time: who began after another's answer does not see an earlier version than that one did; nobody sees a record whose
   writer had not begun when he was answered.
3. Every record is somebody's: its tx is that of a call that was made (or it was there at the beginning).
4. A proposal that was accepted wrote the version after the one it named, or the first of an epoch.
5. A probe is given once; of its results one counts at most, and none before it was given.
"""

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from sidecar.txlog.codec import Record, decode, shard_of
from sidecar.txlog.store import Ask, Beat, Call, Propose, Release, Report, Restore, Share, Verdict
from tests.txlog.oracle import Op

Probe = tuple[int, int, int]


def check(ops: Iterable[Op], there: Iterable[bytes] = (), forgets: bool = False) -> int:
    """Checks a history, with the records that were there before it; how many answers it held against each other.

    `forgets`: registers may have been forgotten meanwhile. AssertionError says what cannot be.
    """
    by_key: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        if not isinstance(op.call, Beat | Share):
            by_key[op.call.key].append(op)
    before = {record.key: (record, data) for record, data in ((decode(data), data) for data in there)}
    return sum(_key(key, mine, before.get(key), forgets) for key, mine in by_key.items())


def _key(key: str, ops: list[Op], before: tuple[Record, bytes] | None, forgets: bool) -> int:
    assert shard_of(key) >= 0
    writers = _writers(ops)
    records: dict[tuple[int, int], bytes] = {}
    if before is not None:
        records[before[0].epoch, before[0].version] = before[1]
    answered = sorted((op for op in ops if op.reply is not None), key=lambda op: op.ended)
    for op in answered:
        assert op.reply is not None
        data = op.reply.record
        if not data:
            continue
        record = decode(data)
        version = (record.epoch, record.version)
        assert record.key == key, f"{key} was answered with a record of {record.key}"
        assert records.setdefault(version, data) == data, f"1: {key} has two records of version {version}"
        if before is None or data != before[1]:
            begun = writers.get(record.tx, inf)
            assert begun <= op.ended, f"2, 3: {key} has a record that nobody had written"
    _in_time(key, answered, forgets)
    _proposed(key, answered)
    _probed(key, answered)
    return len(answered)


def _writers(ops: list[Op]) -> dict[bytes, float]:
    """When each tx was first offered."""
    writers: dict[bytes, float] = {}
    for op in ops:
        for tx in _txs(op.call):
            writers[tx] = min(op.begun, writers.get(tx, inf))
    return writers


def _txs(call: Call) -> tuple[bytes, ...]:
    match call:
        case Ask():
            return call.tx, call.reopened_tx
        case Propose() | Report() | Release():
            return (call.tx,)
        case Restore():
            return (decode(call.record).tx,)
        case _:
            return ()


def _in_time(key: str, answered: list[Op], forgets: bool) -> None:
    """Nobody sees what was over before he began."""
    if forgets:
        return
    floor: list[tuple[float, tuple[int, int]]] = []
    highest = (0, 0)
    for op in answered:
        assert op.reply is not None
        highest = max(highest, _version(op))
        floor.append((op.ended, highest))
    for op in answered:
        earlier = max((version for ended, version in floor if ended < op.begun), default=(0, 0))
        assert _version(op) >= earlier, f"2: {key} went back from {earlier} to {_version(op)}"


def _version(op: Op) -> tuple[int, int]:
    if op.reply is None or not op.reply.record:
        return 0, 0
    record = decode(op.reply.record)
    return record.epoch, record.version


def _proposed(key: str, answered: list[Op]) -> None:
    for op in answered:
        call, reply = op.call, op.reply
        if not isinstance(call, Propose) or reply is None or reply.verdict is not Verdict.OK:
            continue
        record = decode(reply.record)
        assert record.tx == call.tx, f"1: {key}: a proposal was accepted and another's record is there"
        follows = (record.epoch, record.version) == (call.epoch, call.version + 1)
        assert call.order or follows or record.version == 1, f"4: {key}: a version was skipped or ignored"


def _probed(key: str, answered: list[Op]) -> None:
    given: dict[Probe, float] = {}
    ended: set[Probe] = set()
    for op in answered:
        reply = op.reply
        if reply is not None and reply.seq:
            record = decode(reply.record)
            probe = (record.epoch, record.version, reply.seq)
            assert probe not in given, f"5: {key}: probe {probe} was given twice"
            given[probe] = op.begun
    for op in answered:
        call, reply = op.call, op.reply
        if isinstance(call, Report) and reply is not None and reply.verdict is not Verdict.FENCED:
            probe = (call.epoch, call.version, call.seq)
            assert probe not in ended, f"5: {key}: two results of probe {probe} count"
            assert given.get(probe, -inf) <= op.ended, f"5: {key}: a result of probe {probe} came before it was given"
            ended.add(probe)
