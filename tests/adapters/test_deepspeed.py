"""What MII's fronts are asked, with what values, and what they are not asked because they cannot."""

import json
from typing import Any

import pytest

from sidecar.adapters import TRANSLATORS
from sidecar.adapters.ask import Ask, needs_of, prompt_of, read_body
from sidecar.adapters.deepspeed import CHAT_TOKENS, COMPLETION_TOKENS, MOST_TOKENS
from sidecar.adapters.dialect import Translator
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.policy.schema import FRONTS, Front
from sidecar.wire.call import Api, read_call
from tests.adapters.answers import asked

CHAT, TEXT = Api.CHAT, Api.COMPLETIONS
MODEL, ENGINE_MODEL, ID, CREATED = "smol", "/models/smollm2-hf", "req-1", 1_700_000_000

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}


def ask(api: Api = CHAT, *, engine_model: str = ENGINE_MODEL, **fields: Any) -> Ask:
    """A client's request; `None` takes a member of `ASKED` away."""
    data = json.dumps({name: value for name, value in (ASKED | fields).items() if value is not None}).encode()
    body = read_body(data)
    # A chat's prompt is its template's where the front has none.
    prompt = prompt_of(body) if api is TEXT else "<user>Hi"
    return Ask(read_call(api, data), body, engine_model=engine_model, prompt=prompt, request_id=ID, created=CREATED)


def front(name: Front) -> Translator:
    return TRANSLATORS[("deepspeed", name)]


def sent(name: Front, api: Api = CHAT, **fields: Any) -> dict[str, object]:
    """The JSON that the front is asked with."""
    asked: dict[str, object] = json.loads(front(name).outgoing(ask(api, **fields)).body)
    return asked


# What they are asked.

SAMPLING = {"temperature": 1.0, "top_p": 1.0}
HI = [{"role": "user", "content": "Hi"}]


def test_the_openai_front_is_asked_in_words_that_mii_knows() -> None:
    outgoing = front("openai").outgoing(ask(CHAT, stream=True, max_tokens=9, user="u", seed=7, unknown={"a": 1}))
    assert outgoing.target == b"/v1/chat/completions"
    assert json.loads(outgoing.body) == {
        **SAMPLING, "model": ENGINE_MODEL, "messages": HI, "stream": True, "max_tokens": 9,
    }  # fmt: skip
    outgoing = front("openai").outgoing(ask(TEXT, max_tokens=9))
    assert outgoing.target == b"/v1/completions"
    assert json.loads(outgoing.body) == {
        **SAMPLING, "model": ENGINE_MODEL, "prompt": "Hi", "stream": False, "max_tokens": 9, "max_length": None,
    }  # fmt: skip


@pytest.mark.parametrize(("api", "prompt"), [(CHAT, "<user>Hi"), (TEXT, "Hi")])
@pytest.mark.parametrize("stream", [False, True])
def test_api_server_is_asked_for_a_stream_whatever_the_client_asks(api: Api, prompt: str, stream: bool) -> None:
    outgoing = front("api_server").outgoing(ask(api, stream=stream, max_tokens=9))
    assert outgoing.target == b"/generate"
    assert json.loads(outgoing.body) == {
        **SAMPLING, "prompt": prompt, "stream": True, "max_tokens": 9, "max_length": None,
    }  # fmt: skip


def test_the_gateway_is_asked_by_the_name_of_its_deployment() -> None:
    outgoing = front("gateway").outgoing(ask(CHAT, max_tokens=9, stream=True))
    assert outgoing.target == b"/mii/%2Fmodels%2Fsmollm2-hf"
    assert json.loads(outgoing.body) == {
        **SAMPLING, "prompts": "<user>Hi", "max_new_tokens": 9, "return_full_text": False, "do_sample": True,
        "ignore_eos": False,
    }  # fmt: skip
    assert front("gateway").outgoing(ask(TEXT, engine_model="")).target == b"/mii/smol"
    assert front("gateway").outgoing(ask(TEXT, engine_model="a\ud800")).target == b"/mii/a%3F"


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_deployment_that_is_no_segment_is_refused(name: str) -> None:
    with pytest.raises(SidecarError, match="model: DeepSpeed-MII can have no deployment"):
        front("gateway").outgoing(asked(model=name))


NAMES: dict[Front, tuple[str, str]] = {
    "openai": ("max_tokens", "min_tokens"),
    "api_server": ("max_tokens", "min_tokens"),
    "gateway": ("max_new_tokens", "min_new_tokens"),
}
each_front = pytest.mark.parametrize("name", NAMES)


@each_front
def test_sampling_is_passed_on_in_the_fronts_words(name: Front) -> None:
    asked = sent(name, temperature="0.5", top_p=0.25, top_k=40, min_tokens=2, max_tokens=7, stop=["END"])
    limit, least = NAMES[name]
    assert asked.items() >= {
        "temperature": 0.5, "top_p": 0.25, "top_k": 40, "stop": "END", limit: 7, least: 2,
    }.items()  # fmt: skip


@each_front
def test_what_the_client_leaves_out_is_openais_default(name: Front) -> None:
    limit, _ = NAMES[name]
    assert sent(name, CHAT).items() >= {**SAMPLING, limit: CHAT_TOKENS}.items()
    assert sent(name, TEXT).items() >= {**SAMPLING, limit: COMPLETION_TOKENS}.items()
    assert sent(name, CHAT, top_k=-1, min_tokens=0, stop=[]).items() <= sent(name, CHAT).items()
    assert sent(name, CHAT, max_tokens=1 << 30)[limit] == MOST_TOKENS


