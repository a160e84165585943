"""The check of what callers saw: it lets through what can be, and finds each kind of what cannot."""

from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace

from sidecar.txlog.codec import Code, decode, encode
from sidecar.txlog.local import LocalStore
from sidecar.txlog.store import Call, Propose, Reply, Verdict
from tests.txlog import linear
from tests.txlog.contract import asking, expectation, opening, order, reporting
from tests.txlog.oracle import Op
from tests.txlog.test_local import START_US, Virtual
from tests.txlog.world import run


def history(calls: Iterable[Callable[[list[Reply]], Call]]) -> list[Op]:
    """What one caller sees who waits for each answer; calls may use the answers before."""
    store, replies = LocalStore(Virtual()), list[Reply]()
    ops = []
    for number, make in enumerate(calls):
        call = make(replies)
        replies += run(store.call([call]))
        ops.append(Op(2 * number, call, 2 * number + 1, replies[-1]))
    return ops


def good() -> list[Op]:
    """A register opens, is probed, fails, is closed by order, opens again."""
    return history(
        [
            lambda _: opening(wait_ms=0, base_ms=0, max_ms=0),
            lambda _: asking(),
            lambda seen: reporting(seen[1], False),
            lambda _: asking(),
            lambda seen: reporting(seen[3], True),
            lambda seen: reporting(seen[1], True),
            lambda _: order(Code.CLOSED),
            lambda seen: opening(**expectation(decode(seen[6].record))),
        ]
    )


def test_what_happened_can_have_happened() -> None:
    assert linear.check(good()) == 8


def test_answers_may_be_lost() -> None:
    ops = good()
    for op in ops[1::2]:
        op.ended, op.reply = float("inf"), None
    assert linear.check(ops) == 4


def test_calls_at_the_same_time_may_be_done_in_any_order() -> None:
    ops = good()
    for op in ops:
        op.begun, op.ended = 0, 1
    assert linear.check(ops[::-1]) == 8


def test_a_history_may_begin_in_the_middle() -> None:
    ops = good()
    first = ops[6].reply
    assert first is not None
    linear.check(ops[7:], [first.record])
    with pytest.raises(AssertionError, match="nobody had written"):
        linear.check([Op(0, asking(), 1, first)])


def two_records_of_a_version(ops: list[Op]) -> None:
    answered(ops[0], tx=b"x" * 16)


def a_record_of_nobody(ops: list[Op]) -> None:
    answered(ops[7], tx=b"x" * 16)


def back_in_time(ops: list[Op]) -> None:
    reply = ops[0].reply
    assert reply is not None
    ops.append(Op(100, opening(epoch=1, version=9), 101, replace(reply, verdict=Verdict.STALE)))


def from_the_future(ops: list[Op]) -> None:
    ops[0].begun, ops[0].ended = -9, -8
    ops.insert(0, Op(-20, asking(), -19, ops[0].reply))


def anothers_record(ops: list[Op]) -> None:
    ops[0].call = replace(ops[0].call, tx=b"y" * 16)
    ops.append(Op(-1, opening(tx=decode(ops[0].reply.record).tx if ops[0].reply else b""), 200))


def an_expectation_that_did_not_matter(ops: list[Op]) -> None:
    call = ops[7].call
    assert isinstance(call, Propose)
    ops[7].call = replace(call, version=call.version - 1)


def a_probe_twice(ops: list[Op]) -> None:
    ops.insert(2, Op(2, asking(), 3, ops[1].reply))


def two_results_of_a_probe(ops: list[Op]) -> None:
    again = ops[2]
    ops.insert(3, Op(again.begun, again.call, again.ended, again.reply))


def answered(op: Op, **changes: object) -> None:
    """Another record in an answer."""
    assert op.reply is not None
    op.reply = replace(op.reply, record=encode(replace(decode(op.reply.record), **changes)))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (two_records_of_a_version, "nobody had written|accepted"),
        (a_record_of_nobody, "nobody had written"),
        (back_in_time, "went back"),
        (from_the_future, "nobody had written"),
        (anothers_record, "another's record"),
        (an_expectation_that_did_not_matter, "skipped or ignored"),
        (a_probe_twice, "given twice"),
        (two_results_of_a_probe, "two results"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_is_found(break_it: Callable[[list[Op]], None], said: str) -> None:
    ops = good()
    break_it(ops)
    with pytest.raises(AssertionError, match=said):
        linear.check(ops)


def test_two_callers_with_one_version_and_two_records_are_found() -> None:
    ops = good()
    reply = ops[7].reply
    assert reply is not None
    other = replace(decode(reply.record), tx=b"z" * 16, ts_us=START_US)
    call = opening(tx=b"z" * 16, epoch=other.epoch, version=other.version - 1)
    ops.append(Op(14, call, 15, replace(reply, record=encode(other))))
    with pytest.raises(AssertionError, match="two records of version"):
        linear.check(ops)
