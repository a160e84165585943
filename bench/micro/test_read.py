"""Reading: request bodies, whole answers, and streams event by event as engines wrote them. Budgets in ns per unit.

They are half as much again as what it took when they were set, so that noise passes and a mistake does not.
"""

import json

import pytest

from bench.micro.conftest import Budgeted
from bench.path_cost import ANSWER_BODY, BODY
from sidecar.wire.answer import read_answer
from sidecar.wire.call import Api, read_call
from sidecar.wire.sse import SseReader
from sidecar.wire.stream import StreamReader
from tests import captures

READ_CALL_NS = 3200
READ_CALL_LONG_NS = 26_000
READ_ANSWER_NS = 4500
SSE_READER_NS = 420
CUT_IN_TWO_NS = 5000
STREAM_READER_NS = {
    "vllm/chat_stream.raw": 1800,
    "vllm/chat_stream_n2_logprobs.raw": 2900,
    "vllm/chat_stream_usage_cont.raw": 2200,
    "vllm/completion_stream_usage.raw": 1700,
    "vllm/responses_stream.raw": 2300,
    "vllm/messages_stream.raw": 2200,
    "transformers_serve/chat_stream.txt": 1700,
    "triton/generate_stream.txt": 950,
}
API_OF = {
    "vllm/completion_stream_usage.raw": Api.COMPLETIONS,
    "vllm/responses_stream.raw": Api.RESPONSES,
    "vllm/messages_stream.raw": Api.MESSAGES,
    "triton/generate_stream.txt": Api.OTHER,
}

UNITS = 100


def chunks_of(name: str) -> list[bytes]:
    """A recording's events, one chunk each, as engines write them."""
    blocks = captures.body(name).replace(b"\r\n", b"\n").split(b"\n\n")
    return [block + b"\n\n" for block in blocks if block.strip()]


def middle_of(name: str) -> list[bytes]:
    """Its chunks that bear a token, as often as fills UNITS: what a long stream consists of."""
    api = API_OF.get(name, Api.CHAT)
    reader = StreamReader(api)
    bearing = [chunk for chunk in chunks_of(name) if reader.feed(chunk) and reader.error is None]
    assert bearing, name
    return [bearing[number % len(bearing)] for number in range(UNITS)]


def test_read_call(budget: Budgeted) -> None:
    assert read_call(Api.CHAT, BODY).model == "demo"
    budget(READ_CALL_NS, lambda: read_call(Api.CHAT, BODY))


def test_read_call_of_a_long_conversation(budget: Budgeted) -> None:
    turns = [{"role": "user", "content": "word " * 200} for _ in range(64)]
    body = json.dumps({"model": "demo", "stream": True, "messages": turns}).encode()
    assert read_call(Api.CHAT, body).stream
    budget(READ_CALL_LONG_NS, lambda: read_call(Api.CHAT, body))


def test_read_answer(budget: Budgeted) -> None:
    assert read_answer(Api.CHAT, ANSWER_BODY).finish_reason == "stop"
    budget(READ_ANSWER_NS, lambda: read_answer(Api.CHAT, ANSWER_BODY))


def test_sse_reader(budget: Budgeted) -> None:
    chunks = middle_of("vllm/chat_stream.raw")
    reader = SseReader()
    assert all(len(reader.feed(chunk)) == 1 for chunk in chunks)

    def run() -> None:
        for chunk in chunks:
            reader.feed(chunk)

    budget(SSE_READER_NS, run, UNITS)


@pytest.mark.parametrize("name", STREAM_READER_NS)
def test_stream_reader(budget: Budgeted, name: str) -> None:
    chunks = middle_of(name)
    reader = StreamReader(API_OF.get(name, Api.CHAT))

    def run() -> None:
        for chunk in chunks:
            reader.feed(chunk)

    budget(STREAM_READER_NS[name], run, UNITS)
    assert reader.tokens and not reader.malformed and reader.error is None


def test_stream_reader_of_chunks_cut_in_two(budget: Budgeted) -> None:
    halves = [half for chunk in middle_of("vllm/chat_stream.raw") for half in (chunk[:80], chunk[80:])]
    reader = StreamReader(Api.CHAT)

    def run() -> None:
        for half in halves:
            reader.feed(half)

    budget(CUT_IN_TWO_NS, run, UNITS)
    assert reader.tokens and not reader.malformed
