"""What a rollout's trial is told of attempts: once each, on whom it was, with what is known and nothing else."""

from collections import Counter
from math import log

import pytest
from msgspec.structs import replace

from sidecar.core.canary import FINISHES, LEAST_FIRST_S, LEAST_GAP_S, Trial, group_of
from sidecar.core.claim import FINISH, FIRST_TOKEN, GAP, LENGTH, LENGTH_PER_LN, PER_LN
from sidecar.core.table import Plan, Step
from sidecar.core.verdict import BUCKETS, CLASSES, GROUPS
from sidecar.policy.schema import Endpoint, Retry
from tests.proxy.bench import Bench, chat, get, service
from tests.proxy.fakes import JSON, FakeLink, head_of
from tests.proxy.test_probe import on_trial
from tests.under_test import COMPLETION, DONE, ROLE, error_body, event, token
from tests.under_test import FINISH as STOP

OUTCOME = 0
V1, V2 = 0, 1
PLAN = Plan("v1", (Step(1000, 10.0, 10),))
USAGE = event(b'{"id":"c1","object":"chat.completion.chunk","choices":[],"usage":{"completion_tokens":21}}')


class Observed:
    """A bench with a rollout of v2 under way, and what its trial was told."""

    def __init__(self, *versions: str, **changes: object) -> None:
        endpoints = tuple(Endpoint(url=f"http://e{n}:80", version=version) for n, version in enumerate(versions, 1))
        self.bench = Bench(replace(service(), endpoints=endpoints, **changes))
        self.trial = Trial("r1", 0, "v2", "v1", PLAN)
        self.state = self.bench.state
        self.state.trial = self.trial
        self.state.trial_since = self.bench.clock.now

    @property
    def link(self) -> FakeLink:
        return self.bench.link

    def told(self) -> Counter[tuple[int, int, int]]:
        """How often what was told: measure, arm, bucket; of all sizes of prompts."""
        tally = self.trial.take()
        found: Counter[tuple[int, int, int]] = Counter()
        for key, count in ({} if tally is None else tally.counts).items():
            rest, bucket = divmod(key // GROUPS, BUCKETS)
            measure, arm = divmod(rest // CLASSES, 2)
            found[measure, arm, bucket] += count
        return found

    def stream(self, *parts: bytes, gap_s: float = 0.5) -> None:
        """The engine's stream, part by part."""
        self.link.heads()
        for number, part in enumerate(parts):
            if number:
                self.bench.clock.advance(gap_s)
            self.link.says(part)
        self.link.ends()


def first_bucket(seconds: float) -> int:
    return int(log(seconds / LEAST_FIRST_S) * PER_LN)


def gap_bucket(seconds: float) -> int:
    return int(log(seconds / LEAST_GAP_S) * PER_LN)


def length_bucket(tokens: int) -> int:
    return int(log(tokens) * LENGTH_PER_LN)


def test_whole_stream_tells_all_of_itself() -> None:
    seen = Observed("v2")
    seen.bench.begin()
    seen.bench.clock.advance(0.3)
    seen.stream(ROLE + token(1), token(2), token(3) + STOP + DONE)
    assert seen.told() == {
        (OUTCOME, V2, 0): 1,
        (FIRST_TOKEN, V2, first_bucket(0.3)): 1,
        (GAP, V2, gap_bucket(0.5)): 1,
        (LENGTH, V2, length_bucket(3)): 1,
        (FINISH, V2, FINISHES["stop"]): 1,
    }
    assert not seen.told(), "it was told twice"


def test_answers_of_a_session_are_told_as_of_its_group() -> None:
    seen = Observed("v2")
    seen.bench.begin(chat(session="user-1"))
    seen.bench.clock.advance(0.3)
    seen.stream(ROLE + token(1), token(2) + STOP + DONE)
    tally = seen.trial.take()
    assert tally is not None and {key % GROUPS for key in tally.counts} == {group_of("user-1")}


def test_engines_own_count_of_tokens_goes_before_events() -> None:
    seen = Observed("v1")
    seen.bench.begin()
    seen.bench.clock.advance(0.3)
    seen.stream(ROLE + token(1), token(2), token(3) + STOP + USAGE + DONE)
    told = seen.told()
    assert told[LENGTH, V1, length_bucket(21)] == 1 and told[GAP, V1, gap_bucket(1.0 / 20)] == 1


def test_plain_answer_has_no_times() -> None:
    seen = Observed("v1")
    seen.bench.begin(chat(stream=False))
    seen.link.heads(head_of(200, JSON, len(COMPLETION))).says(COMPLETION).ends()
    assert seen.told() == {(OUTCOME, V1, 0): 1, (LENGTH, V1, 0): 1, (FINISH, V1, FINISHES["stop"]): 1}


def test_error_in_band_counts_against_its_version() -> None:
    seen = Observed("v2")
    seen.bench.begin()
    seen.bench.clock.advance(0.3)
    seen.stream(token(1), b"data: " + error_body() + b"\n\n" + DONE)
    told = seen.told()
    assert [key for key in told if key[0] == OUTCOME] == [(OUTCOME, V2, 2)]
    assert not any(key[0] in (LENGTH, FINISH) for key in told)


def test_client_who_left_or_erred_is_no_evidence_of_the_outcome() -> None:
    seen = Observed("v2")
    exchange = seen.bench.begin().exchange
    assert exchange is not None
    seen.bench.clock.advance(4.0)
    exchange.client_left()
    assert seen.told() == {(FIRST_TOKEN, V2, first_bucket(4.0)): 1}, "how long it waited is known"
    seen.bench.begin()
    body = error_body(b"too long", b"400", b"BadRequestError")
    seen.link.heads(head_of(400, JSON, len(body))).says(body).ends()
    assert not any(measure == OUTCOME for measure, _, _ in seen.told())


def test_failed_attempt_counts_though_another_served_the_request() -> None:
    seen = Observed("v2", "v1", retry=Retry(attempts=2, budget_ratio=1.0, budget_min=10))
    seen.bench.begin()
    first = seen.link
    first.lost()
    assert seen.link is not first
    seen.stream(token(1), STOP + DONE)
    outcomes = {key: count for key, count in seen.told().items() if key[0] == OUTCOME}
    assert len(outcomes) == 2 and set(outcomes.values()) == {1}
    assert {arm for _, arm, _ in outcomes} == {V1, V2}


@pytest.mark.parametrize("when", ["before", "amid"])
def test_slow_client_is_no_slow_engine(when: str) -> None:
    seen = Observed("v2")
    exchange = seen.bench.begin().exchange
    assert exchange is not None
    if when == "before":
        exchange.client_paused()
    seen.bench.clock.advance(0.3)
    seen.link.heads().says(token(1))
    seen.bench.clock.advance(0.1)
    if when == "amid":
        exchange.client_paused()
        seen.link.says(token(2))
    seen.bench.clock.advance(9.0)
    exchange.client_resumed()
    seen.bench.clock.advance(0.1)
    seen.link.says(token(3) + STOP + DONE).ends()
    told = seen.told()
    assert not any(key[0] == GAP for key in told)
    first = [key for key in told if key[0] == FIRST_TOKEN]
    assert first == ([] if when == "before" else [(FIRST_TOKEN, V2, first_bucket(0.3))])
    assert told[OUTCOME, V2, 0] == 1


def test_tokens_of_one_read_have_no_gap() -> None:
    seen = Observed("v2")
    seen.bench.begin()
    seen.bench.clock.advance(0.3)
    seen.stream(token(1) + token(2) + token(3) + STOP + DONE)
    assert not any(key[0] == GAP for key in seen.told())


def test_what_began_before_the_step_is_not_observed() -> None:
    seen = Observed("v2")
    seen.bench.begin()
    link = seen.link
    seen.bench.clock.advance(1.0)
    seen.state.trial_since = seen.bench.clock.now
    link.heads().says(token(1) + STOP + DONE).ends()
    assert not seen.told()
    seen.bench.begin()
    seen.stream(token(1) + STOP + DONE)
    assert seen.told()[OUTCOME, V2, 0] == 1


def test_what_is_no_inference_is_not_observed() -> None:
    seen = Observed("v2")
    seen.bench.begin(get())
    seen.link.heads(head_of(500, JSON, 0)).ends()
    assert not seen.told()


def test_given_up_before_its_first_token_is_later_than_all() -> None:
    seen = Observed("v2")
    seen.bench.begin()
    seen.link.heads()
    seen.bench.clock.advance(31.0)
    told = seen.told()
    assert told[FIRST_TOKEN, V2, BUCKETS - 1] == 1 and sum(told[OUTCOME, V2, n] for n in range(1, BUCKETS)) == 1


def test_copies_are_not_observed() -> None:
    """They go to endpoints on trial alone: of a version that has some, more of them would count."""
    bench, _, copy, own = on_trial()
    trial = bench.state.trial = Trial("r1", 0, "v2", "v1", PLAN)
    bench.state.trial_since = 0.0
    for link in (copy, own):
        link.heads().says(token(1) + STOP + DONE).ends()
    assert [record.copy for record in bench.recorder.attempts[-2:]] == [True, False]
    tally = trial.take()
    assert tally is not None and sum(n for key, n in tally.counts.items() if key < 2 * CLASSES * BUCKETS) == 1
