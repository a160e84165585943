import json

import pytest

from sidecar.demo.dialect import SHAPES, Ask, Chat, Messages, Responses, Spec, Text, error_body, text_of, whole_stream

STREAMED = [Chat, Text, Messages, Responses]


def events_of(stream: bytes) -> list[tuple[str, object]]:
    """Event name (empty for none) and decoded data of every event; `[DONE]` as itself."""
    assert stream.endswith(b"\n\n")
    events: list[tuple[str, object]] = []
    for block in stream[:-2].split(b"\n\n"):
        lines = block.decode().split("\n")
        name = ""
        if lines[0].startswith("event: "):
            name = lines.pop(0).removeprefix("event: ")
        assert len(lines) == 1 and lines[0].startswith("data: ")
        data = lines[0].removeprefix("data: ")
        events.append((name, data if data == "[DONE]" else json.loads(data)))
    return events


def spec(tokens: int = 3, **more: object) -> Spec:
    return Spec('mo"del', "r1", tokens, 7, **more)  # type: ignore[arg-type]


def test_chat_stream_has_role_tokens_finish_usage_and_done_in_this_order() -> None:
    events = [data for _, data in events_of(whole_stream(Chat(spec(usage=True)), 3))]
    assert events[-1] == "[DONE]"
    chunks = [event for event in events if isinstance(event, dict)]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == "chatcmpl-r1" for chunk in chunks)
    assert all(chunk["model"] == 'mo"del' for chunk in chunks)
    role, first, second, third, finish, usage = chunks
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"]["content"] for chunk in (first, second, third)] == ["t0 ", "t1 ", "t2 "]
    assert [chunk["choices"][0]["finish_reason"] for chunk in (role, third, finish)] == [None, None, "stop"]
    assert usage["choices"] == [] and usage["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
    }


def test_usage_is_only_streamed_on_request() -> None:
    assert b"usage" not in whole_stream(Chat(spec()), 3)


def test_each_choice_gets_every_token_and_its_own_finish() -> None:
    events = [data for _, data in events_of(whole_stream(Chat(spec(choices=2)), 3)) if isinstance(data, dict)]
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "t0 t1 t2 "
        assert [choice["finish_reason"] for choice in mine] == [None] * 4 + ["stop"]


def test_text_stream_has_no_role_chunk() -> None:
    events = [data for _, data in events_of(whole_stream(Text(spec()), 3))]
    assert events[-1] == "[DONE]"
    first = events[0]
    assert isinstance(first, dict) and first["choices"][0]["text"] == "t0 " and first["object"] == "text_completion"


def test_messages_stream_names_its_events_and_ends_with_message_stop() -> None:
    events = events_of(whole_stream(Messages(spec(finish_reason="length")), 3))
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(isinstance(data, dict) and data["type"] == name for name, data in events)
    delta = events[-2][1]
    assert isinstance(delta, dict) and delta["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(("finish", "last"), [("stop", "response.completed"), ("length", "response.incomplete")])
def test_responses_stream_numbers_its_events_and_ends_with_the_response(finish: str, last: str) -> None:
    events = events_of(whole_stream(Responses(spec(finish_reason=finish)), 3))
    numbers = [data["sequence_number"] for _, data in events if isinstance(data, dict)]
    assert numbers == list(range(len(events)))
    name, data = events[-1]
    assert name == last and isinstance(data, dict)
    assert data["response"]["output"][0]["content"][0]["text"] == "t0 t1 t2 "


@pytest.mark.parametrize("path", list(SHAPES))
@pytest.mark.parametrize("tokens", [0, 1, 12])
def test_plain_answer_is_json_and_says_the_same_text(path: bytes, tokens: int) -> None:
    body = json.loads(SHAPES[path](spec(tokens)).plain())
    assert body["model"] == 'mo"del'
    assert b"embeddings" in path or text_of(tokens).decode() in json.dumps(body)


@pytest.mark.parametrize("shape", [Chat, Text])
@pytest.mark.parametrize("index", [0, 9, 10, 99_999])
def test_event_bytes_is_the_size_of_every_token_event(shape: type[Chat | Text], index: int) -> None:
    event = shape(spec(event_bytes=400)).token(index)
    assert len(event) == 400
    assert b"t%d ." % index in event


def test_event_bytes_too_small_for_an_event_leaves_it_as_it_is() -> None:
    assert Chat(spec(event_bytes=10)).token(3) == Chat(spec()).token(3)


@pytest.mark.parametrize("shape", STREAMED)
def test_two_answers_with_one_id_are_identical_and_with_two_are_not(
    shape: type[Chat | Text | Messages | Responses],
) -> None:
    one, same = whole_stream(shape(spec()), 3), whole_stream(shape(spec()), 3)
    other = whole_stream(shape(Spec('mo"del', "r2", 3, 7)), 3)
    assert one == same != other


@pytest.mark.parametrize(
    ("ask", "limit"),
    [
        (Ask(), None),
        (Ask(max_tokens=3), 3),
        (Ask(max_output_tokens=4), 4),
        (Ask(max_tokens=3, max_completion_tokens=5), 5),
        (Ask(max_tokens=0), 0),
    ],
)
def test_limit_is_the_number_asked_for(ask: Ask, limit: int | None) -> None:
    assert ask.limit == limit


@pytest.mark.parametrize(
    ("status", "kind", "code", "said"),
    [
        (500, "", None, {"type": "InternalServerError", "code": 500}),
        (404, "", None, {"type": "NotFoundError", "code": 404}),
        (429, "rate_limit", "slow_down", {"type": "rate_limit", "code": "slow_down"}),
    ],
)
def test_error_body_has_the_words_of_its_status(
    status: int, kind: str, code: int | str | None, said: dict[str, object]
) -> None:
    assert json.loads(error_body(status, 'quo"te', kind, code))["error"] == {"message": 'quo"te', "param": None, **said}
