"""Canaries' answers: right ones, wrong ones, and none."""

import json

import pytest

from sidecar.core.hot_update import Canary
from sidecar.core.right_answer import judged
from sidecar.kernel.change import Again, Done, Failed


def completion(text: str = " Paris", model: str = "m", finish: str = "length") -> bytes:
    return json.dumps({"model": model, "choices": [{"text": text, "finish_reason": finish}]}).encode()


def error(message: str, kind: str = "InternalServerError") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": 500}}).encode()


@pytest.mark.parametrize("expect", ["", "Par", "Paris"])
def test_a_right_answer(expect: str) -> None:
    assert judged(Canary(expect=expect), "m", 200, completion()) == Done("it answered ' Paris'")


def test_who_does_not_name_his_model_is_believed() -> None:
    assert isinstance(judged(Canary(), "m", 200, completion(model="")), Done)


def test_one_token_may_be_no_text() -> None:
    assert judged(Canary(), "m", 200, completion("")) == Done("it answered ''")


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, completion(" Rome"), "wrong answer: ' Rome' does not contain 'Paris'"),
        (200, completion(model="old"), "wrong answer: 'old' answered, and not 'm'"),
        (200, completion(finish="abort"), "aborted: 200"),
        (200, b"", "empty: an answer that is none"),
        (200, b"<html>", "empty: an answer that is none"),
        (200, b'{"choices":[{"text":7}]}', "its answer has no text"),
        (200, error("boom"), "error_in_band: 200: boom"),
        (404, error("no such model", "NotFoundError"), "client_error: 404: no such model"),
        (500, b"Internal Server Error", "server_error: 500: Internal Server Error"),
        (400, error("prompt is too long"), "context_length: 400: prompt is too long"),
        (0, b"", "reset_before_head: no whole answer"),
    ],
)
def test_all_else_has_failed(status: int, body: bytes, why: str) -> None:
    assert judged(Canary(expect="Paris"), "m", status, body) == Failed(why)


@pytest.mark.parametrize("status", [429, 503])
def test_one_that_is_full_may_be_asked_again(status: int) -> None:
    outcome = judged(Canary(), "m", status, error("Exceeds maximum queue size"))
    assert outcome == Again(f"it is full: {status}: Exceeds maximum queue size")
