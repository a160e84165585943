"""The real vLLM behind the real sidecar: what a client sees is what the engine said, or an honest end.

Real input for what the other tests show with a simulated engine. Each test starts its own sidecar with short deadlines
and quick breakers; the engine is shared until a test kills it. The order is that of the damage done.

What is compared with the direct answer is compared as bytes, with ids and times blanked out: greedy decoding of one
prompt says the same words each time. How many tokens share an event is the engine's mood, so streams are compared as
their sequence of *kinds* of events, and their text as a whole.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.client import CHAT, Answer, Exchange, answers, call, chat_body, post
from tests.engines.engine import KEEP_ALIVE_S, Vllm, VllmKeeper
from tests.engines.sidecar_process import Sidecar

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]  # an engine's start is 36-119 s

GAP_S = 2.0
FIRST_TOKEN_S = 4.0
OPEN_S = 2.0
OPEN_MAX_S = 4.0
ENDLESS = 30_000  # tokens: a minute's stream, so that nothing in a test ends by itself
SIGTERM_TRIES = 3
LATE_S = 1.5  # how much later than its deadline a cut may be seen
AT_ONCE_S = 0.5  # an answer of ours, on a machine that does other things too

POLICY = """\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    models: ["*"]
    endpoints:
      - {{url: "http://{engine}", engine: vllm, version: v1}}
    deadlines:
      {{connect: 1s, head: 60s, first_token: 4s, token_gap: 2s, tool_gap: 2s, total: 3m, idle_client: 30s}}
    retry: {{attempts: 1}}
    breakers:
      node:
        {{mode: enforce, consecutive: {consecutive}, open: 2s, open_max: 4s, probes: 1, successes: 1,
          min_closed_ratio: 0, adaptive: false}}
      session: {{mode: "off"}}
      request: {{mode: "off"}}
