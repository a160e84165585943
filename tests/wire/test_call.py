"""What a request body asks for, and which bodies are refused."""

import json

import pytest

from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.call import API_BY_PATH, Api, api_of, read_call
from tests.facts import facts

MESSAGES = [{"role": "user", "content": "hi"}]


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("method", "path", "api"),
    [
        (b"POST", b"/v1/chat/completions", Api.CHAT),
        (b"POST", b"/v1/completions", Api.COMPLETIONS),
        (b"POST", b"/v1/responses", Api.RESPONSES),
        (b"POST", b"/v1/messages", Api.MESSAGES),
        (b"POST", b"/v1/embeddings", Api.EMBEDDINGS),
        (b"POST", b"/v1/rerank", Api.OTHER),
        (b"GET", b"/v1/chat/completions", None),
        (b"post", b"/v1/chat/completions", None),
        (b"POST", b"/v1/chat/completions/", None),
        (b"POST", b"/v1//chat/completions", None),
        (b"POST", b"/v1/chat%2Fcompletions", None),
        (b"POST", b"/v1/responses/resp_1/cancel", None),
        (b"POST", b"/v1/messages/count_tokens", None),
        (b"POST", b"/v1/audio/transcriptions", None),
        (b"POST", b"/tokenize", None),
        (b"POST", b"", None),
    ],
)
def test_only_posts_to_known_paths_are_inference(method: bytes, path: bytes, api: Api | None) -> None:
    assert api_of(method, path) is api


def test_every_api_has_a_path() -> None:
    assert set(API_BY_PATH.values()) == set(Api)


def test_a_chat_call_is_read() -> None:
    call = read_call(Api.CHAT, body(model="m", stream=True, user="u", max_tokens=7, n=2, messages=MESSAGES, top_p=0.1))
    assert call.api is Api.CHAT
    assert (call.model, call.stream, call.user, call.max_tokens, call.n) == ("m", True, "u", 7, 2)


def test_an_empty_object_is_a_call() -> None:
    call = read_call(Api.CHAT, b" {} \n")
    assert (call.model, call.stream, call.user, call.max_tokens, call.n) == ("", False, "", None, 1)


def test_null_fields_are_absent_fields() -> None:
    fields = dict.fromkeys(("model", "stream", "user", "max_tokens", "max_completion_tokens", "n", "metadata"))
    nulls, nothing = read_call(Api.MESSAGES, body(**fields)), read_call(Api.MESSAGES, b"{}")
    nulls.whole = nothing.whole = None
    assert facts(nulls) == facts(nothing)


def test_a_call_has_its_body_as_it_was_decoded() -> None:
    whole = read_call(Api.CHAT, body(model="m", messages=MESSAGES)).whole
    assert whole is not None and bytes(whole.messages) == json.dumps(MESSAGES).encode()


def test_what_only_python_reads_is_not_decoded_further() -> None:
    call = read_call(Api.CHAT, b'{"model":"m","messages":[NaN]}')
    assert call.model == "m" and call.whole is None


@pytest.mark.parametrize(
    ("api", "fields", "limit"),
    [
        (Api.CHAT, {"max_tokens": 5}, 5),
        (Api.CHAT, {"max_completion_tokens": 6}, 6),
        (Api.CHAT, {"max_completion_tokens": 6, "max_tokens": 5}, 6),
        (Api.CHAT, {"max_completion_tokens": 0, "max_tokens": 5}, 5),
        (Api.CHAT, {"max_completion_tokens": 6, "max_tokens": 50}, 50),
        (Api.CHAT, {"max_output_tokens": 7}, None),
        (Api.COMPLETIONS, {"max_completion_tokens": 6, "max_tokens": 5}, 5),
        (Api.COMPLETIONS, {"max_completion_tokens": 6}, None),
        (Api.MESSAGES, {"max_completion_tokens": 6, "max_tokens": 5}, 5),
        (Api.RESPONSES, {"max_output_tokens": 7, "max_tokens": 5}, 7),
        (Api.MESSAGES, {"max_tokens": 5}, 5),
        (Api.COMPLETIONS, {"max_tokens": 0}, 0),
        (Api.COMPLETIONS, {"max_tokens": -1}, -1),
        (Api.COMPLETIONS, {"max_tokens": "16"}, 16),
        (Api.COMPLETIONS, {"max_tokens": " 16 "}, 16),
        (Api.COMPLETIONS, {"max_tokens": 16.0}, 16),
        (Api.COMPLETIONS, {"max_tokens": 10**30}, 10**30),
    ],
)
def test_the_token_ceiling_is_read_as_engines_read_it(api: Api, fields: dict[str, object], limit: int | None) -> None:
    call = read_call(api, body(**fields))
    assert call.max_tokens == limit
    assert call.max_tokens is None or type(call.max_tokens) is int


@pytest.mark.parametrize(
    ("value", "stream"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False), ("on", True), ("0", False)],
)
def test_stream_is_read_as_engines_read_it(value: object, stream: bool) -> None:
    assert read_call(Api.CHAT, body(stream=value)).stream is stream


@pytest.mark.parametrize(("value", "n"), [(1, 1), (4, 4), ("3", 3), (0, 1), (-2, 1), (None, 1)])
def test_n_is_at_least_one(value: object, n: int) -> None:
    assert read_call(Api.CHAT, body(n=value)).n == n


