"""What is read of a client's body, and what an engine must be able to do for it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.ask import (
    MOST_BYTES,
    MOST_VALUES,
    Ask,
    Body,
    is_set,
    messages_of,
    needs_of,
    prompt_of,
    read_body,
    text_of,
)
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.call import Api, Call
from tests.adapters.answers import asked


def body(**members: object) -> Body:
    return read_body(json.dumps(members).encode())


# --- reading --------------------------------------------------------------------------------------------------------


def test_what_is_not_named_here_is_not_passed_on() -> None:
    assert body(model="m", temperature=0.5, unheard_of={"a": 1}) == Body(temperature=0.5)


def test_pythons_json_is_read() -> None:
    data = b'\xef\xbb\xbf{"prompt":"a\\ud83d","temperature":NaN}'
    assert read_body(data) == Body(prompt="a\ud83d", temperature=None)


UNREADABLE = {
    "a list": (b"[]", ""),
    "no JSON": (b"{", ""),
    "not UTF-8": (b'{"prompt":"\xff"}', ""),
    "messages": (b'{"messages":"Hi"}', "messages: "),
    "a message": (b'{"messages":["Hi"]}', "messages[0]: "),
    "a prompt": (b'{"prompt":7}', "prompt: "),
    "a number": (b'{"temperature":[1]}', "temperature: "),
    "stop": (b'{"stop":[1]}', "stop[0]: "),
    "a format": (b'{"response_format":"json"}', "response_format: "),
    "too deep": (b'{"logprobs":' + b"[" * 20_000 + b"]" * 20_000 + b"}", ""),
}


@pytest.mark.parametrize(("data", "detail"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_read_is_named(data: bytes, detail: str) -> None:
    with pytest.raises(SidecarError) as refused:
        read_body(data)
    assert refused.value.reason is Reason.BAD_REQUEST
    assert refused.value.origin == "downstream"
    assert refused.value.detail.startswith(detail)


# --- needs ----------------------------------------------------------------------------------------------------------

NEEDS: dict[str, tuple[dict[str, object], set[str]]] = {
    "nothing": ({}, set()),
    "vLLM's defaults, all named": (
        {
            "temperature": 1,
            "top_p": 1,
            "top_k": 0,
            "min_p": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1,
            "best_of": 1,
            "logprobs": False,
            "top_logprobs": 0,
            "tools": [],
            "stop": [],
            "logit_bias": {},
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "echo": False,
            "suffix": "",
            "ignore_eos": False,
        },
        set(),
    ),
    "the same, as nulls": (dict.fromkeys(Body.__struct_fields__), set()),
    "several answers of which the best": ({"best_of": 2}, {"best_of"}),
    "tools": ({"tools": [{"type": "function"}]}, {"tools"}),
    "functions": ({"functions": [{"name": "f"}]}, {"tools"}),
    "logprobs of a chat": ({"logprobs": True}, {"logprobs"}),
    "logprobs of a completion": ({"logprobs": 0}, {"logprobs"}),
    "top logprobs": ({"top_logprobs": 2}, {"logprobs"}),
    "logprobs of the prompt": ({"prompt_logprobs": 0}, {"logprobs"}),
    "JSON": ({"response_format": {"type": "json_object"}}, {"response_format"}),
    "a schema": ({"response_format": {"type": "json_schema", "json_schema": {}}}, {"response_format"}),
    "a guide": ({"guided_regex": "a+"}, {"structured_outputs"}),
    "structured outputs": ({"structured_outputs": {"choice": ["a"]}}, {"structured_outputs"}),
    "biases": ({"logit_bias": {"7": -100}}, {"logit_bias"}),
    "audio": ({"modalities": ["text", "audio"]}, {"modalities"}),
    "echo": ({"echo": "true"}, {"echo"}),
    "suffix": ({"suffix": "}"}, {"suffix"}),
    "a prompt": ({"prompt": "Hi"}, set()),
    "one prompt in a list": ({"prompt": ["Hi"]}, set()),
    "two prompts": ({"prompt": ["Hi", "Ho"]}, {"prompt"}),
    "token ids": ({"prompt": [1, 2]}, {"prompt"}),
    "one prompt of token ids": ({"prompt": [[1, 2]]}, {"prompt"}),
    "no prompt in a list": ({"prompt": []}, {"prompt"}),
    "an image": ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": ""}}]}]}, {"content"}),
    "parts of text": ({"messages": [{"content": [{"type": "text", "text": "Hi"}, "Ho"]}]}, set()),
    "an image that calls itself a text": (
        {"messages": [{"content": [{"type": "image_url", "text": "", "image_url": {"url": ""}}]}]},
        {"content"},
    ),
    "a content that is no text": ({"messages": [{"content": 5}]}, {"content"}),
    "a content that is one part": ({"messages": [{"content": {"type": "text", "text": "Hi"}}]}, {"content"}),
    "a content that is none": ({"messages": [{"content": None}, {}]}, set()),
    "a history of tool calls": ({"messages": [{"content": None, "tool_calls": [{}]}]}, {"tool_calls"}),
    "one stop string": ({"stop": ["\n"]}, set()),
    "two stop strings": ({"stop": ["\n", "."]}, {"stop"}),
    "penalties": (
        {"presence_penalty": 0.1, "frequency_penalty": "0.1", "repetition_penalty": 1.1, "min_p": 0.1},
        {"presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"},
    ),
    "going on": ({"ignore_eos": True}, {"ignore_eos"}),
    "a thinking switch": ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs"}),
    "a template of the client's": ({"chat_template": "{{ messages }}"}, {"chat_template"}),
    "to be gone on with": (
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt", "continue_final_message"},
    ),
    "special tokens": ({"skip_special_tokens": False}, {"skip_special_tokens"}),
    "no special tokens": ({"skip_special_tokens": "true"}, set()),
    "the usual of a template": (
        {"add_generation_prompt": True, "continue_final_message": False, "documents": []},
        set(),
    ),
    "vLLM's own": (
        {"stop_token_ids": [2], "bad_words": ["x"], "allowed_token_ids": [1], "truncate_prompt_tokens": 5},
        {"stop_token_ids", "bad_words", "allowed_token_ids", "truncate_prompt_tokens"},
    ),
}


@pytest.mark.parametrize(("members", "needs"), NEEDS.values(), ids=NEEDS.keys())
def test_needs_are_what_would_change_the_answer(members: dict[str, object], needs: set[str]) -> None:
    read = body(**members)
    assert needs_of(Api.COMPLETIONS, 1, read) == needs
    assert needs_of(Api.CHAT, 1, read) == needs | {"chat"}
    assert needs_of(Api.COMPLETIONS, 2, read) == needs | {"n"}


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES, Api.EMBEDDINGS, Api.OTHER])
def test_another_api_is_a_need_itself(api: Api) -> None:
    assert needs_of(api, 1, None) == {api.value}


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers().map(lambda n: n * 10**400), st.floats(), st.text(max_size=5)
)
members = st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name"]), leaves, max_size=3)
values = st.one_of(leaves, st.lists(leaves, max_size=3), members, st.lists(members, max_size=2))


@given(st.dictionaries(st.sampled_from(Body.__struct_fields__), values, max_size=4))
def test_whatever_is_readable_has_needs_a_prompt_and_messages(members: dict[str, object]) -> None:
    try:
        read = body(**members)
    except SidecarError:
        return
    assert needs_of(Api.CHAT, 1, read) >= {"chat"}
    assert all(isinstance(message["content"], str) for message in messages_of(read))
    assert isinstance(prompt_of(read), str)
    assert asked(body=read).prompt_size >= 0


# --- what a dialect gets --------------------------------------------------------------------------------------------

CONTENTS: dict[str, tuple[object, str]] = {
    "text": ("Hi", "Hi"),
    "nothing": (None, ""),
    "parts": ([{"type": "text", "text": "Hi"}, "Ho"], "Hi\nHo"),
    "a part without text": ([{"type": "image_url"}, 7], "\n"),
    "a number": (7, ""),
}


def nested(value: bytes, count: int) -> bytes:
    return b'{"prompt":[%b]}' % b",".join([value] * count)


LARGE = {
    "bytes": b'{"prompt":"%b"}' % (b"a" * MOST_BYTES),
    "lists": nested(b"[]", MOST_VALUES),
    "texts": nested(b'""', MOST_VALUES),
    "numbers": nested(b"1", MOST_VALUES + 1),
    "messages": b'{"messages":[%b]}' % b",".join([b'{"content":""}'] * MOST_VALUES),
    "texts without end": b'{"prompt":"' + b'"' * (5 * MOST_VALUES) + b"," * MOST_VALUES,
}


@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE.keys())
def test_what_would_keep_all_others_waiting_is_too_large(data: bytes) -> None:
    with pytest.raises(SidecarError) as refused:
        read_body(data)
    assert refused.value.reason is Reason.TOO_LARGE


@given(st.lists(st.sampled_from(["[", "{", ",", '"', "\\", '\\"', "a", "\u00e9"]), min_size=1, max_size=9))
def test_what_a_prompt_is_full_of_is_not_counted(pieces: list[str]) -> None:
    prompt = "".join(pieces) * (MOST_VALUES + 1)
    for each in (prompt, [prompt]):
        assert prompt_of(read_body(json.dumps({"model": "m", "prompt": each, "stop": "\\"}).encode())) == prompt


@pytest.mark.parametrize(("content", "text"), CONTENTS.values(), ids=CONTENTS.keys())
def test_content_is_text(content: object, text: str) -> None:
    assert text_of(content) == text
    read = Body(messages=[{"role": "user", "name": "a", "content": content}])
    assert messages_of(read) == [{"role": "user", "name": "a", "content": text}]


@pytest.mark.parametrize(
    ("prompt", "text"), [("Hi", "Hi"), (["Hi"], "Hi"), (None, ""), ([], ""), ([[1]], ""), (["Hi", "Ho"], "Hi")]
)
def test_a_prompt_is_one_text(prompt: str | list[object] | None, text: str) -> None:
    assert prompt_of(Body(prompt=prompt)) == text


@pytest.mark.parametrize(("flag", "meant"), [(True, True), ("On", True), (1, True), ("0", False), (None, False)])
def test_flags_are_read_as_engines_read_them(flag: object, meant: bool) -> None:
    assert is_set(flag) is meant


@pytest.mark.parametrize("stream", [True, False])
def test_usage_is_an_event_of_streams_alone(stream: bool) -> None:
    assert asked(stream=stream, body=body(stream_options={"include_usage": True})).usage is stream
    assert not asked(stream=stream, body=body(stream_options={})).usage


def test_the_engines_name_is_the_clients_where_the_policy_has_none() -> None:
    assert asked(model="a").engine_model == "a"
    other = asked(model="a", engine_model="b")
    assert (other.model, other.engine_model) == ("a", "b")


def test_what_was_sent_is_let_go_but_its_size() -> None:
    read = body(messages=[{"role": "user", "content": "Hello"}])
    ask = Ask(Call(Api.CHAT, "m", True, "", None, 1), read, engine_model="", prompt="", request_id="r", created=0)
    ask.sent()
    assert (ask.prompt, ask.body, ask.prompt_size) == ("", Body(), 5)
