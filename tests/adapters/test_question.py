"""The canary in every server's words, and its answer in OpenAI's."""

import json

import pytest

from sidecar.adapters.errand import Answer
from sidecar.adapters.question import Question, told_version
from sidecar.policy.schema import Endpoint
from tests import captures

FRONTS = [
    Endpoint(url="http://a:1"),
    Endpoint(url="http://a:1", engine="triton"),
    Endpoint(url="http://a:1", engine="triton", front="openai"),
    Endpoint(url="http://a:1", engine="deepspeed"),
    Endpoint(url="http://a:1", engine="deepspeed", front="api_server"),
    Endpoint(url="http://a:1", engine="deepspeed", front="gateway"),
]


def question(endpoint: Endpoint, model: str = "m") -> Question:
    return Question(endpoint, model, "The capital of France is", 3, "u1", 1_700_000_000)


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        (FRONTS[0], b"/v1/completions"),
        (FRONTS[1], b"/v2/models/m/generate_stream"),
        (FRONTS[2], b"/v1/completions"),
        (FRONTS[3], b"/v1/completions"),
        (FRONTS[4], b"/generate"),
        (FRONTS[5], b"/mii/m"),
    ],
)
def test_every_server_can_be_asked(endpoint: Endpoint, target: bytes) -> None:
    asked = question(endpoint)
    assert (asked.request.method, asked.request.target) == (b"POST", target)
    said = json.loads(asked.request.body)
    assert "The capital of France is" in said.values()


def test_what_is_openais_is_passed_on() -> None:
    asked = question(FRONTS[0])
    assert json.loads(asked.request.body) == {
        "model": "m",
        "prompt": "The capital of France is",
        "max_tokens": 3,
        "temperature": 0.0,
    }
    answer = Answer(200, captures.body("vllm_features/lora_use.txt"), b"application/json")
    assert asked.read(answer) is answer
    assert question(FRONTS[1]).read(Answer(0, detail="away")) == Answer(0, detail="away")


def test_tritons_stream_becomes_one_answer() -> None:
    stream = captures.body("triton/generate_stream.txt")
    answer = question(FRONTS[1], "toy_llm").read(Answer(200, stream, b"text/event-stream"))
    assert answer.status == 200
    said = json.loads(answer.body)
    assert (said["model"], said["choices"][0]["text"]) == ("toy_llm", " tok0 tok1 tok2 tok3")
    failed = captures.body("triton/generate_stream_fail_first.txt")
    answer = question(FRONTS[1], "toy_llm").read(Answer(400, failed, b"text/event-stream"))
    assert answer.status >= 400 and "error" in json.loads(answer.body)


def test_the_version_that_answered() -> None:
    assert told_version(captures.body("triton/generate_stream.txt")) == "1"
    assert told_version(captures.body("triton/generate.txt")) == "1"
    for body in (
        b"",
        b"data: ",
        b"data: [DONE]\n\n",
        b"{}",
        b"[]",
        b'{"model_version":7}',
        b"\xff",
        b"[" * 100_000,
        b'{"a":' + b"[" * 100_000,
    ):
        assert told_version(body) == ""
