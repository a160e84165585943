"""A response head keeps each fact under its own name: eight arguments of four types are easily crossed."""

from sidecar.kernel.exchange import ResponseHead


def test_a_head_has_what_it_was_made_of() -> None:
    head = ResponseHead(503, b"Busy", [b"A: 1\r\n"], b"text/plain", 7, True, b"websocket", ((b"retry-after", b"3"),))
    assert (head.status, head.phrase, head.lines, head.content_type) == (503, b"Busy", [b"A: 1\r\n"], b"text/plain")
    assert (head.content_length, head.encoded, head.upgrade) == (7, True, b"websocket")
    assert head.retry_after == ((b"retry-after", b"3"),)


def test_most_heads_ask_for_no_wait() -> None:
    assert ResponseHead(200, b"OK", [], b"", None, False, b"").retry_after == ()
