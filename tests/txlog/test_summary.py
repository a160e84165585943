"""What goes to the log comes back the same, small; what is none of ours is refused; what was read is not read again."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.core import evidence
from sidecar.core.breaker import FRESH
from sidecar.core.detection import Counts
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.core.tally import Ended, EndpointTally, ServiceTally
from sidecar.core.verdict import KEYS, MOST_KEYS, Tally
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Endpoint, LongSeconds, Service, Shared, Snapshot
from sidecar.txlog.codec import Unreadable
from sidecar.txlog.summary import (
    ENDINGS,
    FORGOTTEN_MS,
    MAX_SUMMARY_BYTES,
    MOST_COUNTED,
    MOST_ENDPOINTS,
    MOST_OBSERVERS,
    MOST_SESSIONS,
    OLD_MS,
    RESULTS,
    EndpointSummary,
    Heard,
    Observed,
    Summary,
    Teller,
    decode,
    decode_trial,
    encode,
    encode_trial,
)

S, F = Result.SUCCESS, Result.FAILURE
ONE = EndpointKey("10.0.0.1:8000")
TWO = EndpointKey("10.0.0.2:8000")
COUNTS = Counts(ONE, 40, 2, 1, -3.5, 41, 0.125)


def summary(seq: int = 7, observer: str = "pod-a", counts: Counts | None = COUNTS) -> Summary:
    return Summary(
        observer,
        seq,
        "chat",
        1000,
        (
            EndpointSummary(
                ONE,
                "v1",
                {(Ending.COMPLETE, S): 40, (Ending.SERVER_ERROR, F): 2},
                {S: 1},
                {55: 30, 56: 10},
                12,
                counts,
                (0, 2, 1),
            ),
        ),
        {"POST /v1/chat/completions": (40, 2)},
        {"user-1": (0, 2)},
        0.25,
        True,
        {"a": ({55: 3, 56: 1}, 4, -5)},
    )


def news(heard: Heard, told: Summary, at_ms: int, now_ms: int) -> list[Counts]:
    """As the logbook asks."""
    return heard.news(told) if heard.first(told, at_ms, now_ms) else []


def test_the_tables_have_every_ending_and_result_and_their_numbers_never_change() -> None:
    assert set(ENDINGS) == set(Ending), "give a new ending the next number, in this test too"
    assert [ENDINGS[Ending(word)] for word in GOLDEN] == list(range(len(GOLDEN)))
    assert len(GOLDEN) == len(Ending) <= 64
    assert {result.value: number for result, number in RESULTS.items()} == {
        "success": 0,
        "failure": 1,
        "ignored": 2,
        "overloaded": 3,
    }


GOLDEN = [
    *("complete", "connect_failed", "reset_before_head", "bad_bytes", "server_error", "overloaded", "client_error"),
    *("context_length", "head_timeout", "ttft_timeout", "token_gap_timeout", "total_timeout", "late", "truncated"),
    *("error_in_band", "client_error_in_band", "context_length_in_band", "overloaded_in_band", "empty", "aborted"),
    *("client_left", "client_slow", "client_malformed", "abandoned", "preempted"),
]


def test_the_bytes_are_what_other_releases_read() -> None:
    assert encode(summary()) == bytes.fromhex(
        "01"
        "9ba5706f642d6107a463686174cd03e8"
        "9198ad31302e302e302e313a38303030a27631"
        "820028440281000182371e380a0c96280201d1f254297d93000201"
        "81b9504f5354202f76312f636861742f636f6d706c6574696f6e73922802"
        "81a6757365722d31920002"
        "ccfac3"
        "81a16193823703380104fbc400"
    )


counts = st.builds(
    Counts,
    st.just(ONE),
    *(st.integers(0, 1000),) * 3,
    st.integers(-100_000, 100_000).map(lambda n: n / 1000),
    st.integers(0, 1000),
    st.integers(-100_000, 100_000).map(lambda n: n / 1000),
)
few = st.integers(1, MOST_COUNTED)
endpoints = st.builds(
    EndpointSummary,
    st.just(ONE),
    st.text(max_size=10),
    st.dictionaries(st.tuples(st.sampled_from(Ending), st.sampled_from(Result)), few, max_size=5),
    st.dictionaries(st.sampled_from(Result), few),
    st.dictionaries(st.integers(0, 127), few, max_size=10),
    st.integers(0, 100_000),
    st.none() | counts,
    st.tuples(*(st.integers(0, 1000),) * 3),
)
pairs = st.dictionaries(st.text(max_size=20), st.tuples(few, few), max_size=3)
summaries = st.builds(
    Summary,
    st.text(max_size=20),
    st.integers(0, 2**53),
    st.text(max_size=20),
    st.integers(0, 100_000),
    st.lists(endpoints, max_size=3).map(tuple),
    pairs,
    pairs,
    st.integers(-5000, 5000).map(lambda n: n / 1000),
    st.booleans(),
    st.dictionaries(
        st.text(max_size=10),
        st.tuples(st.dictionaries(st.integers(0, 127), few, max_size=10), few, st.integers(-(10**9), 10**9)),
        max_size=3,
    ),
    st.binary(max_size=50),
)


@given(summaries)
def test_what_was_written_is_read(written: Summary) -> None:
    assert decode(encode(written)) == written


def test_a_longer_and_a_shorter_body_are_read() -> None:
    schema, body = encode(summary())[:1], msgspec.msgpack.decode(encode(summary())[1:])
    longer = [*body, "of a later release"]
    longer[4] = [[*each, {"of": "a later release"}] for each in body[4]]
    assert decode(schema + msgspec.msgpack.encode(longer)) == summary()
    shortest = decode(schema + msgspec.msgpack.encode(["pod-a", 1, "chat", 1000]))
    assert shortest == Summary("pod-a", 1, "chat", 1000)


def test_outcomes_of_a_later_release_are_kept_as_others() -> None:
    ended = {0: 3, 63: 2, 62: 1, 64 + 40: 5, 64 * 9 + 1: 4}
    body = ["pod-a", 1, "chat", 1000, [[ONE, "v1", ended, {0: 1, 9: 2}]]]
    (each,) = decode(b"\x01" + msgspec.msgpack.encode(body)).endpoints
    assert each.ended == {
        (Ending.COMPLETE, S): 3,
        (None, S): 3,
        (None, F): 5,
        (Ending.CONNECT_FAILED, Result.IGNORED): 4,
    }
    assert each.copies == {S: 1, Result.IGNORED: 2}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"", "an empty summary", id="nothing"),
        pytest.param(b"\x02" + encode(summary())[1:], "schema 2", id="of a later schema"),
        pytest.param(b"hello", "schema 104", id="foreign"),
        pytest.param(b"\x01hello", "no summary", id="foreign after the schema"),
        pytest.param(b"\x01" + b"\x91" * 100_000, "no summary", id="too deep"),
        pytest.param(b"\x01" + msgspec.msgpack.encode({"observer": "a"}), "no summary", id="no array"),
        pytest.param(b"\x01" + msgspec.msgpack.encode(["a", 1, "chat", -1]), "a count", id="less than nothing"),
        pytest.param(b"\x01" + bytes(MAX_SUMMARY_BYTES), "too many", id="too long"),
        pytest.param(encode(summary()) + b"\x00", "no summary", id="with a tail"),
        pytest.param(
            b"\x01" + msgspec.msgpack.encode(["a", 1, "chat", 1, [["x", "v1", {0: MOST_COUNTED + 1}]]]),
            "a count",
            id="more than ever was",
        ),
        pytest.param(
            b"\x01" + msgspec.msgpack.encode(["a", 1, "chat", 1, [["x", "v1", {}, {}, {}, 0, [1, -1, 0, 0, 0, 0]]]]),
            "a count",
            id="evidence of less than nothing",
        ),
        pytest.param(
            b"\x01" + msgspec.msgpack.encode(["a", 1, "chat", 1, [["x", "v1", {}, {}, {}, 0, [1, 1, 0, 0.5, 0, 0]]]]),
            "no summary",
            id="a fraction",
        ),
        pytest.param(
            b"\x01" + msgspec.msgpack.encode(["a", 1, "chat", 1, [], {}, {}, 0, False, {"z": [{3: -1}, 0, 0]}]),
            "a count",
            id="first tokens of a zone that never came",
        ),
    ],
)
def test_other_bytes_are_unreadable(data: bytes, words: str) -> None:
    with pytest.raises(Unreadable, match=words):
        decode(data)


def test_every_truncation_is_unreadable() -> None:
    whole = encode(summary())
    for size in range(len(whole)):
        with pytest.raises(Unreadable):
            decode(whole[:size])


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_unreadable(data: bytes) -> None:
    try:
        decode(b"\x01" + data)
    except Unreadable:
        pass


def test_a_busy_endpoint_costs_some_sixty_bytes_a_second() -> None:
    rng = Random(1)
    sketches = [dict.fromkeys((round(rng.gauss(55, 4)) for _ in range(40)), 3) for _ in range(10)]
    ten = tuple(
        EndpointSummary(
            EndpointKey(f"10.20.30.{number}:8000"),
            "v1",
            {(Ending.COMPLETE, S): 40, (Ending.SERVER_ERROR, F): 1, (Ending.CLIENT_LEFT, Result.IGNORED): 2},
            {},
            sketches[number],
            12,
            Counts(EndpointKey(f"10.20.30.{number}:8000"), 40, 1, 2, -12.3, 41, 4.2),
        )
        for number in range(10)
    )
    size = len(encode(Summary("chat-7f9c5d-x2x4p", 1_764_475_200_000, "chat", 1000, ten)))
    assert 500 < size < 1000


# Of rollouts.


OBSERVED = Tally("r1", 2, {0: 40, 700: 3, KEYS - 1: 1})


def test_tally_of_a_rollout_comes_back_and_its_bytes_are_what_other_releases_read() -> None:
    told = Observed(7, OBSERVED, False)
    assert encode_trial(told) == bytes.fromhex("930793a2723102830028cd02bc03ce000effff01c2")
    assert decode_trial(encode_trial(told)) == told
    longer = msgspec.msgpack.encode([7, ["r1", 2, OBSERVED.counts, "of a later release"], False, "and more"])
    assert decode_trial(longer) == told
    assert decode_trial(msgspec.msgpack.encode([7, ["r1", 2, OBSERVED.counts]])).whole


@pytest.mark.parametrize(
    "body",
    [
        pytest.param([-1, ["r1", 2, {0: 1}]], id="part"),
        pytest.param([0, ["r1", -1, {0: 1}]], id="step"),
        pytest.param([0, ["r" * 257, 0, {0: 1}]], id="id"),
        pytest.param([0, ["r1", 0, {KEYS: 1}]], id="key"),
        pytest.param([0, ["r1", 0, {-1: 1}]], id="key below"),
        pytest.param([0, ["r1", 0, {0: 0}]], id="nothing"),
        pytest.param([0, ["r1", 0, {0: -1}]], id="less than nothing"),
        pytest.param([0, ["r1", 0, {0: 1 << 60}]], id="more than ever was"),
        pytest.param([0, ["r1", 0, {0: 0.5}]], id="fraction"),
        pytest.param([0, ["r1", 0, dict.fromkeys(range(MOST_KEYS + 1), 1)]], id="too many"),
        pytest.param([0, ["r1", 0]], id="short"),
        pytest.param([0], id="none"),
        pytest.param({"part": 0}, id="no array"),
        pytest.param([0, {"rollout": "r1"}], id="no array within"),
    ],
)
def test_what_is_no_tally_of_a_rollout_is_unreadable_and_hides_nothing(body: object) -> None:
    data = msgspec.msgpack.encode(body)
    with pytest.raises(Unreadable, match="no tally of a rollout"):
        decode_trial(data)
    whole = replace(summary(), trial=data)
    assert decode(encode(whole)) == whole


@given(st.binary(max_size=100))
def test_no_bytes_of_a_tally_do_more_than_be_unreadable(data: bytes) -> None:
    try:
        told = decode_trial(data)
    except Unreadable:
        return
    assert told.part >= 0 and told.tally.valid()


def test_observed_rollout_is_told_for_itself_among_the_other_summaries() -> None:
    fleet, service = fleet_of(ONE, TWO, retention_s=60.0)
    teller = Teller("pod-a", 1000, 0.0)
    first = teller.tell_trial(service, b"one")
    (other,) = teller.tell(fleet, tally_of(ONE), 1.0)
    second = teller.tell_trial(service, b"two")
    told = [decode(share.blob) for share in (first, other, second)]
    assert [(each.seq, each.trial, len(each.endpoints)) for each in told] == [
        (1000, b"one", 0),
        (1001, b"", 1),
        (1002, b"two", 0),
    ]
    assert (first.service, first.keep_ms, told[1].took_ms) == ("chat", 60_000, 1000)


# Telling.


def fleet_of(*keys: str, retention_s: float = 3600.0) -> tuple[Fleet, ServiceState]:
    fleet = Fleet(lambda: 0.5)
    endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys)
    service = Service(name="chat", endpoints=endpoints, shared=Shared(retention_s=LongSeconds(retention_s)))
    fleet.apply(Snapshot(version=1, services=(service,)), 0.0)
    return fleet, fleet.services[ServiceName("chat")]


def tally_of(*keys: EndpointKey) -> list[ServiceTally]:
    return [ServiceTally("chat", [EndpointTally(key, "v1", {(Ending.COMPLETE, S): 3}) for key in keys])]


def failed(service: ServiceState, key: EndpointKey, now: float) -> None:
    node = service.nodes[key]
    permit = node.breaker.acquire(now)
    assert not hasattr(permit, "retry_at")
    expectation = evidence.expect(service, node, permit, "m", 100, None)
    evidence.ended(service, node, permit, expectation, Ending.SERVER_ERROR, F, 0.0, now)


def test_where_nothing_happened_nothing_is_told() -> None:
    fleet, _ = fleet_of(ONE, TWO)
    assert Teller("pod-a", 1000, 0.0).tell(fleet, [], 1.0) == []


def test_tally_and_evidence_of_an_endpoint_are_told_together_and_once() -> None:
    fleet, service = fleet_of(ONE, TWO, retention_s=7200.0)
    teller = Teller("pod-a", 1000, 0.0)
    failed(service, ONE, 0.5)
    failed(service, TWO, 0.6)
    service.nodes[ONE].in_flight = 4
    service.nodes[TWO].in_flight = 1
    (share,) = teller.tell(fleet, tally_of(ONE), 1.25)
    assert (share.service, share.keep_ms) == ("chat", 7_200_000)
    told = decode(share.blob)
    assert (told.observer, told.seq, told.service, told.took_ms) == ("pod-a", 1000, "chat", 1250)
    first, second = told.endpoints
    assert (first.endpoint, first.in_flight, first.ended) == (ONE, 4, {(Ending.COMPLETE, S): 3})
    assert first.counts is not None and first.counts.errors == 1
    assert (second.endpoint, second.version, second.in_flight, second.ended) == (TWO, "v1", 1, {})
    assert second.counts is not None and second.counts.errors == 1
    (again,) = teller.tell(fleet, tally_of(ONE), 2.25)
    (only,) = decode(again.blob).endpoints
    assert only.counts is None
    assert decode(again.blob).seq == 1001


def test_evidence_of_an_endpoint_of_two_versions_is_told_once() -> None:
    fleet, service = fleet_of(ONE, TWO)
    failed(service, ONE, 0.5)
    both = [EndpointTally(ONE, version, {(Ending.COMPLETE, S): 1}) for version in ("v1", "v2")]
    (share,) = Teller("pod-a", 1, 0.0).tell(fleet, [ServiceTally("chat", both)], 1.0)
    assert [each.counts is None for each in decode(share.blob).endpoints] == [False, True]


def test_kinds_and_sessions_are_told_once_and_without_an_endpoint_too() -> None:
    fleet, service = fleet_of(ONE)
    teller = Teller("pod-a", 1, 0.0)
    kind = service.request_breaker("POST /v1/completions", 0.0)
    service.record_request(kind, FRESH, S, 0.0)
    for name in ("user-1", "x" * 300):
        service.record_session(service.session(SessionId(name), 0.0), FRESH, F, 0.0)
    (share,) = teller.tell(fleet, [], 1.0)
    told = decode(share.blob)
    assert (told.kinds, told.sessions, told.endpoints) == ({"POST /v1/completions": (1, 0)}, {"user-1": (0, 1)}, ())
    assert teller.tell(fleet, [], 2.0) == []


def test_of_many_sessions_the_first_are_told() -> None:
    fleet, service = fleet_of(ONE)
    for number in range(MOST_SESSIONS + 5):
        service.record_session(service.session(SessionId(f"user-{number}"), 0.0), FRESH, F, 0.0)
    (share,) = Teller("pod-a", 1, 0.0).tell(fleet, [], 1.0)
    assert len(decode(share.blob).sessions) == MOST_SESSIONS


def test_many_endpoints_are_told_in_several_blobs() -> None:
    keys = [EndpointKey(f"pod-{number}:8000") for number in range(MOST_ENDPOINTS + 1)]
    fleet, _ = fleet_of(*keys)
    shares = Teller("pod-a", 1, 0.0).tell(fleet, tally_of(*keys), 1.0)
    told = [decode(share.blob) for share in shares]
    assert [(each.seq, len(each.endpoints)) for each in told] == [(1, MOST_ENDPOINTS), (2, 1)]


def test_the_longest_addresses_fit() -> None:
    key = EndpointKey("h" * 505)
    sketch = dict.fromkeys(range(128), MOST_COUNTED)
    ended: Ended = {(ending, result): MOST_COUNTED for ending in Ending for result in Result}
    full = EndpointSummary(key, "v" * 63, ended, {}, sketch, MOST_COUNTED, COUNTS)
    assert len(encode(Summary("o" * 253, 2**53, "s" * 63, 1000, (full,) * MOST_ENDPOINTS))) < MAX_SUMMARY_BYTES


# Hearing.


def test_what_others_saw_is_news_once() -> None:
    heard = Heard("pod-b")
    assert news(heard, summary(7), 1000, 1000) == [COUNTS]
    assert news(heard, summary(7), 1000, 1001) == []
    assert news(heard, summary(6), 1000, 1001) == []
    assert news(heard, summary(8), 1001, 1001) == [COUNTS]
    assert news(heard, summary(1, "pod-c"), 1001, 1001) == [COUNTS]
    assert heard.dropped == 2


def test_our_own_is_no_news() -> None:
    heard = Heard("pod-a")
    assert news(heard, summary(7), 1000, 1000) == []
    assert heard.dropped == 0


def test_what_comes_late_is_no_news() -> None:
    heard = Heard("pod-b")
    assert news(heard, summary(7), 1000, 1001 + OLD_MS) == []
    assert news(heard, summary(7), 1000, 1000 + OLD_MS) == [COUNTS]
    assert heard.dropped == 1


def test_an_observer_whose_clock_went_back_is_heard_again_after_a_while() -> None:
    heard = Heard("pod-b")
    news(heard, summary(1000), 0, 0)
    assert news(heard, summary(5), FORGOTTEN_MS - 1, FORGOTTEN_MS - 1) == []
    assert news(heard, summary(6), FORGOTTEN_MS, FORGOTTEN_MS) == [COUNTS]
    assert news(heard, summary(7), FORGOTTEN_MS, FORGOTTEN_MS) == [COUNTS]


def test_endpoints_without_evidence_are_no_news() -> None:
    assert news(Heard("pod-b"), summary(counts=None), 0, 0) == []


def test_observers_are_forgotten_when_they_are_too_many() -> None:
    heard = Heard("pod-b")
    for number in range(MOST_OBSERVERS + 10):
        news(heard, summary(7, f"pod-{number + 100}"), 0, 0)
    assert news(heard, summary(7, f"pod-{MOST_OBSERVERS + 109}"), 0, 0) == [], "the last is known"
    assert news(heard, summary(7, "pod-100"), 0, 0) == [COUNTS], "the first is not"


def test_what_one_sidecar_tells_opens_it_at_another() -> None:
    keys = [ONE, TWO, EndpointKey("10.0.0.3:8000"), EndpointKey("10.0.0.4:8000")]
    (here, ours), (there, theirs) = fleet_of(*keys), fleet_of(*keys)
    tellers = Teller("pod-a", 1, 0.0), Heard("pod-b")
    moved = []
    for second in range(1, 40):
        for key in keys:
            for count in range(10):
                node, now = ours.nodes[key], second + count / 10
                permit = node.breaker.acquire(now)
                if hasattr(permit, "retry_at"):
                    continue
                expectation = evidence.expect(ours, node, permit, "m", 100, None)
                # One in three fails: less than the fixed rules ask for.
                bad = key == ONE and second > 25 and count % 3 == 0
                ending, result = (Ending.SERVER_ERROR, F) if bad else (Ending.COMPLETE, S)
                evidence.ended(ours, node, permit, expectation, ending, result, 0.0, now)
        for share in tellers[0].tell(here, [], second + 1.0):
            fresh = news(tellers[1], decode(share.blob), 1000 * second, 1000 * second)
            moved += evidence.absorb(theirs, fresh, second + 1.0)
        here.tick(second + 1.0)
        there.tick(second + 1.0)
    assert [(each.key, each.new.value) for each in moved] == [(ONE, "open")]