"""

Front = Callable[[int], Sidecar]


@pytest.fixture
def front(vllm: Vllm, tmp_path: Path) -> Iterator[Front]:
    """Starts the sidecar before the engine; the number is that of failures in a row that open the node breaker."""
    started: list[Sidecar] = []

    def start(consecutive: int) -> Sidecar:
        started.append(Sidecar(tmp_path, POLICY.format(engine=vllm.address, consecutive=consecutive)))
        return started[-1]

    yield start
    for sidecar in started:
        sidecar.stop()


# --- what the engine says arrives as it was said


@pytest.mark.parametrize(
    "options",
    [{}, {"stream_options": {"include_usage": True}}, {"n": 2, "temperature": 1, "seed": 7}],
    ids=["plain", "usage", "two-choices"],
)
def test_streamed_chat_is_the_engines(vllm: Vllm, front: Front, options: dict[str, object]) -> None:
    body = chat_body(stream=True, **options)
    direct, direct_events = _streamed(vllm.address, CHAT, body)
    sidecar = front(2)
    relayed, relayed_events = _streamed(sidecar.address, CHAT, body)

    assert (relayed.status, _end_to_end(relayed.headers)) == (200, _end_to_end(direct.headers))
    if "n" in options:  # whose turn it is differs
        assert sorted(set(_kinds(relayed_events))) == sorted(set(_kinds(direct_events)))
    else:
        assert _kinds(relayed_events) == _kinds(direct_events)
    assert _text(relayed_events) == _text(direct_events) != ""
    assert relayed_events[-1] == b"data: [DONE]"
    assert not relayed.cut
    (line,) = sidecar.requests(1)
    assert (line["result"], line["flag"], line["finish_reason"]) == ("success", "", "length")
    if "stream_options" in options:
        usage = _payload(relayed_events[-2])["usage"]
        assert usage == _payload(direct_events[-2])["usage"]
        assert isinstance(usage, dict)
        assert line["completion_tokens"] == usage["completion_tokens"] == 16
        assert line["prompt_tokens"] == usage["prompt_tokens"]


def test_whole_chat_is_the_engines(vllm: Vllm, front: Front) -> None:
    direct = call(vllm.address, "POST", CHAT, chat_body(), x_request_id="twin")
    sidecar = front(2)
    relayed = call(sidecar.address, "POST", CHAT, chat_body(), x_request_id="twin")

    assert (relayed.status, _end_to_end(relayed.headers)) == (200, _end_to_end(direct.headers))
    assert _blanked(relayed.body) == _blanked(direct.body)
    assert relayed.json()["id"] == direct.json()["id"] == "chatcmpl-twin"
    usage = relayed.json()["usage"]
    assert isinstance(usage, dict)
    (line,) = sidecar.requests(1)
    assert line["completion_tokens"] == usage["completion_tokens"] == 16
    assert (line["result"], line["finish_reason"], line["request_id"]) == ("success", "length", "twin")


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/completions", {"prompt": "import ", "max_tokens": 8}, b"data: [DONE]"),
        ("/v1/responses", {"input": "import ", "max_output_tokens": 8}, b"event: response."),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}, b"event: message_stop"),
    ],
    ids=["completions", "responses", "messages"],
)
def test_each_api_ends_its_own_way_and_counts_as_success(
    vllm: Vllm, front: Front, path: str, body: dict[str, object], last: bytes
) -> None:
    whole = json.dumps({"model": "tiny", "stream": True, "temperature": 0, **body}).encode()
    direct, direct_events = _streamed(vllm.address, path, whole)
    sidecar = front(1)
    relayed, relayed_events = _streamed(sidecar.address, path, whole)

    assert (relayed.status, relayed.cut) == (direct.status, False) == (200, False)
    assert _kinds(relayed_events) == _kinds(direct_events)
    assert relayed_events[-1].split(b"\n")[0] == direct_events[-1].split(b"\n")[0]
    assert relayed_events[-1].startswith(last)
    (line,) = sidecar.requests(1)
    assert (line["result"], line["stream"]) == ("success", True)
    assert line["finish_reason"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (chat_body(model="nobody"), 404),
        (chat_body(model="nobody", stream=True), 404),
        (chat_body(max_tokens=10_000_000), 400),
        (chat_body(temperature=-1), 400),
        (b'{"model": "tiny"}', 400),
    ],
    ids=["unknown-model", "unknown-model-streamed", "over-context", "bad-field", "no-messages"],
)
def test_refusal_by_the_engine_passes_unchanged_and_charges_nobody(
    vllm: Vllm, front: Front, body: bytes, status: int
) -> None:
    direct = call(vllm.address, "POST", CHAT, body)
    sidecar = front(1)
    relayed = call(sidecar.address, "POST", CHAT, body)

    assert direct.status == relayed.status == status
    assert _blanked(relayed.body) == _blanked(direct.body)
    (line,) = sidecar.requests(1)
    assert (line["result"], line["status"], line["attempts"]) == ("ignored", status, 1)
    assert sidecar.breaker("node", vllm.address) == "closed"
    assert call(sidecar.address, "POST", CHAT, chat_body()).status == 200


def test_sixteen_streams_at_once_are_each_whole(vllm: Vllm, front: Front) -> None:
    sidecar = front(1)
    body = chat_body(stream=True, max_tokens=200, stream_options={"include_usage": True})
    with ThreadPoolExecutor(16) as clients:
        streams = list(clients.map(lambda _: _streamed(sidecar.address, CHAT, body), range(16)))

    for exchange, events in streams:
        assert (exchange.status, exchange.cut, events[-1]) == (200, False, b"data: [DONE]")
        usage = _payload(events[-2])["usage"]
        assert isinstance(usage, dict)
        assert usage["completion_tokens"] == 200
    assert {line["result"] for line in sidecar.requests(16)} == {"success"}
    assert sidecar.in_flight() == 0


def test_engine_that_closes_idle_connections_is_never_seen_doing_it(vllm: Vllm, front: Front) -> None:
    """Requests come just before, at and after the moment when the engine closes the connection that they would use."""
    sidecar = front(1)
    for late_s in (-0.03, -0.02, -0.01, -0.005, 0, 0.005, 0.01, 0.02, 0.5):
        assert call(sidecar.address, "POST", CHAT, chat_body(max_tokens=1)).status == 200
        time.sleep(KEEP_ALIVE_S + late_s)
    assert {line["result"] for line in sidecar.requests(9)} == {"success"}


# --- a client that leaves takes its work with it


def test_client_that_leaves_a_stream_frees_the_engine(vllm: Vllm, front: Front) -> None:
    sidecar = front(1)
    with _endless(sidecar.address) as stream:
        _take(stream, 5)
        vllm.wait_running(1, within_s=10)
    vllm.wait_running(0, within_s=5)
    (line,) = sidecar.requests(1)
    assert (line["result"], line["flag"], line["status"]) == ("ignored", "DC", 200)
    assert sidecar.in_flight() == 0
    assert sidecar.breaker("node", vllm.address) == "closed"


def test_client_that_leaves_before_any_byte_frees_the_engine(vllm: Vllm, front: Front) -> None:
    sidecar = front(1)
    with post(sidecar.address, CHAT, chat_body(max_tokens=ENDLESS)):
        vllm.wait_running(1, within_s=10)
    vllm.wait_running(0, within_s=5)
    (line,) = sidecar.requests(1)
    assert (line["result"], line["flag"], line["status"]) == ("ignored", "DC", 499)
    assert sidecar.in_flight() == 0
    assert sidecar.breaker("node", vllm.address) == "closed"


def test_drain_ends_streams_in_band_and_frees_the_engine(vllm: Vllm, front: Front) -> None:
    sidecar = front(1)
    with _endless(sidecar.address) as stream:
        _take(stream, 5)
        sidecar.stop()  # gives live streams a second
        events = list(stream.events())
    _assert_cut_by_us(events, "draining")
    (line,) = sidecar.requests(1)
    assert (line["result"], line["status"]) == ("ignored", 200)
    vllm.wait_running(0, within_s=5)


# --- an engine that fails is found out by what it does, not by its health


def test_sigstop_opens_the_breaker_on_evidence_and_a_probe_closes_it(vllm: Vllm, front: Front) -> None:
    sidecar = front(2)
    core = vllm.core_pid()
    with _endless(sidecar.address) as stream:
        _take(stream, 5)
        os.kill(core, signal.SIGSTOP)
        try:
            events, quiet_s, ended_s = _to_the_end(stream)
            assert vllm.health() == 200  # the engine's own word, worth nothing here
            _assert_cut_by_us(events, "token_gap_timeout")
            assert b": keep-alive" in events  # a comment of the frozen engine's front, and no token
            assert ended_s > GAP_S * 0.9
            assert quiet_s < GAP_S + LATE_S
            assert sidecar.breaker("node", vllm.address) == "closed"  # one failure of two

            # What the front answers without the engine is no evidence for it: the count of failures goes on.
            assert call(sidecar.address, "GET", "/v1/models").status == 200

            late = _ask(sidecar)
            assert (late.status, late.error_code()) == (504, "ttft_timeout")
            assert FIRST_TOKEN_S * 0.9 < late.seconds < FIRST_TOKEN_S + LATE_S
            sidecar.wait_breaker("node", vllm.address, "open", within_s=1)
            _assert_refused_at_once(_ask(sidecar))
            assert vllm.health() == 200

            time.sleep(OPEN_S)
            assert _wait_for(sidecar, 504).error_code() == "ttft_timeout"  # the probe: no answer either
            sidecar.wait_breaker("node", vllm.address, "open", within_s=1)
            _assert_refused_at_once(_ask(sidecar))
        finally:
            os.kill(core, signal.SIGCONT)
    assert _wait_for(sidecar, 200).status == 200
    sidecar.wait_breaker("node", vllm.address, "closed", within_s=2)  # agreed on by way of the log
    assert sidecar.in_flight() == 0
    vllm.wait_running(0, within_s=5)  # what we cut was given back to the engine


def test_frozen_front_of_the_engine_is_cut_at_the_gap_deadline(vllm: Vllm, front: Front) -> None:
    sidecar = front(1)
    with _endless(sidecar.address) as stream:
        _take(stream, 5)
        vllm.signal_api(signal.SIGSTOP)  # its sockets stay open, take connections, and say nothing
        try:
            events, quiet_s, ended_s = _to_the_end(stream)
            _assert_cut_by_us(events, "token_gap_timeout")
            assert ended_s > GAP_S * 0.9
            assert quiet_s < GAP_S + LATE_S
            sidecar.wait_breaker("node", vllm.address, "open", within_s=1)
            _assert_refused_at_once(_ask(sidecar))
        finally:
            vllm.signal_api(signal.SIGCONT)
    assert _wait_for(sidecar, 200).status == 200
    sidecar.wait_breaker("node", vllm.address, "closed", within_s=2)  # agreed on by way of the log
    vllm.wait_running(0, within_s=5)


def test_sigkill_of_the_core_passes_its_error_on_and_a_new_engine_closes_the_breaker(
    vllm_keeper: VllmKeeper, vllm: Vllm, front: Front
) -> None:
    sidecar = front(1)
    with _endless(vllm.address) as direct, _endless(sidecar.address) as relayed:
        _take(direct, 5)
        _take(relayed, 5)
        os.kill(vllm.core_pid(), signal.SIGKILL)
        direct_end = list(direct.events())[-2:]
        relayed_end = list(relayed.events())[-2:]

    assert b'"error"' in direct_end[0]
    assert relayed_end == direct_end  # its words, and its [DONE] after them
    assert relayed_end[1] == b"data: [DONE]"
    assert (direct.cut, relayed.cut) == (False, False)
    (line,) = sidecar.requests(1)
    assert (line["result"], line["status"]) == ("failure", 200)
    sidecar.wait_breaker("node", vllm.address, "open", within_s=1)
    _assert_refused_at_once(_ask(sidecar))

    assert vllm_keeper.ready() is not vllm  # as a pod restarts its container: the same address
    assert _wait_for(sidecar, 200).status == 200
    sidecar.wait_breaker("node", vllm.address, "closed", within_s=2)  # agreed on by way of the log


def test_sigterm_of_the_engine_leaves_no_client_hanging(
    vllm_keeper: VllmKeeper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM ends its streams in one of three ways then, as its tasks race; silence, the worst, came 7 times of 15.

    So it is asked again until silence was met, or often enough. Whatever the way, the client sees an end at once or at
    the gap deadline, and the engine's process, which waits for its connections, is let go.
    """
    ends: list[str] = []
    while "silence" not in ends and len(ends) < SIGTERM_TRIES:
        folder = tmp_path / str(len(ends))
        folder.mkdir()
        vllm = vllm_keeper.ready()
        sidecar = Sidecar(folder, POLICY.format(engine=vllm.address, consecutive=1))
        try:
            ends.append(_end_by_sigterm(vllm, sidecar))
        finally:
            sidecar.stop()
    with capsys.disabled():
        print(f"\nSIGTERM with a stream in flight ended it by: {', '.join(ends)}")