@each_front
def test_temperature_zero_is_the_likeliest_token(name: Front) -> None:
    asked = sent(name, temperature=0, top_k=5)
    assert asked.items() >= {"temperature": 1.0, "top_k": 1}.items()
    assert asked.get("do_sample") is (False if name == "gateway" else None)


@each_front
def test_a_temperature_near_zero_is_one_that_overflows_nothing(name: Front) -> None:
    assert sent(name, temperature=1e-9)["temperature"] == 0.01


def test_the_gateway_is_told_neither_lists_nor_nulls() -> None:
    asked = sent("gateway", TEXT, prompt=["Hi"], stop=["END"], min_tokens=1, ignore_eos="true", temperature=0)
    assert asked["ignore_eos"] is True
    assert {type(value) for value in asked.values()} <= {str, int, float, bool}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative temperature": ({"temperature": -1}, "temperature"),
    "no number": ({"temperature": "warm"}, "temperature"),
    "top_p of nothing": ({"top_p": 0}, "top_p"),
    "top_p of more than all": ({"top_p": 1.5}, "top_p"),
    "half a candidate": ({"top_k": 2.5}, "top_k"),
    "no token": ({"max_tokens": 0}, "max_tokens"),
    "more at least than at most": ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    "negative least": ({"min_tokens": -1}, "min_tokens"),
    "an empty stop": ({"stop": ""}, "stop"),
}


@each_front
@pytest.mark.parametrize(("fields", "field"), BAD.values(), ids=BAD.keys())
def test_a_value_that_mii_would_fail_at_is_the_clients_fault(name: Front, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SidecarError, match=f"^{field}: ") as caught:
        sent(name, **fields)
    assert (caught.value.reason, caught.value.origin) == (Reason.BAD_REQUEST, "downstream")


@each_front
@pytest.mark.parametrize("fields", [{"prompt": ""}, {"prompt": None}, {"prompt": [""]}], ids=str)
def test_a_completion_of_nothing_is_refused(name: Front, fields: dict[str, Any]) -> None:
    with pytest.raises(SidecarError, match=r"^prompt: must not be empty"):
        sent(name, TEXT, **fields)


@pytest.mark.parametrize("messages", [None, []])
def test_a_chat_without_messages_is_refused(messages: object) -> None:
    with pytest.raises(SidecarError, match=r"^messages: must not be empty"):
        sent("openai", CHAT, messages=messages)


def test_messages_are_made_of_texts_alone() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "cache": {"x": 1}},
        {"role": "assistant", "content": None, "name": "n"},
    ]
    assert sent("openai", messages=messages)["messages"] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "name": "n"},
    ]


@each_front
def test_half_a_surrogate_pair_is_no_text_for_protobuf(name: Front) -> None:
    body = front(name).outgoing(ask(TEXT, prompt="a\ud83db", messages=None)).body
    assert "a?b" in body.decode()


# What they lack.

LACKED: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "prompt": {"prompt": ["a", "b"]},
    "tools": {"tools": [{"type": "function"}]},
    "logprobs": {"logprobs": True},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"guided_json": {"type": "object"}},
    "logit_bias": {"logit_bias": {"5": 1}},
    "content": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "modalities": {"modalities": ["text", "audio"]},
    "echo": {"echo": True},
    "suffix": {"suffix": "s"},
    "stop": {"stop": ["a", "b"]},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": "-0.5"},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_p": {"min_p": 0.1},
    "ignore_eos": {"ignore_eos": True},
    "tool_calls": {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
}

ABLE: dict[Front, set[str]] = {"openai": set(), "api_server": {"tool_calls"}, "gateway": {"ignore_eos", "tool_calls"}}


def needs(fields: dict[str, Any]) -> frozenset[str]:
    body = ASKED | fields
    return needs_of(TEXT, int(body.get("n", 1)), read_body(json.dumps(body).encode()))


@each_front
@pytest.mark.parametrize(("need", "fields"), LACKED.items(), ids=LACKED.keys())
def test_what_a_front_lacks_is_a_need_with_a_reason(name: Front, need: str, fields: dict[str, Any]) -> None:
    assert needs(fields) == {need}
    reason = front(name).lacks.get(need)
    assert (reason is None) == (need in ABLE[name])
    assert reason is None or reason.startswith("it ")


def test_what_says_nothing_is_no_need() -> None:
    neutral = {
        "n": 1, "best_of": 1, "tools": [], "logprobs": None, "response_format": {"type": "text"}, "logit_bias": {},
        "echo": False, "suffix": "", "stop": ["a"], "presence_penalty": 0, "frequency_penalty": "0",
        "repetition_penalty": 1.0, "min_p": 0, "ignore_eos": False, "seed": 5, "prompt": ["a"],
    }  # fmt: skip
    assert needs(neutral) == frozenset()


@each_front
@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES, Api.EMBEDDINGS])
def test_other_apis_are_lacked(name: Front, api: Api) -> None:
    assert needs_of(api, 1, None) & front(name).lacks.keys() == {api.value}


def test_only_the_openai_front_has_a_template() -> None:
    assert [name for name in FRONTS["deepspeed"] if front(name).applies_template] == ["openai"]
