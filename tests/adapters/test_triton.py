"""Triton's generate: every answer that was recorded, those that other backends give, and what it is asked."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.adapters.ask import read_body
from sidecar.adapters.triton import CHAT_TOKENS, COMPLETION_TOKENS, LACKS, TritonGenerate
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.kernel.outcome import Ending
from sidecar.wire.answer import Usage, read_answer
from sidecar.wire.call import Api
from tests import captures
from tests.adapters.answers import JSON, SSE, Answered, answered, asked, bytewise, halves, joined

TRITON = TritonGenerate()

both_apis = pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
both_ways = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


def event(**members: object) -> bytes:
    return b"data: %b\n\n" % json.dumps({"model_name": "m", "model_version": "1", **members}).encode()


def said(*events: bytes, api: Api = Api.CHAT, stream: bool = True, max_tokens: int | None = None) -> Answered:
    return answered(TRITON.reading(asked(api, stream=stream, max_tokens=max_tokens)), 200, SSE, *events)


# --- what was recorded ----------------------------------------------------------------------------------------------

TOK = " tok0 tok1 tok2 tok3"
BOOM = "Failed to process the request(s) for model 'failing_0_0', message: RuntimeError: boom x"
MANY = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)
BAD_JSON = "failed to parse the request JSON buffer: Invalid value. at 14"
BAD_TYPE = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
BAD_SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field"
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


def stub(model: str) -> str:
    return f"Stub process '{model}_0_0' is not healthy."


NO_TRITON = "Triton has no such path here: it is another server, or front, than the policy says"


def unknown(model: str) -> str:
    return f"Request for unknown model: '{model}' is not found"


SPOKEN = {
    "triton/generate.txt": "hi tok0 tok1 tok2",
    "triton/generate_hdr_reqid.txt": "hi tok0 tok1",
    "triton/generate_id.txt": "hi tok0 tok1 tok2",
    "triton/generate_missing_input.txt": " tok0 tok1 tok2",
    "triton/generate_params_toplevel.txt": "hi tok0 tok1 tok2",
    "triton/generate_stream.txt": TOK,
    "triton/generate_stream_missing_input.txt": " tok0 tok1 tok2",
    "triton/generate_stream_nostream.txt": "hi" + TOK,
    "triton/generate_versioned.txt": "hi tok0 tok1",
    "triton/smol_generate.json": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    "The capital of France is Paris.",
    "triton/smol_generate_stream.txt": "The capital of France is Paris.",
}
"""Good answers, and what they say."""

FAILED: dict[str, tuple[str, int, str, Ending]] = {
    "triton/failing_after_die.txt": (stub("failing"), 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/failing_die.txt": (stub("failing"), 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/failing_generate.txt": (BOOM, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/failing_stream.txt": (BOOM, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/generate_bad_json.txt": (BAD_JSON, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/generate_bad_type.txt": (BAD_TYPE, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/generate_fail.txt": ("engine exploded mid-stream", 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/generate_get.txt": (NO_TRITON, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/generate_multi_resp_error.txt": (MANY, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/generate_notloaded_model.txt": (unknown("slow"), 404, "NotFoundError", Ending.CLIENT_ERROR),
    "triton/generate_stream_fail_first.txt": (
        "engine exploded mid-stream",
        500,
        "InternalServerError",
        Ending.SERVER_ERROR,
    ),
    "triton/generate_stream_unknown_model.txt": (unknown("nope"), 404, "NotFoundError", Ending.CLIENT_ERROR),
    "triton/generate_unknown_model.txt": (unknown("nope"), 404, "NotFoundError", Ending.CLIENT_ERROR),
    "triton/infer_bad_shape.txt": (BAD_SHAPE, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/infer_decoupled.txt": (DECOUPLED, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/openai_path.txt": (NO_TRITON, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton/unknown_path.txt": (NO_TRITON, 500, "InternalServerError", Ending.SERVER_ERROR),
    "triton_stub_dead/infer.txt": (
        "output tensor shape does not match size of output for 'OUTPUT0'",
        500,
        "InternalServerError",
        Ending.SERVER_ERROR,
    ),
    **{
        f"triton_stub_dead/generate{name}.txt": (stub("toy_llm"), 500, "InternalServerError", Ending.SERVER_ERROR)
        for name in (
            "",
            "_fail",
            "_hdr_reqid",
            "_id",
            "_missing_input",
            "_multi_resp_error",
            "_params_toplevel",
            "_stream",
            "_stream_fail_first",
            "_stream_fail_mid",
            "_stream_missing_input",
            "_stream_nostream",
            "_versioned",
        )
    },
    **{
        f"triton_stub_dead/failing_{name}.txt": (stub("failing"), 500, "InternalServerError", Ending.SERVER_ERROR)
        for name in ("generate", "stream")
    },
}
"""Errors: the words, the status and type that the client gets, and what the core makes of it."""

SAME = frozenset(
    {
        "failing_after_die.txt",
        "failing_die.txt",
        "generate_bad_json.txt",
        "generate_bad_type.txt",
        "generate_get.txt",
        "generate_notloaded_model.txt",
        "generate_stream_unknown_model.txt",
        "generate_unknown_model.txt",
        "infer_bad_shape.txt",
        "infer_decoupled.txt",
        "openai_path.txt",
        "unknown_path.txt",
    }
)
"""Recorded beside a dead process to the byte as beside a living one."""

FAILED.update({f"triton_stub_dead/{name}": FAILED[f"triton/{name}"] for name in sorted(SAME)})

CUT_SHORT = "triton/generate_stream_fail_mid.txt"
"""The one that fails when it has said something."""

BEHAVIOUR = "triton/behaviour.txt"
"""A log of many requests, some of whose answers it holds."""

READ_ELSEWHERE = {
    "what the server says of itself": re.compile(r"(live|server_meta)\.txt"),
    "of its models' health": re.compile(r"(failing_|model_)?ready(_.*)?\.txt"),
    "of its models": re.compile(r"(model_(config|meta|stats)|repo_index.*)\.txt"),
    "of its load": re.compile(r"metrics(\.txt|_histograms\.prom)"),
    "of a load or an unload": re.compile(r"(load|unload)_.*\.txt"),
    "tensors, which pass as they are": re.compile(r"infer\.txt"),
    "gRPC, which is not spoken": re.compile(r"grpc\.txt"),
}
"""Recordings that are no answers to what is asked here: health and the hot update have those."""


def sent(name: str) -> tuple[int, bytes, bytes]:
    """Status, media type and body of a recording."""
    recorded = (Path(captures.__file__).parent / name).read_bytes()
    if name == "triton/smol_generate_stream.txt":
        return 200, SSE, recorded[: recorded.index(b" [200]")]
    if name == "triton/smol_generate.json":
        return 200, JSON, recorded
    found = re.search(rb"^< Content-Type: ([a-z/-]+)", recorded, re.M)
    assert found is not None, name
    return captures.status(name), found[1], captures.body(name)


def recordings() -> set[str]:
    here = Path(captures.__file__).parent
    return {f"{folder}/{path.name}" for folder in ("triton", "triton_stub_dead") for path in (here / folder).iterdir()}


def test_every_recording_has_its_test() -> None:
    here = {*SPOKEN, *FAILED, CUT_SHORT, BEHAVIOUR}
    for name in recordings() - here:
        file = name.partition("/")[2]
        assert any(pattern.fullmatch(file) for pattern in READ_ELSEWHERE.values()), name
    assert here <= recordings()


def check_split_anywhere(name: str, read: Callable[[tuple[bytes, ...]], Answered]) -> None:
    """The same answer, byte for byte, in however many pieces the engine's comes."""
    body = sent(name)[2]
    whole = read((body,))
    assert read(tuple(bytewise(body))) == whole
    for parts in halves(body):
        assert read(parts) == whole