def _end_by_sigterm(vllm: Vllm, sidecar: Sidecar) -> str:
    """Terminates the engine with a stream in flight, checks the end, and says which it was."""
    with _endless(sidecar.address) as stream:
        _take(stream, 5)
        vllm.signal_api(signal.SIGTERM)
        events, quiet_s, ended_s = _to_the_end(stream)
        vllm.wait_exit(within_s=15)  # in silence it waits for that stream's connection: ours let go of it
    assert quiet_s < GAP_S + LATE_S
    assert not answers(vllm.address)
    if events[-1] != b"data: [DONE]":
        _assert_cut_by_us(events, "token_gap_timeout")
        assert ended_s > GAP_S * 0.9
        end = "silence"
    elif b'"error"' in events[-2]:
        end = "error"
    else:
        assert b'"finish_reason":"abort"' in events[-2]
        return "abort"
    sidecar.wait_breaker("node", vllm.address, "open", within_s=1)
    _assert_refused_at_once(_ask(sidecar))
    return end


# --- asking


def _streamed(address: str, path: str, body: bytes) -> tuple[Exchange, list[bytes]]:
    with post(address, path, body) as exchange:
        if exchange.head().status != 200:
            pytest.fail(f"{exchange.status}: {exchange.whole().body!r}")
        return exchange, list(exchange.events())