@pytest.mark.parametrize(
    ("api", "fields", "user"),
    [
        (Api.CHAT, {"user": "u", "metadata": {"user_id": "v"}}, "u"),
        (Api.CHAT, {"metadata": {"user_id": "v"}}, ""),
        (Api.MESSAGES, {"metadata": {"user_id": "v"}}, "v"),
        (Api.MESSAGES, {"user": "u", "metadata": {"user_id": "v"}}, "u"),
        (Api.MESSAGES, {"metadata": {"user_id": None}}, ""),
        (Api.MESSAGES, {"metadata": {"user_id": 7}}, ""),
        (Api.MESSAGES, {"metadata": {}}, ""),
        (Api.MESSAGES, {"metadata": "text"}, ""),
        (Api.CHAT, {"metadata": "text"}, ""),
    ],
)
def test_the_user_is_where_its_api_has_it(api: Api, fields: dict[str, object], user: str) -> None:
    assert read_call(api, body(**fields)).user == user


def test_fields_that_are_not_read_are_not_judged() -> None:
    data = b'{"model":"m","messages":7,"temperature":"hot","tools":{"a":[null]},"prompt":"\xff"}'
    assert read_call(Api.CHAT, data).model == "m"


@pytest.mark.parametrize(
    "data",
    [
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        b'{"model":"m","temperature":NaN}',
        b'{"model":"m","logit_bias":{"7":-Infinity}}',
        b'{"model":"x","model":"m"}',
    ],
    ids=["bom", "utf-16", "nan", "infinity", "the last of two models"],
)
def test_what_pythons_engines_read_is_read(data: bytes) -> None:
    assert read_call(Api.CHAT, data).model == "m"


REFUSED = {
    "empty": (b"", "not valid JSON"),
    "cut": (b'{"model":', "not valid JSON"),
    "text": (b"hello", "not valid JSON"),
    "form": (b"model=m&stream=true", "not valid JSON"),
    "two objects": (b"{}{}", "not valid JSON"),
    "trailing comma": (b'{"model":"m",}', "not valid JSON"),
    "single quotes": (b"{'model':'m'}", "not valid JSON"),
    "binary": (b"\x00\xff\x00", "not valid JSON"),
    "invalid utf-8 in the model": (b'{"model":"\xff"}', "not valid JSON"),
    "array": (b'[{"model":"m"}]', "must be a JSON object"),
    "string": (b'"m"', "must be a JSON object"),
    "number": (b"7", "must be a JSON object"),
    "null": (b"null", "must be a JSON object"),
    "model of a wrong type": (b'{"model":7}', "model: expected"),
    "user of a wrong type": (b'{"user":["u"]}', "user: expected"),
    "stream of a wrong type": (b'{"stream":[]}', "stream: expected"),
    "stream of a wrong word": (b'{"stream":"maybe"}', "stream: expected a boolean"),
    "stream of a wrong number": (b'{"stream":2}', "stream: expected a boolean"),
    "max_tokens of a wrong type": (b'{"max_tokens":{}}', "max_tokens: expected"),
    "max_tokens a boolean": (b'{"max_tokens":true}', "max_tokens: expected"),
    "max_tokens of a word": (b'{"max_tokens":"many"}', "max_tokens: expected an integer"),
    "max_tokens a fraction": (b'{"max_tokens":1.5}', "max_tokens: expected an integer"),
    "max_tokens infinite": (b'{"max_tokens":"inf"}', "max_tokens: expected an integer"),
    "n of a wrong type": (b'{"n":[1]}', "n: expected"),
    "nested without end": (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "nested without end and cut": (b'{"x":NaN,"messages":' + b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize(("data", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_body_is_refused_with_its_reason(data: bytes, words: str) -> None:
    with pytest.raises(SidecarError) as refused:
        read_call(Api.CHAT, data)
    assert refused.value.reason is Reason.BAD_REQUEST
    assert refused.value.origin == "downstream"
    assert not refused.value.retryable
    assert words in refused.value.detail


def test_a_long_prompt_with_half_an_emoji_is_read_and_a_flood_of_values_is_not() -> None:
    prose = b"All happy families are alike, and so on. " * 50_000
    assert read_call(Api.CHAT, b'{"model":"m","prompt":"' + prose + b'\\ud83d"}').model == "m"
    with pytest.raises(SidecarError, match="not valid JSON"):
        read_call(Api.CHAT, b'{"model":"m","prompt":[' + b"[]," * 500_000 + b"NaN]}")


def test_a_body_that_is_no_object_is_told_so() -> None:
    with pytest.raises(SidecarError, match=r"^the body must be a JSON object: expected `object`, got `array`$"):
        read_call(Api.CHAT, b"[]")


def test_a_refusal_quotes_no_prompt() -> None:
    with pytest.raises(SidecarError) as refused:
        read_call(Api.CHAT, b'{"model":7,"messages":"my secret"}')
    assert "secret" not in refused.value.detail
    assert refused.value.detail == "model: expected `str | null`, got `int`"


@pytest.mark.parametrize("half", [b"\\ud83d", b"\\ude00"])
def test_half_an_emoji_in_a_prompt_is_the_engines_business(half: bytes) -> None:
    call = read_call(Api.CHAT, b'{"model":"m","stream":true,"messages":"' + half + b'"}')
    assert (call.model, call.stream) == ("m", True)