@both_ways
@both_apis
@pytest.mark.parametrize("name", SPOKEN)
def test_a_recorded_answer_is_an_openai_answer(name: str, api: Api, stream: bool) -> None:
    status, media_type, body = sent(name)
    answer = answered(TRITON.reading(asked(api, stream=stream)), status, media_type, body)
    assert answer.status == 200
    assert answer.text == SPOKEN[name]
    assert answer.finish_reason == "stop"
    assert answer.error is None
    assert answer.ending is Ending.COMPLETE
    assert (answer.media_type == SSE) == stream


@both_ways
@pytest.mark.parametrize("name", SPOKEN)
def test_a_recorded_answer_reads_the_same_in_pieces(name: str, stream: bool) -> None:
    status, media_type, _ = sent(name)
    check_split_anywhere(name, lambda parts: answered(TRITON.reading(asked(stream=stream)), status, media_type, *parts))


@both_ways
@pytest.mark.parametrize("name", FAILED)
def test_a_recorded_error_is_one_openai_error(name: str, stream: bool) -> None:
    status, media_type, body = sent(name)
    message, told, kind, ending = FAILED[name]
    answer = answered(TRITON.reading(asked(stream=stream)), status, media_type, body)
    assert answer.status == told
    assert json.loads(answer.body) == {
        "error": {"message": message, "type": kind, "param": None, "code": told},
    }
    assert answer.ending is ending


