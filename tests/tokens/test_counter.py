"""Counting in the time that a request has: which way is taken, and that none fails a request."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from sidecar.policy.schema import Service
from sidecar.proxy.ports import Counted, NoCounter, TokenCounter
from sidecar.tokens import counter as module
from sidecar.tokens.counter import Counter
from sidecar.tokens.overhead import PER_MESSAGE, PER_REQUEST
from sidecar.tokens.texts import MOST_BYTES
from sidecar.tokens.tokenizer import Tokenizer
from tests.clock import Clock

WORDS = "some words and a few more of them, "


class Loop(Clock):
    """Virtual time; what threads call is called when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = SimpleQueue()

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object:
        self.calls.put((callback, args))
        return None

    def hear(self) -> None:
        callback, args = self.calls.get(timeout=10)
        callback(*args)


class Request:
    """Somebody who waits."""

    def __init__(self) -> None:
        self.woken_times = 0

    def woken(self) -> None:
        self.woken_times += 1


class Stage:
    """A counter with one service that has a tokenizer, and one that has none."""

    def __init__(self, path: Path) -> None:
        self.loop = Loop()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.counter = Counter(self.loop, time.perf_counter, self.say, salt=5)
        self.services = [Service(name="exact", tokenizer=str(path)), Service(name="guess")]
        self.read()

    def say(self, level: str, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def read(self) -> None:
        done: list[bool] = []
        self.counter.use(self.services, lambda: done.append(True))
        while not done:
            self.loop.hear()

    def ask(self, prompt: bytes, time_s: float = 10.0, waiter: Request | None = None) -> Counted | None:
        return self.counter.count("exact", "m", prompt, time_s, waiter or Request())

    def count(self, prompt: bytes) -> Counted:
        waiter = Request()
        counted = self.ask(prompt, 10.0, waiter)
        if counted is None:
            while not waiter.woken_times:
                self.loop.hear()
            assert waiter.woken_times == 1
            counted = self.ask(prompt, 10.0, waiter)
            assert counted is not None
        return counted


@pytest.fixture
def stage(tiny_path: Path) -> Iterator[Stage]:
    made = Stage(tiny_path)
    yield made
    made.counter.close()
    assert made.counter.join(10)


def chat(*texts: str) -> bytes:
    return json.dumps([{"role": "user", "content": text} for text in texts], ensure_ascii=False).encode()


LONG = chat(WORDS * 500)


def overhead(messages: int) -> int:
    return round(PER_MESSAGE * messages + PER_REQUEST)


def test_a_short_prompt_is_counted_on_the_spot(stage: Stage, tiny: Tokenizer) -> None:
    counted = stage.ask(chat("hello"), 0.0)
    assert counted is not None and counted.how == "exact"
    assert counted.tokens == tiny.count("hello") + overhead(1)
    assert stage.counter.counts == {"exact": 1, "cached": 0, "estimated": 0}


def test_a_long_one_is_waited_for(stage: Stage, tiny: Tokenizer) -> None:
    waiter = Request()
    assert stage.ask(LONG, 10.0, waiter) is None
    assert stage.counter.pending_bytes == len(LONG)
    stage.loop.hear()
    assert waiter.woken_times == 1
    counted = stage.ask(LONG, 9.0, waiter)
    assert counted is not None and counted.how == "exact"
    assert counted.tokens == tiny.count(WORDS * 500) + overhead(1)
    assert stage.counter.pending_bytes == 0 and stage.counter.counted_bytes == len(LONG)
    assert stage.loop.armed == []


def test_a_conversation_that_goes_on_is_counted_on_the_spot(stage: Stage) -> None:
    before = stage.count(LONG)
    counted = stage.ask(chat(WORDS * 500, "yes", "and then?"), 0.0)
    assert counted is not None and counted.how == "cached" and counted.tokens > before.tokens
    assert stage.counter.counts["cached"] == 1


def test_a_short_end_is_counted_with_the_next_that_makes_it_long(stage: Stage, tiny: Tokenizer) -> None:
    said = [WORDS * 500]
    stage.count(chat(*said))
    for answer in ("yes", "and then?", WORDS * 20):
        said.append(answer)
        counted = stage.count(chat(*said))
        exact = sum(map(tiny.count, said)) + overhead(len(said))
        assert counted.how == "cached" and abs(counted.tokens - exact) < exact / 100
    assert counted.tokens == exact


def test_without_time_a_long_one_is_estimated_and_its_next_turn_known(stage: Stage) -> None:
    counted = stage.ask(LONG, 0.0001)
    assert counted is not None and counted.how == "estimated"
    stage.loop.hear()
    again = stage.ask(chat(WORDS * 500, "more"), 0.0)
    assert again is not None and again.how == "cached"


def test_a_request_whose_time_is_over_is_estimated_and_the_count_kept(stage: Stage) -> None:
    waiter = Request()
    assert stage.ask(LONG, 10.0, waiter) is None
    stage.loop.advance(10.0)
    assert waiter.woken_times == 1 and stage.counter.late == 1
    counted = stage.ask(LONG, 0.0, waiter)
    assert counted is not None and counted.how == "estimated"
    stage.loop.hear()
    assert waiter.woken_times == 1
    known = stage.ask(LONG, 0.0)
    assert known is not None and known.how == "cached"


def test_a_count_that_comes_after_the_time_and_before_the_question_is_taken(stage: Stage) -> None:
    waiter = Request()
    assert stage.ask(LONG, 10.0, waiter) is None
    stage.loop.advance(10.0)
    stage.loop.hear()
    counted = stage.ask(LONG, 0.0, waiter)
    assert counted is not None and counted.how == "exact" and waiter.woken_times == 1


def test_who_left_is_not_woken(stage: Stage) -> None:
    waiter = Request()
    assert stage.ask(LONG, 10.0, waiter) is None
    stage.counter.forget(waiter)
    stage.counter.forget(waiter)
    stage.loop.hear()
    stage.loop.advance(20.0)
    assert waiter.woken_times == 0 and stage.counter.left == 1
    assert stage.counter.pending_bytes == 0 and stage.loop.armed == []


def test_two_wait_for_one_prompt_each(stage: Stage) -> None:
    one, two = Request(), Request()
    assert stage.ask(LONG, 10.0, one) is None and stage.ask(LONG, 10.0, two) is None
    stage.loop.hear()
    stage.loop.hear()
    assert one.woken_times == two.woken_times == 1
    answers = [stage.ask(LONG, 1.0, each) for each in (one, two)]
    assert answers[0] is not None and answers[1] is not None and answers[0].tokens == answers[1].tokens


def test_what_would_wait_too_long_is_estimated(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.tokens.pool.MOST_BYTES", 1000)
    assert stage.ask(LONG, 10.0) is None
    counted = stage.ask(chat(WORDS * 501), 10.0)
    assert counted is not None and counted.how == "estimated" and stage.counter.refused == 1
    stage.loop.hear()


ODD: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("no JSON", b"\x00\xff\xfe"),
    ("another API", b'{"query":"q","documents":["d"]}'),
    ("a lone half", b'{"messages":[{"role":"user","content":"\\ud800"}]}'),
    ("no UTF-8", b'[{"role":"user","content":"\xff\xfe"}]'),
    ("NUL", b'[{"role":"user","content":"\\u0000"}]'),
    ("no list of messages", b'[{"role":"user"},1]'),
    ("deep", b"[" * 50_000),
    ("null", b"null"),
    ("ids", b"[1,2,3]"),
    ("many messages", b"[" + b",".join([b'{"role":"user","content":"a"}'] * 5000) + b"]"),
    ("tools that are numbers", b'[{"role":"user","content":"a"}]\n[1,2]'),
]


@pytest.mark.parametrize("prompt", [case[1] for case in ODD], ids=[case[0] for case in ODD])
@pytest.mark.parametrize("time_s", [0.0, 10.0])
def test_every_prompt_has_a_count(stage: Stage, prompt: bytes, time_s: float) -> None:
    waiter = Request()
    counted = stage.ask(prompt, time_s, waiter)
    if counted is None:
        stage.loop.hear()
        counted = stage.ask(prompt, time_s, waiter)
    assert counted is not None and counted.tokens >= 1


def test_a_service_without_a_tokenizer_is_estimated(stage: Stage) -> None:
    counted = stage.counter.count("guess", "m", LONG, 10.0, Request())
    assert counted is not None and counted.how == "estimated"
    assert stage.counter.why_not("guess") == "it has no tokenizer" and stage.counter.why_not("exact") == ""


def test_what_the_tokenizer_raises_is_an_estimate(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panics(*_: object) -> int:
        raise Panic("index out of bounds")

    monkeypatch.setattr(Tokenizer, "count", panics)
    short = stage.ask(chat("a"))
    assert short is not None and short.how == "estimated"
    assert stage.count(LONG).how == "estimated"
    assert stage.counter.failed == 2
    assert [event for event, _ in stage.events if event == "tokenizer_failed"] == ["tokenizer_failed"] * 2


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [None, b"{}"], ids=["missing", "bad"])
def test_a_file_that_cannot_be_used_is_told_and_prompts_are_estimated(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "tokenizer.json").write_bytes(data)
    stage = Stage(tmp_path / "tokenizer.json")
    ((event, fields),) = stage.events
    assert event == "tokenizer_unusable" and fields["why"].endswith("; prompts are estimated")
    counted = stage.ask(LONG)
    assert counted is not None and counted.how == "estimated"
    assert stage.counter.why_not("exact") == fields["why"]
    stage.counter.close()


def test_before_its_file_is_read_a_service_is_estimated(tiny_path: Path) -> None:
    loop = Loop()
    counter = Counter(loop, time.perf_counter, lambda *_, **__: None, salt=1)
    counter.use([Service(name="exact", tokenizer=str(tiny_path))])
    counted = counter.count("exact", "m", chat("a"), 10.0, Request())
    assert counted is not None and counted.how == "estimated"
    assert counter.why_not("exact") == "its tokenizer has not been read yet"
    counter.close()
    assert counter.join(10)


def test_a_file_that_changed_is_read_again_and_old_counts_are_gone(
    stage: Stage, tiny_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tiny_path.read_bytes())
    stage.services = [Service(name="exact", tokenizer=str(tmp_path))]
    stage.read()
    stage.count(LONG)
    stage.read()
    assert stage.count(LONG).how == "cached", "nothing changed"
    file.write_bytes(tiny_path.read_bytes() + b"\n")
    stage.read()
    assert stage.count(LONG).how == "exact"
    file.write_bytes(b"{}")
    stage.read()
    assert stage.events[-1][1]["why"].endswith("; the one that was read before stays")
    assert stage.count(LONG).how == "cached"


def test_a_count_under_way_while_its_file_changes_is_not_kept(stage: Stage, tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tiny_path.read_bytes())
    stage.services = [Service(name="exact", tokenizer=str(file))]
    stage.read()
    waiter = Request()
    assert stage.ask(LONG, 10.0, waiter) is None
    file.write_bytes(tiny_path.read_bytes() + b"\n")
    os.utime(file)
    stage.read()  # hears of the count, too
    counted = stage.ask(LONG, 10.0, waiter)
    assert counted is not None
    assert stage.count(chat(WORDS * 500, "more")).tokens > counted.tokens


def test_a_service_that_has_a_tokenizer_no_more_is_estimated(stage: Stage) -> None:
    stage.counter.use([Service(name="exact")])
    counted = stage.ask(chat("a"))
    assert counted is not None and counted.how == "estimated" and len(stage.counter.prefixes) == 0


def test_a_policy_without_tokenizers_starts_no_thread() -> None:
    counter = Counter(Loop(), time.perf_counter, lambda *_, **__: None, salt=1)
    done: list[bool] = []
    counter.use([Service(name="guess")], lambda: done.append(True))
    assert done == [True] and counter.join(0.0)


# --- what engines report ----------------------------------------------------------------------------------------------


def test_what_a_template_adds_is_learnt_of_what_is_reported(stage: Stage, tiny: Tokenizer) -> None:
    for number in range(12):
        texts = [f"question {number}"] * (1 + number % 4)
        stage.count(chat(*texts))
        told = sum(tiny.count(text) for text in texts) + 7 * len(texts) + 11
        stage.counter.reported("exact", "m", chat(*texts), told)
    assert stage.count(chat("a", "b")).tokens == tiny.count("a") + tiny.count("b") + 25


def test_an_engine_that_reports_nonsense_teaches_nothing_and_is_told_once(stage: Stage) -> None:
    prompt = chat(WORDS * 20)
    right = stage.count(prompt).tokens
    (model,) = stage.counter.models()
    before = model.estimator.learnt
    for _ in range(40):
        stage.counter.reported("exact", "m", prompt, 90_000)
    assert stage.counter.lies == 40 and model.estimator.learnt == before
    assert [event for event, _ in stage.events].count("tokenizer_disagrees") == 1
    assert stage.count(prompt).tokens == right


def test_estimates_learn_of_reports_where_there_is_no_tokenizer(stage: Stage) -> None:
    for number in range(120):
        prompt = chat(WORDS * (1 + number % 40) + str(number))
        stage.counter.reported("guess", "m", prompt, len(prompt) // 3)
    counted = stage.counter.count("guess", "m", chat(WORDS * 33), 0.0, Request())
    assert counted is not None
    assert abs(counted.tokens / (len(chat(WORDS * 33)) / 3) - 1) < 0.05
    (model,) = stage.counter.models()
    assert model.reports == 120 and model.estimator.learnt == module.LEARN_ALL + 3, "one in eight"


def test_a_report_of_anything_is_harmless(stage: Stage) -> None:
    for _, prompt in ODD:
        for tokens in (-5, 0, 1, 10**12):
            stage.counter.reported("exact", "m", prompt, tokens)
            stage.counter.reported("guess", "m", prompt, tokens)
            stage.counter.reported("no such service", "m", prompt, tokens)
    assert stage.count(chat("a")).tokens >= 1


def test_models_that_clients_name_are_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MODELS", 3)
    for number in range(9):
        stage.counter.count("guess", f"m{number}", b'"a"', 0.0, Request())
    assert [model.model for model in stage.counter.models()] == ["m6", "m7", "m8"]


def test_a_name_as_long_as_a_body_is_not_kept(stage: Stage) -> None:
    stage.counter.count("guess", "m" * 1_000_000, b'"a"', 0.0, Request())
    assert [len(model.model) for model in stage.counter.models()] == [module.MOST_NAME]


def test_a_prompt_that_is_too_large_to_be_counted_is_not_even_looked_up(stage: Stage) -> None:
    walked = stage.counter.prefixes._walked_prompt
    counted = stage.ask(b'"%b"' % (b"a" * MOST_BYTES))
    assert counted is not None and counted.how == "estimated"
    assert stage.counter.prefixes._walked_prompt is walked


def test_both_counters_are_what_the_port_says(stage: Stage) -> None:
    counters: list[TokenCounter] = [stage.counter, NoCounter()]
    for each in counters:
        counted = each.count("guess", "m", chat("a"), 0.0, Request())
        assert counted is not None and counted.tokens >= 1 and counted.how == "estimated"
        each.reported("guess", "m", chat("a"), 3)
        each.forget(Request())