def _endless(address: str) -> Exchange:
    stream = post(address, CHAT, chat_body(stream=True, max_tokens=ENDLESS)).head()
    assert stream.status == 200
    return stream


def _take(stream: Exchange, count: int) -> None:
    for _ in zip(range(count), stream.events(), strict=False):
        pass


def _to_the_end(stream: Exchange) -> tuple[list[bytes], float, float]:
    """What was left of a stream, the longest silence in it, and the time to its last event (both in seconds)."""
    events: list[bytes] = []
    began = last = time.monotonic()
    quiet_s = 0.0
    for event in stream.events():
        now = time.monotonic()
        quiet_s, last = max(quiet_s, now - last), now
        events.append(event)
    return events, quiet_s, last - began


def _ask(sidecar: Sidecar) -> Answer:
    return call(sidecar.address, "POST", CHAT, chat_body(stream=True, max_tokens=2), timeout_s=20)


def _wait_for(sidecar: Sidecar, status: int) -> Answer:
    """Asks until the answer has that status; all before it must be refusals at once."""
    give_up = time.monotonic() + 2 * OPEN_MAX_S
    while (answer := _ask(sidecar)).status != status:
        _assert_refused_at_once(answer)
        assert time.monotonic() < give_up, sidecar.log()[-2000:]
        time.sleep(0.1)
    return answer