@pytest.mark.parametrize("name", FAILED)
def test_a_recorded_error_reads_the_same_in_pieces(name: str) -> None:
    status, media_type, _ = sent(name)
    check_split_anywhere(name, lambda parts: answered(TRITON.reading(asked()), status, media_type, *parts))


def test_a_recorded_failure_half_way_is_an_error_in_the_stream_and_no_end() -> None:
    answer = answered(TRITON.reading(asked()), *sent(CUT_SHORT))
    assert answer.status == 200
    *chunks, last = answer.events
    assert "".join(each["choices"][0]["delta"]["content"] for each in chunks) == " tok0 tok1"
    assert last == {
        "error": {"message": "engine exploded mid-stream", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert answer.ending is Ending.ERROR_IN_BAND
    check_split_anywhere(CUT_SHORT, lambda parts: answered(TRITON.reading(asked()), 200, SSE, *parts))


def test_a_recorded_failure_half_way_is_a_status_where_nothing_was_sent_yet() -> None:
    answer = answered(TRITON.reading(asked(stream=False)), *sent(CUT_SHORT))
    assert (answer.status, answer.ending) == (500, Ending.SERVER_ERROR)
    check_split_anywhere(CUT_SHORT, lambda parts: answered(TRITON.reading(asked(stream=False)), 200, SSE, *parts))


BEHAVIOUR_LINE = re.compile(r"(?m)^ *[\d.]+ (slow|slow_stream) \d (\d+) (.*) took [\d.]+$")


def test_the_recorded_overload_is_overload() -> None:
    log = (Path(captures.__file__).parent / BEHAVIOUR).read_text()
    endings: list[Ending] = []
    for kind, status, told in BEHAVIOUR_LINE.findall(log):
        body = told.encode() if kind == "slow" else eval(told).encode()
        media_type = SSE if body.startswith(b"data:") else JSON
        reading = TRITON.reading(asked(request_id="<id_unknown>"))
        answer = answered(reading, int(status), media_type, body)
        endings.append(answer.ending)
        if answer.status != 200:
            assert answer.status == 503
            assert answer.error is not None
            assert answer.error.message in ("Exceeds maximum queue size", "Request timeout expired")
    assert endings.count(Ending.OVERLOADED) == 8
    assert endings.count(Ending.COMPLETE) == 4
    assert len(endings) == 12


def test_the_recorded_unloading_is_no_fault_of_the_client() -> None:
    log = (Path(captures.__file__).parent / BEHAVIOUR).read_text()
    found = re.findall(r"generate while unloading \((\d+), '(.*)'\)", log)
    assert found
    for status, body in found:
        answer = answered(TRITON.reading(asked()), int(status), JSON, body.replace(r"\'", "'").encode())
        assert (answer.status, answer.ending) == (503, Ending.SERVER_ERROR)


# --- other backends' answers ----------------------------------------------------------------------------------------


def vllm_event(text: str, reason: str = "None", tokens: int = 1) -> bytes:
    """As the vLLM backend answers what we ask of it."""
    return event(finish_reason=reason, num_input_tokens=7, num_output_tokens=tokens, text_output=text)


@both_ways
@both_apis
def test_finish_reason_and_tokens_are_as_told(api: Api, stream: bool) -> None:
    events = (
        vllm_event("Par", tokens=2),
        vllm_event("", tokens=0),
        vllm_event("is", tokens=1),
        vllm_event("", "length"),
    )
    body = read_body(b'{"stream_options":{"include_usage":true}}')
    answer = answered(TRITON.reading(asked(api, stream=stream, body=body)), 200, SSE, *events)
    assert answer.text == "Paris"
    assert answer.finish_reason == "length"
    assert answer.usage == Usage(7, 4)
    assert answer.ending is Ending.COMPLETE
    if stream:
        assert [each if each == "[DONE]" else len(each["choices"]) for each in answer.events][-3:] == [1, 0, "[DONE]"]


def test_a_chat_opens_with_its_role_once_and_chunks_have_all_members() -> None:
    first, *others = said(vllm_event("a"), vllm_event("b", "stop")).events
    assert first == {
        "id": "chatcmpl-req-42",
        "object": "chat.completion.chunk",
        "created": 1796000000,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert [each["choices"][0]["delta"] for each in others[:-1]] == [
        {"content": "a"},
        {"content": "b"},
        {"content": ""},
    ]
    assert others[-1] == "[DONE]"


@pytest.mark.parametrize(
    "members",
    [
        {"text_output": ["Hi"], "finish_reason": ["stop"], "num_output_tokens": [1], "num_input_tokens": [3]},
        {"text_output": "Hi", "finish_reason": "stop", "num_output_tokens": 1, "num_input_tokens": 3},
        {"num_input_tokens": 3, "num_output_tokens": [1], "finish_reason": "STOP", "text_output": ["Hi"]},
        {"text_output": "Hi", "finish_reason": ["eos_token"], "num_output_tokens": 1, "num_input_tokens": 3},
    ],
)
def test_tensors_are_read_as_scalars_and_as_lists(members: dict[str, object]) -> None:
    answer = said(event(**members), stream=False)
    assert (answer.text, answer.finish_reason, answer.usage) == ("Hi", "stop", Usage(3, 1))


REASONS = {
    "stop": ("stop", Ending.COMPLETE),
    "length": ("length", Ending.COMPLETE),
    "end_id": ("stop", Ending.COMPLETE),
    "stop_words": ("stop", Ending.COMPLETE),
    "max_tokens": ("length", Ending.COMPLETE),
    "abort": ("abort", Ending.ABORTED),
    "cancelled": ("abort", Ending.ABORTED),
    "content_filter": ("content_filter", Ending.COMPLETE),
}


@pytest.mark.parametrize(("told", "expected"), REASONS.items(), ids=REASONS.keys())
def test_finish_reasons_are_openais(told: str, expected: tuple[str, Ending]) -> None:
    answer = said(vllm_event("a", told))
    assert (answer.finish_reason, answer.ending) == expected


def test_an_answer_that_ended_with_an_error_is_none() -> None:
    assert said(vllm_event("a"), vllm_event("", "error")).ending is Ending.ERROR_IN_BAND


@both_ways
def test_an_end_without_the_reason_that_a_model_tells_is_no_end(stream: bool) -> None:
    answer = said(vllm_event("a"), vllm_event("b"), stream=stream)
    if stream:
        assert answer.ending is Ending.TRUNCATED
        assert b"[DONE]" not in answer.body
    else:
        assert (answer.status, answer.ending) == (502, Ending.SERVER_ERROR)


ENDS: dict[str, tuple[tuple[bytes, ...], str]] = {
    "as many as were allowed": ((event(text_output="a"), event(text_output="b"), event(text_output="c")), "length"),
    "fewer": ((event(text_output="a"), event(text_output="b")), "stop"),
    "all in one": ((event(text_output="a b c"),), "stop"),
    "all in one, counted": ((event(text_output="a b c", num_output_tokens=3),), "length"),
    "an empty answer": ((event(text_output=""),), "stop"),
}


@both_ways
@pytest.mark.parametrize(("events", "reason"), ENDS.values(), ids=ENDS.keys())
def test_where_no_reason_is_told_the_number_of_tokens_tells(
    events: tuple[bytes, ...], reason: str, stream: bool
) -> None:
    answer = said(*events, stream=stream, max_tokens=3)
    assert (answer.finish_reason, answer.ending) == (reason, Ending.COMPLETE)


def test_an_answer_of_the_default_length_is_cut_off() -> None:
    tokens = [event(text_output="a")] * COMPLETION_TOKENS
    assert said(*tokens, api=Api.COMPLETIONS).finish_reason == "length"
    assert said(*tokens, api=Api.CHAT).finish_reason == "stop"


SILENT: dict[str, tuple[bytes, ...]] = {
    "nothing at all": (),
    "a model without the output": (event(TEXT="Hi"), event(TEXT="!")),
    "an output that is no text": (event(text_output=[0.5, 0.25]), event(text_output=7)),
    "an output that is empty": (event(text_output=[]),),
    "an output that is null": (event(text_output=None),),
}


@pytest.mark.parametrize("events", SILENT.values(), ids=SILENT.keys())
def test_a_good_end_without_any_text_is_no_answer(events: tuple[bytes, ...]) -> None:
    streamed = said(*events)
    assert (streamed.body, streamed.ending) == (b"", Ending.EMPTY)
    whole = said(*events, stream=False)
    assert (whole.status, whole.ending) == (502, Ending.SERVER_ERROR)


BROKEN = [b"data: {\n\n", b"data: Internal error\n\n", b"data: []\n\n", b"data: 7\n\n"]


@pytest.mark.parametrize("broken", BROKEN)
def test_an_event_that_cannot_be_read_fails_the_answer(broken: bytes) -> None:
    streamed = said(vllm_event("a"), broken, vllm_event("b", "stop"))
    assert streamed.ending is Ending.ERROR_IN_BAND
    assert streamed.events[-1]["error"]["code"] == 502
    whole = said(vllm_event("a"), broken, vllm_event("b", "stop"), stream=False)
    assert (whole.status, whole.ending) == (502, Ending.SERVER_ERROR)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{", b"[]", b'{"TEXT":"a"}', b"\xff"])
@both_ways
def test_a_good_status_over_what_is_no_answer_is_bad_gateway(body: bytes, stream: bool) -> None:
    answer = answered(TRITON.reading(asked(stream=stream)), 200, JSON, body)
    assert (answer.status, answer.media_type, answer.ending) == (502, JSON, Ending.SERVER_ERROR)


@pytest.mark.parametrize("status", [204, 301, 307])
def test_a_status_that_is_neither_answer_nor_error_is_bad_gateway(status: int) -> None:
    assert answered(TRITON.reading(asked()), status, b"", b"").status == 502


# --- errors ---------------------------------------------------------------------------------------------------------

VLLM = "Error generating stream: "
PYTHON = "Failed to process the request(s) for model 'm_0_0', message: "

ERRORS: dict[str, tuple[int, str, int, Ending]] = {
    "queue full": (503, "[request id: req-42] Exceeds maximum queue size", 503, Ending.OVERLOADED),
    "waited too long": (400, "Request timeout expired", 503, Ending.OVERLOADED),
    "unloading": (404, "Request for unknown model: 'm' has no available versions", 503, Ending.SERVER_ERROR),
    "version unloading": (
        400,
        "Request for unknown model: 'm' version 1 is not at ready state",
        503,
        Ending.SERVER_ERROR,
    ),
    "shutting down": (
        503,
        "[request id: req-42] Server is stopping, scheduler for model has stopped accepting new inference requests",
        503,
        Ending.SERVER_ERROR,
    ),
    "vLLM is dead": (503, "Model is unavailable due to unhealthy vLLM engine", 503, Ending.SERVER_ERROR),
    "unknown": (404, "Request for unknown model: 'm' is not found", 404, Ending.CLIENT_ERROR),
    "too large": (
        400,
        "Request JSON size of 70000000 bytes exceeds the maximum allowed value of 67108864. Use --http-max-input-size",
        413,
        Ending.CONTEXT_LENGTH,
    ),
    "too long for vLLM": (
        400,
        VLLM + "The decoder prompt (length 600) is longer than the maximum model length of 512.",
        400,
        Ending.CONTEXT_LENGTH,
    ),
    "too long for TensorRT-LLM": (
        400,
        "Encountered an error when fetching new request: Prompt length (200) exceeds maximum input length (1).",
        400,
        Ending.CONTEXT_LENGTH,
    ),
    "too long for its sequence": (
        500,
        "Cannot process new request: Prompt length (5056) exceeds maximum sequence length (2048)",
        400,
        Ending.CONTEXT_LENGTH,
    ),
    "too long for a Python model": (
        400,
        VLLM + "9000 input and 16 output tokens exceed the context of 8192",
        400,
        Ending.CONTEXT_LENGTH,
    ),
    "a value that vLLM refuses": (
        400,
        VLLM + "'NoneType' object has no attribute 'lora_name'",
        400,
        Ending.CLIENT_ERROR,
    ),
    "the model raised": (400, PYTHON + "RuntimeError: CUDA out of memory", 500, Ending.SERVER_ERROR),
    "the model raised with the prompt": (
        400,
        PYTHON + "KeyError: 'Request for unknown model'",
        500,
        Ending.SERVER_ERROR,
    ),
    "missing input": (400, "expected 2 inputs but got 1 inputs for model 'm'", 500, Ending.SERVER_ERROR),
    "a parameter that is a list": (400, "parameter 'stop' has invalid type", 500, Ending.SERVER_ERROR),
    "a header is missing": (403, "This API is restricted, expecting header 'key'", 403, Ending.CLIENT_ERROR),
    "a gateway's quota": (429, "slow down", 429, Ending.OVERLOADED),
    "a gateway's 503": (503, "upstream connect error", 503, Ending.SERVER_ERROR),
    "a gateway's 413": (413, "too big", 413, Ending.CONTEXT_LENGTH),
}


@both_ways
@pytest.mark.parametrize(("status", "message", "told", "ending"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_is_classified_by_its_words(
    status: int, message: str, told: int, ending: Ending, stream: bool
) -> None:
    body = json.dumps({"error": message}).encode()
    expected = message.removeprefix("[request id: req-42] ")
    for media_type, sent_body in ((JSON, body), (SSE, b"data: %b\n\n" % body)):
        answer = answered(TRITON.reading(asked(stream=stream)), status, media_type, sent_body)
        assert (answer.status, answer.ending) == (told, ending)
        assert answer.error is not None
        assert answer.error.message == expected


IN_BAND = {
    Ending.OVERLOADED: Ending.OVERLOADED_IN_BAND,
    Ending.CONTEXT_LENGTH: Ending.CONTEXT_LENGTH_IN_BAND,
    Ending.CLIENT_ERROR: Ending.CLIENT_ERROR_IN_BAND,
    Ending.SERVER_ERROR: Ending.ERROR_IN_BAND,
}


@pytest.mark.parametrize("name", [name for name, error in ERRORS.items() if error[0] != error[2] or error[2] >= 500])
def test_an_error_in_a_stream_is_classified_as_one_before_it(name: str) -> None:
    _, message, _, ending = ERRORS[name]
    answer = said(event(text_output="a"), b'data: {"error":%b}\n\n' % json.dumps(message).encode())
    if "gateway" not in name:
        assert answer.ending is IN_BAND[ending]
    assert b"[DONE]" not in answer.body


def test_a_model_that_the_policy_named_and_triton_does_not_know_is_elsewhere() -> None:
    reading = TRITON.reading(asked(model="gpt", engine_model="llama"))
    answer = answered(reading, *sent("triton/generate_unknown_model.txt"))
    assert (answer.status, answer.ending) == (503, Ending.SERVER_ERROR)


@pytest.mark.parametrize("status", [404, 405])
@pytest.mark.parametrize("body", [b"", b'{"detail":"Method Not Allowed"}', b"<html>no</html>"])
def test_a_server_that_is_no_triton_is_told_as_such(status: int, body: bytes) -> None:
    answer = answered(TRITON.reading(asked()), status, JSON, body)
    assert (answer.status, answer.ending) == (500, Ending.SERVER_ERROR)
    assert answer.error is not None
    assert answer.error.message == NO_TRITON


def test_paths_of_a_traceback_are_not_told() -> None:
    answer = answered(TRITON.reading(asked()), *sent("triton/failing_stream.txt"))
    assert b"model.py" in sent("triton/failing_stream.txt")[2]
    assert b"model.py" not in answer.body


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":"Failed to process the request(s) for model \'m\', message: OSError: no /models/m/1/weights.bin"}',
        b'{"error":"failed to load /models/m/1/model.py"}',
    ],
)
def test_paths_in_an_errors_words_are_not_told(body: bytes) -> None:
    for answer in (
        answered(TRITON.reading(asked()), 400, JSON, body),
        answered(TRITON.reading(asked()), 200, SSE, b"data: %b\n\n" % body),
    ):
        assert b"models/" not in answer.body
        assert answer.ending in (Ending.SERVER_ERROR, Ending.ERROR_IN_BAND)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "media_type", "data"),
    [
        (200, SSE, b'data: {"text_output":"a","finish_reason":"\\ud800"}\n\n'),
        (200, SSE, b'data: {"error":"\\ud800"}\n\n'),
        (400, JSON, b'{"error":"\\ud800"}'),
    ],
    ids=["reason", "event", "error"],
)
def test_half_a_character_in_an_engines_words_is_no_crash(
    status: int, media_type: bytes, data: bytes, stream: bool
) -> None:
    answer = answered(TRITON.reading(asked(model="m\ud800", stream=stream)), status, media_type, data)
    assert "\ufffd" in answer.body.decode()


def test_an_error_without_words_still_has_a_message() -> None:
    answer = answered(TRITON.reading(asked()), 500, b"", b"")
    assert answer.error is not None
    assert answer.error.message == "Triton answered with status 500"


# --- round trips ----------------------------------------------------------------------------------------------------

texts = st.lists(st.text(st.characters(exclude_categories=[]), max_size=12), min_size=1, max_size=8)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """What a model says, and the stream of it: members in any order, text escaped or not, scalars or lists."""
    parts = draw(texts)
    out: list[bytes] = []
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        members: list[tuple[str, object]] = [
            ("model_name", "m"),
            ("text_output", draw(st.sampled_from([part, [part]]))),
            ("finish_reason", "stop" if last else "None"),
            ("num_output_tokens", draw(st.sampled_from([1, [1]]))),
            ("num_input_tokens", 3),
            ("sequence_index", 0),
        ]
        ascii_only = draw(st.booleans()) or any(0xD800 <= ord(each) < 0xE000 for each in part)
        written = json.dumps(dict(draw(st.permutations(members))), ensure_ascii=ascii_only)
        out.append(f"data: {written}\n\n".encode())
    return parts, b"".join(out)


@settings(max_examples=150)
@given(
    streams(), st.lists(st.integers(0, 2000), max_size=6), st.booleans(), st.sampled_from([Api.CHAT, Api.COMPLETIONS])
)
def test_whatever_a_model_says_is_what_the_client_reads(
    stream: tuple[list[str], bytes], cuts: list[int], streaming: bool, api: Api
) -> None:
    parts, data = stream
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(places)]
    answer = answered(TRITON.reading(asked(api, stream=streaming)), 200, SSE, *pieces)
    assert answer.text == joined("".join(parts))
    assert answer.finish_reason == "stop"
    assert answer.ending is Ending.COMPLETE
    assert answer == answered(TRITON.reading(asked(api, stream=streaming)), 200, SSE, data)


@settings(max_examples=200)
@given(
    st.integers(100, 599),
    st.sampled_from([SSE, JSON, b""]),
    st.lists(st.binary(max_size=60), max_size=5),
    st.booleans(),
)
def test_no_bytes_of_an_engine_are_raised_at(status: int, media_type: bytes, parts: list[bytes], stream: bool) -> None:
    answer = answered(TRITON.reading(asked(stream=stream)), status, media_type, *parts)
    assert answer.status == 200 or 400 <= answer.status < 600
    if answer.media_type == JSON:
        assert answer.status != 200 or answer.finish_reason
        json.loads(answer.body)


@given(st.binary(min_size=1, max_size=20).filter(lambda data: not data.isascii()))
def test_text_that_is_no_utf_8_reaches_the_client_as_utf_8(text: bytes) -> None:
    text = text.translate(None, b'"\\' + bytes(range(32)))
    data = b'data: {"text_output":"%b","finish_reason":"stop"}\n\n' % text
    answer = said(data)
    assert answer.text == text.decode("utf-8", "replace")
    assert said(data, stream=False).text == answer.text
    in_list = b'data: {"finish_reason":"stop","text_output":[ "%b" ]}\n\n' % text
    assert said(in_list).text == answer.text


# --- what it is asked -----------------------------------------------------------------------------------------------


def outgoing(
    body: dict[str, object], api: Api = Api.CHAT, **named: Any
) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Target, body, and the sampling parameters in it."""
    read = read_body(json.dumps(body).encode())
    sent_out = TRITON.outgoing(asked(api, body=read, **named))
    written = json.loads(sent_out.body)
    return sent_out.target, written, json.loads(written["sampling_parameters"])


@both_ways
def test_the_least_that_is_asked(stream: bool) -> None:
    target, body, sampling = outgoing({}, stream=stream, prompt="<|user|>Hi", max_tokens=5)
    assert target == b"/v2/models/m/generate_stream"
    assert sampling == {"max_tokens": 5}
    del body["sampling_parameters"]
    assert body == {
        "id": "req-42",
        "text_input": "<|user|>Hi",
        "stream": True,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "max_tokens": 5,
    }


def test_all_that_can_be_asked() -> None:
    _, body, sampling = outgoing(
        {
            "temperature": 0.5,
            "top_p": "0.9",
            "top_k": 5.0,
            "min_p": 0.1,
            "seed": 7,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": "true",
            "stop": "END",
            "unheard_of": [1, 2],
        },
        max_tokens=9,
    )
    numbers = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    assert sampling == numbers | {"stop": ["END"]}
    plain = numbers | {"stop": "END", "stop_words": "END", "random_seed": 7, "min_length": 2}
    assert {name: body[name] for name in plain} == plain
    assert "unheard_of" not in body


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(-1, 100),
            "seed": st.integers(-5, 1 << 40),
            "min_tokens": st.integers(0, 9),
            "ignore_eos": st.booleans(),
            "stop": st.one_of(st.text(min_size=1, max_size=5), st.lists(st.text(min_size=1, max_size=5), max_size=3)),
        },
    )
)
def test_parameters_are_scalars(body: dict[str, object]) -> None:
    _, written, sampling = outgoing(body)
    assert all(isinstance(value, str | int | float | bool) for value in written.values())
    stops = body.get("stop", [])
    assert sampling.get("stop", []) == ([stops] if isinstance(stops, str) else stops)
    assert written.get("stop_words") == (sampling["stop"][0] if len(sampling.get("stop", [])) == 1 else None)
    assert written.get("top_k", 1) >= 1
    assert written.get("random_seed", 0) >= 0


def test_a_ceiling_is_always_named() -> None:
    assert outgoing({}, Api.CHAT)[2]["max_tokens"] == CHAT_TOKENS
    assert outgoing({}, Api.COMPLETIONS)[2]["max_tokens"] == COMPLETION_TOKENS


MODELS = {
    "llama": b"/v2/models/llama/generate_stream",
    "llama/versions/2": b"/v2/models/llama/versions/2/generate_stream",
    "org/llama": b"/v2/models/org%2Fllama/generate_stream",
    "llama:2": b"/v2/models/llama:2/generate_stream",
    "a b?c#d%": b"/v2/models/a%20b%3Fc%23d%25/generate_stream",
    "m/../x": b"/v2/models/m%2F..%2Fx/generate_stream",
    "mod\u00e8le": b"/v2/models/mod%C3%A8le/generate_stream",
}


@pytest.mark.parametrize(("model", "target"), MODELS.items(), ids=MODELS.keys())
def test_a_model_is_one_segment_and_its_version_another(model: str, target: bytes) -> None:
    assert TRITON.outgoing(asked(engine_model=model)).target == target
    assert TRITON.outgoing(asked(model=model)).target == target


@pytest.mark.parametrize("model", ["", ".", "..", "/versions/2", "m/versions/.."])
def test_a_model_that_is_no_segment_is_refused(model: str) -> None:
    with pytest.raises(SidecarError) as refused:
        TRITON.outgoing(asked(model=model))
    assert refused.value.reason is Reason.BAD_REQUEST
    assert refused.value.detail.startswith("model: ")


def test_halves_of_characters_in_a_request_are_replaced() -> None:
    _, body, sampling = outgoing({"stop": "\ud83d"}, prompt="a\ud83db\U0001f600")
    assert body["text_input"] == "a\ufffdb\U0001f600"
    assert sampling["stop"] == [body["stop_words"]] == ["\ufffd"]


def test_what_it_lacks_is_said_in_words() -> None:
    assert {"n", "tools", "logprobs", "response_format", "embeddings"} <= set(LACKS)
    assert "chat" not in LACKS
    for words in LACKS.values():
        assert words == words.strip(" .")
        assert words


def test_answers_that_pass_as_they_are_are_understood_without_a_dialect() -> None:
    good = read_answer(Api.OTHER, captures.body("triton/infer.txt"))
    assert good.error is None
    assert not good.malformed
