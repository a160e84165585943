import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.kernel.errors import STATUS, Reason, Refusal
from sidecar.wire.refusal import OVERLOAD_REASONS, PHRASES, error_body, error_event, error_type, refusal_answer


def parts(answer: bytes) -> tuple[bytes, list[tuple[bytes, bytes]], bytes]:
    """Status line, headers, body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return first, [(name, value) for name, _, value in (line.partition(b": ") for line in lines)], body


def answer(
    reason: Reason = Reason.DRAINING,
    message: str = "no",
    *,
    retry_after_s: float | None = None,
    param: str | None = None,
    request_id: bytes = b"id-1",
    extra: bytes = b"",
    close: bool = False,
    no_body: bool = False,
) -> bytes:
    return refusal_answer(Refusal(reason, message, retry_after_s, param), request_id, extra, close, no_body)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_its_status_its_phrase_and_says_its_word_twice(reason: Reason) -> None:
    first, headers, body = parts(answer(reason))
    assert first == b"HTTP/1.1 %d %b" % (STATUS[reason], PHRASES[STATUS[reason]])
    assert (b"x-sidecar-reason", reason.value.encode()) in headers
    assert json.loads(body)["error"]["code"] == reason.value


@given(st.text())
def test_body_is_openais_error_and_its_length_is_told(message: str) -> None:
    message = message.encode("utf-8", "replace").decode()
    _, headers, body = parts(answer(message=message, param="model"))
    assert (b"content-length", b"%d" % len(body)) in headers
    assert json.loads(body) == {
        "error": {"message": message, "type": "server_error", "param": "model", "code": "draining"}
    }


@pytest.mark.parametrize(
    ("wait_s", "told"), [(None, None), (0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (59.5, b"60")]
)
def test_retry_after_is_whole_seconds_rounded_up_and_at_least_one(wait_s: float | None, told: bytes | None) -> None:
    _, headers, _ = parts(answer(retry_after_s=wait_s))
    assert dict(headers).get(b"retry-after") == told


@pytest.mark.parametrize("reason", list(Reason))
def test_a_mesh_is_told_of_load_and_of_nothing_else(reason: Reason) -> None:
    _, headers, _ = parts(answer(reason))
    assert (b"x-envoy-overloaded" in dict(headers)) is (reason in OVERLOAD_REASONS)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_client_is_told_not_to_ask_again_where_the_answer_will_be_the_same(reason: Reason) -> None:
    _, headers, _ = parts(answer(reason))
    assert dict(headers).get(b"x-should-retry") == (b"false" if reason is Reason.POISONED_REQUEST else None)


def test_head_gets_the_length_and_no_body() -> None:
    _, headers, body = parts(answer(no_body=True))
    assert body == b""
    assert int(dict(headers)[b"content-length"]) == len(error_body(Reason.DRAINING, "no"))


def test_id_close_and_further_lines_are_there_when_asked_for() -> None:
    _, headers, _ = parts(answer(request_id=b"", close=True, extra=b"x-sidecar-attempts: 2\r\n"))
    assert b"x-request-id" not in dict(headers)
    assert (b"connection", b"close") in headers
    assert (b"x-sidecar-attempts", b"2") in headers
    assert b"connection" not in dict(parts(answer())[1])


def test_message_cannot_leave_the_body() -> None:
    first, headers, body = parts(answer(message="a\r\n\r\nHTTP/1.1 200 OK\r\n"))
    assert json.loads(body)["error"]["message"] == "a\r\n\r\nHTTP/1.1 200 OK\r\n"
    assert len(headers) == 4, (first, headers)


def test_error_event_is_one_event_and_no_end_marker() -> None:
    event = error_event(Reason.UPSTREAM_TRUNCATED, "broke\noff")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert b"[DONE]" not in event
    assert json.loads(event[6:])["error"]["code"] == "upstream_truncated"


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (429, "rate_limit_error"),
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (431, "invalid_request_error"),
        (500, "server_error"),
        (504, "server_error"),
    ],
)
def test_type_is_openais_word_for_the_status(status: int, word: str) -> None:
    assert error_type(status) == word