# --- looking


def _assert_cut_by_us(events: list[bytes], code: str) -> None:
    error = _payload(events[-1])["error"]
    assert isinstance(error, dict), events[-1]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert b"data: [DONE]" not in events
    assert sum(b'"error"' in event for event in events) == 1


def _assert_refused_at_once(answer: Answer) -> None:
    assert (answer.status, answer.error_code()) == (503, "breaker_open")
    assert answer.headers["x-sidecar-reason"] == "breaker_open"
    assert 1 <= int(answer.headers["retry-after"]) <= OPEN_MAX_S + 1
    assert answer.seconds < AT_ONCE_S


def _payload(event: bytes) -> dict[str, object]:
    decoded = json.loads(event.rpartition(b"data: ")[2])
    assert isinstance(decoded, dict), event
    return decoded


def _blanked(body: bytes) -> bytes:
    """The bytes, with what differs from request to request replaced by `*`."""
    body = re.sub(rb'"(id|item_id)":"[^"]*"', rb'"\1":"*"', body)
    return re.sub(rb'"(created|created_at|completed_at|sequence_number)":\d+', rb'"\1":*', body)


def _kinds(events: list[bytes]) -> list[bytes]:
    """Each kind of event once per run of it: the bytes with the words blanked out too, but never an empty one."""
    kinds: list[bytes] = []
    for event in events:
        if event.startswith(b":"):  # a keep-alive, which comes when the machine is slow
            continue
        kind = re.sub(rb'"(content|text|delta|reasoning)":"(?:[^"\\]|\\.)+"', rb'"\1":"*"', _blanked(event))
        kind = re.sub(rb'"index":\d', b'"index":*', kind)
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return kinds


def _text(events: list[bytes]) -> str:
    """All words of a chat stream, choice by choice."""
    words: dict[int, str] = {}
    for event in events:
        if event == b"data: [DONE]" or event.startswith(b":"):
            continue
        choices = _payload(event)["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            words[choice["index"]] = words.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return "\n".join(words[index] for index in sorted(words))


def _end_to_end(headers: dict[str, str]) -> dict[str, str]:
    """The headers that belong to the message: not the connection's, not the clock's, none of ours, no length of ids."""
    ours = {"date", "connection", "keep-alive", "x-request-id"}
    return {name: value for name, value in headers.items() if name not in ours and not name.startswith("x-sidecar-")}
