"""What the answers of MII's fronts become, recorded and invented ones, whole and over every split."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.reading import Reading
from sidecar.adapters.vllm import Vllm
from sidecar.core.classify import ending_of_status, ending_of_stream
from sidecar.kernel.outcome import Ending
from sidecar.policy.schema import FRONTS, Front
from sidecar.wire.answer import Usage, read_answer
from sidecar.wire.call import Api
from sidecar.wire.stream import StreamReader
from tests import captures
from tests.adapters.test_deepspeed import CHAT, CREATED, ENGINE_MODEL, ID, MODEL, TEXT, ask, each_front, front

SSE, JSON, PLAIN, HTML = b"text/event-stream", b"application/json", b"text/plain", b"text/html"


def play(reading: Reading, status: int, media_type: bytes, *pieces: bytes, cut: bool = False) -> bytes:
    """Feeds an answer in pieces; what the client gets. `cut`: the connection broke, so the end is not told."""
    reading.head(status, media_type)
    out = b"".join([reading.feed(piece) for piece in pieces])
    return out if cut else out + reading.end()


@dataclass(frozen=True)
class Told:
    """What a client reads: its status, a stream's texts or the whole one, why it ended, and how we judge it."""

    status: int
    ending: Ending
    texts: tuple[str, ...] = ()
    finish: str | None = None
    usage: Usage | None = None
    error: str = ""


def told(reading: Reading, out: bytes, api: Api, *, cut: bool = False) -> Told:
    """Reads `out` as a client does, with everything in it checked for being what vLLM sends."""
    if reading.media_type == SSE:
        return streamed(out, api, cut=cut)
    answer = read_answer(api, out, status=reading.status)
    ending = ending_of_status(reading.status, answer.error, False)
    assert not answer.malformed
    if answer.error is not None:
        error = json.loads(out)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == reading.status
        return Told(reading.status, ending, error=answer.error.message)
    return Told(reading.status, ending, (whole(out, api),), answer.finish_reason, answer.usage)


def whole(out: bytes, api: Api) -> str:
    body = json.loads(out)
    kind, prefix = ("chat.completion", "chatcmpl-") if api is CHAT else ("text_completion", "cmpl-")
    assert (body["id"], body["object"], body["created"], body["model"]) == (prefix + ID, kind, CREATED, MODEL)
    [choice] = body["choices"]
    assert choice["index"] == 0
    if api is CHAT:
        assert choice["message"]["role"] == "assistant"
    text: str = choice["message"]["content"] if api is CHAT else choice["text"]
    return text


def streamed(out: bytes, api: Api, *, cut: bool) -> Told:
    reader = StreamReader(api)
    reader.feed(out)
    assert reader.malformed == 0
    ending = ending_of_stream(reader, not cut)
    kind, prefix = ("chat.completion.chunk", "chatcmpl-") if api is CHAT else ("text_completion", "cmpl-")
    events = [event.removeprefix(b"data: ") for event in out.split(b"\n\n")[:-1]]
    assert (events[-1:] == [b"[DONE]"]) == (ending is Ending.COMPLETE)
    texts: list[str] = []
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    for number, chunk in enumerate(chunks):
        if "error" in chunk:
            assert chunk is chunks[-1]
            continue
        assert (chunk["id"], chunk["object"], chunk["created"], chunk["model"]) == (prefix + ID, kind, CREATED, MODEL)
        for choice in chunk["choices"]:
            if api is CHAT:
                assert ("role" in choice["delta"]) == (number == 0)
            text = choice["delta"]["content"] if api is CHAT else choice["text"]
            texts += [text] if text else []
    error = reader.error.message if reader.error is not None else ""
    return Told(200, ending, tuple(texts), reader.finish_reason, reader.usage, error)


# The recordings.

NO_MODEL = f"DeepSpeed-MII does not serve the engine_model that the policy names for {MODEL}"
OTHER_FRONT = "DeepSpeed-MII has no such path here: it is another of its servers than the policy says"
FAILED = "DeepSpeed-MII answered 500: Internal Server Error"
REFUSED = "DeepSpeed-MII refused the request: "

COMPLETE = Ending.COMPLETE
CLIENT, SERVER = Ending.CLIENT_ERROR, Ending.SERVER_ERROR

STREAM_TEXTS = ("Hello! ", "How ", "can")

RECORDED: dict[str, tuple[Front, Api, dict[str, Any], bytes, Told]] = {
    "api_generate.txt": (
        "api_server", TEXT, {"max_tokens": 5}, JSON,
        Told(200, COMPLETE, ("-squared_term_",), "stop", Usage(1, 1)),
    ),
    "api_generate_stream.txt": (
        # Four tokens came in one event here: that there were as many as allowed cannot be seen.
        "api_server", TEXT, {"max_tokens": 4, "stream": True}, SSE,
        Told(200, COMPLETE, ("-squareroot(",), "stop"),
    ),
    "api_no_prompt.txt": (
        "api_server", TEXT, {}, JSON, Told(400, CLIENT, error=REFUSED + "prompt: Field required"),
    ),
    "oai_bad_body.txt": (
        "openai", CHAT, {}, JSON, Told(400, CLIENT, error=REFUSED + "messages: Field required"),
    ),
    "oai_bad_json.txt": (
        "openai", CHAT, {}, JSON, Told(400, CLIENT, error=REFUSED + "9: JSON decode error"),
    ),
    "oai_multimodal_content.txt": (
        "openai", CHAT, {}, JSON,
        Told(
            400, CLIENT, error=REFUSED
            + "messages.str: Input should be a valid string; "
            "messages.list[dict[str,str]].0.content: Input should be a valid string",
        ),
    ),
    "oai_bad_model.txt": ("openai", CHAT, {}, JSON, Told(503, SERVER, error=NO_MODEL)),
    "oai_chat.txt": (
        "openai", CHAT, {"max_tokens": 5}, JSON,
        Told(200, COMPLETE, ("Hello! How can I",), "length", Usage(1, 5)),
    ),
    "oai_chat_stream.txt": (
        "openai", CHAT, {"max_tokens": 4, "stream": True}, SSE, Told(200, COMPLETE, STREAM_TEXTS, "length"),
    ),
    "oai_chat_stream_usage.txt": (
        # Four tokens came in three events here; MII's own engine has an event for each.
        "openai", CHAT, {"stream": True, "stream_options": {"include_usage": True}}, SSE,
        Told(200, COMPLETE, ("Hi ", "there! ", "How"), "length", Usage(2, 3)),
    ),
    "oai_completion.txt": (
        "openai", TEXT, {"max_tokens": 5}, JSON, Told(200, COMPLETE, ("-squared_m_",), "length", Usage(1, 5)),
    ),
    "oai_completion_stream.txt": (
        "openai", TEXT, {"max_tokens": 4, "stream": True}, SSE,
        Told(200, COMPLETE, (", ", "in ", "the ", "context"), "length"),
    ),
    "oai_engine_fail.txt": ("openai", TEXT, {}, PLAIN, Told(500, SERVER, error=FAILED)),
    "oai_stream_fail_mid.txt": (
        "openai", TEXT, {"stream": True}, SSE, Told(200, Ending.TRUNCATED, ("...\n", "\n", "The ")),
    ),
    "oai_metrics.txt": ("openai", CHAT, {}, JSON, Told(502, SERVER, error=OTHER_FRONT)),
    "rest_bad.txt": ("gateway", TEXT, {}, JSON, Told(500, SERVER, error=FAILED)),
    "rest_get.txt": ("gateway", TEXT, {}, JSON, Told(502, SERVER, error=OTHER_FRONT)),
    "rest_mii.txt": (
        "gateway", TEXT, {}, JSON, Told(200, COMPLETE, (", it means it",), "length", Usage(1, 4)),
    ),
    "rest_mii_str.txt": (
        "gateway", TEXT, {}, JSON, Told(200, COMPLETE, ("-and-keep",), "length", Usage(1, 4)),
    ),
    "rest_unknown.txt": ("gateway", TEXT, {}, HTML, Told(503, SERVER, error=NO_MODEL)),
}  # fmt: skip
"""By file: which front, as what, what the client asked, the media type it came with, what becomes of it."""

PAGES = {"api_health.txt": b'{"status":"ok"}', "oai_health.txt": b'{"status":"ok"}', "rest_healthz.txt": b"ok"}

CUT = frozenset({"oai_stream_fail_mid.txt"})
each_recording = pytest.mark.parametrize("name", RECORDED)


def recorded(name: str) -> bytes:
    # What a broken transfer left on curl's lips is no part of the body.
    return captures.body(f"mii/{name}").partition(b"\ncurl: (18)")[0].partition(b"\n[curl exit")[0]


def replay(name: str, *pieces: bytes) -> Told:
    which, api, fields, media_type, _ = RECORDED[name]
    reading = front(which).reading(ask(api, **fields))
    cut = name in CUT
    out = play(reading, captures.status(f"mii/{name}"), media_type, *pieces, cut=cut)
    return told(reading, out, api, cut=cut)


@each_recording
def test_a_recording_becomes_an_openai_answer(name: str) -> None:
    assert replay(name, recorded(name)) == RECORDED[name][-1]


@each_recording
def test_a_recording_becomes_the_same_over_every_split(name: str) -> None:
    data, expected = recorded(name), RECORDED[name][-1]
    for at in range(len(data) + 1):
        assert replay(name, data[:at], data[at:]) == expected, at
    assert replay(name, *(data[at : at + 1] for at in range(len(data)))) == expected


def test_a_recorded_stream_that_the_client_left_reads_to_its_last_whole_event() -> None:
    lines = (captures_folder() / "behaviour.txt").read_bytes()
    data = lines.partition(b"(max_tokens 60)\n")[2].partition(b"\nclient gone")[0]
    reading = front("openai").reading(ask(TEXT, stream=True))
    out = play(reading, 200, SSE, data, cut=True)
    assert told(reading, out, TEXT, cut=True) == Told(200, Ending.TRUNCATED, (", ", "the ", "town "))


@pytest.mark.parametrize("name", FRONTS["deepspeed"])
def test_answers_of_fronts_whose_engine_was_killed_are_failures(name: Front) -> None:
    # behaviour.txt: "Internal Server Error [500]", a stream of "[200 curl-exit 18]", and the gateway's 500.
    lines = (captures_folder() / "behaviour.txt").read_text().partition("engine killed")[2]
    said, media_type = ("Internal Server Error", PLAIN) if name != "gateway" else ('{"message": "', JSON)
    body = next(line for line in lines.splitlines() if line.startswith(said)).partition(" [500]")[0]
    reading = front(name).reading(ask(TEXT))
    out = play(reading, 500, media_type, body.encode())
    assert told(reading, out, TEXT) == Told(500, SERVER, error=FAILED)


def test_a_recorded_list_names_the_model_as_the_engine_does() -> None:
    assert Vllm().read_models(captures.body("mii/oai_models.txt")) == frozenset({ENGINE_MODEL})


@pytest.mark.parametrize("name", PAGES)
def test_recorded_health_says_that_the_front_lives(name: str) -> None:
    assert captures.body(f"mii/{name}").strip() == PAGES[name]
    assert captures.status(f"mii/{name}") == 200


def captures_folder() -> Path:
    return Path(captures.__file__).parent / "mii"


def test_no_recording_is_left_out() -> None:
    files = {path.name for path in captures_folder().iterdir()}
    assert files == RECORDED.keys() | PAGES.keys() | {"behaviour.txt", "oai_models.txt"}


# Answers that nobody recorded.

ANSWERED = "DeepSpeed-MII answered "


def event(payload: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(payload).encode()


def chunk(text: str | None, finish: str | None = None, api: Api = CHAT) -> bytes:
    said = {"delta": {"content": text}} if api is CHAT else {"text": text}
    return event({"id": "x", "model": "m", "choices": [{"index": 0, **said, "finish_reason": finish}]})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
DONE = b"data: [DONE]\n\n"


def stream(name: Front, *pieces: bytes, cut: bool = False, api: Api = CHAT, **fields: Any) -> Told:
    reading = front(name).reading(ask(api, stream=True, **fields))
    return told(reading, play(reading, 200, SSE, *pieces, cut=cut), api, cut=cut)


def test_done_without_a_finish_reason_is_a_stream_given_up() -> None:
    # The load balancer's 600 s: it ends the stream, and the front writes what it always writes.
    assert stream("openai", ROLE, chunk("a"), DONE) == Told(200, Ending.TRUNCATED, ("a",))
    assert stream("openai", ROLE, DONE).ending is Ending.EMPTY


def test_a_finish_reason_and_a_clean_end_are_enough() -> None:
    assert stream("openai", ROLE, chunk("a"), chunk("", "stop")) == Told(200, COMPLETE, ("a",), "stop")


def test_a_stream_of_nothing_is_empty_or_cut() -> None:
    for name in FRONTS["deepspeed"]:
        if name != "gateway":
            assert stream(name) == Told(200, Ending.EMPTY)
            assert stream(name, cut=True) == Told(200, Ending.TRUNCATED)


def test_an_answer_without_text_has_a_role_and_an_end() -> None:
    assert stream("openai", ROLE, chunk("", "stop"), DONE) == Told(200, COMPLETE, (), "stop")


def test_usage_counts_a_token_whose_text_waits_for_the_next() -> None:
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}, "max_tokens": 3}
    pieces = ROLE, chunk(""), chunk("\u00e9"), chunk("."), chunk("", "length"), DONE
    assert stream("openai", *pieces, **usage) == Told(200, COMPLETE, ("\u00e9", "."), "length", Usage(2, 3))
    texts = [event({"text": [text]}) for text in ("", "\u00e9", ".", "")]
    assert stream("api_server", *texts, DONE, **usage) == Told(200, COMPLETE, ("\u00e9", "."), "length", Usage(2, 3))


def texts_of(*texts: str) -> bytes:
    return b"".join(event({"text": [text]}) for text in texts)


def test_api_server_ends_for_its_length_when_as_many_tokens_came() -> None:
    assert stream("api_server", texts_of("a", "b", ""), DONE, max_tokens=2).finish == "length"
    assert stream("api_server", texts_of("a", "b", ""), DONE, max_tokens=3).finish == "stop"
    assert stream("api_server", texts_of("a", "b", ""), DONE).finish == "stop"
    assert stream("api_server", texts_of(*"a" * 16, ""), DONE, api=TEXT).finish == "length"


def test_api_servers_done_after_a_text_is_a_stream_given_up() -> None:
    assert stream("api_server", texts_of("a", "b"), DONE) == Told(200, Ending.TRUNCATED, ("a", "b"))
    assert stream("api_server", DONE) == Told(200, Ending.EMPTY)
    assert stream("api_server", texts_of("a", "")) == Told(200, Ending.TRUNCATED, ("a",))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((texts_of("a", "b", ""), DONE), Told(200, COMPLETE, ("ab",), "length", Usage(2, 2))),
        (
            (texts_of("a", "b"), DONE),
            Told(502, SERVER, error="the engine's answer ended before it was whole"),
        ),
        (
            (event({"error": "the queue is full"}),),
            Told(500, Ending.OVERLOADED, error=ANSWERED + "500: the queue is full"),
        ),
    ],
)  # fmt: skip
def test_api_servers_stream_becomes_one_answer_for_a_client_that_does_not_stream(
    pieces: tuple[bytes, ...], expected: Told
) -> None:
    reading = front("api_server").reading(ask(CHAT, max_tokens=2))
    assert told(reading, play(reading, 200, SSE, *pieces), CHAT) == expected


def test_the_gateways_answer_is_one_chunk_for_a_client_that_streams() -> None:
    reply = {"generated_text": "Hi there", "prompt_length": 3, "generated_length": 2, "finish_reason": "stop"}
    body = json.dumps([reply]).encode()
    for options, usage in ((None, None), ({"include_usage": True}, Usage(3, 2))):
        reading = front("gateway").reading(ask(CHAT, stream=True, stream_options=options))
        assert told(reading, play(reading, 200, JSON, body), CHAT) == Told(200, COMPLETE, ("Hi there",), "stop", usage)


UNREADABLE = "DeepSpeed-MII answered what cannot be read"
BROKEN: dict[str, tuple[bytes, str, Ending]] = {
    "no JSON": (b"data: {\n\n", UNREADABLE, Ending.ERROR_IN_BAND),
    "no object": (b"data: 7\n\n", UNREADABLE, Ending.ERROR_IN_BAND),
    "another's object": (event({"token": "a"}), UNREADABLE, Ending.ERROR_IN_BAND),
    "text of another type": (event({"text": [7], "choices": [{"text": 7}]}), UNREADABLE, Ending.ERROR_IN_BAND),
    "bad UTF-8": (
        b'data: {"text":["\xff"],"choices":[{"text":"\xff"}]}\n\n', UNREADABLE, Ending.ERROR_IN_BAND
    ),
    "an error's text": (event({"error": "gone"}), ANSWERED + "500: gone", Ending.ERROR_IN_BAND),
    "a flat error": (
        event({"object": "error", "message": "busy", "code": 42903}), ANSWERED + "429: busy",
        Ending.OVERLOADED_IN_BAND,
    ),
    "a client's": (event({"error": {"message": "m", "code": 400}}), ANSWERED + "400: m", Ending.CLIENT_ERROR_IN_BAND),
    "an unknown model": (event({"object": "error", "message": "m", "code": 40301}), NO_MODEL, Ending.ERROR_IN_BAND),
    "a number of no status": (event({"error": {"message": "m", "code": 7}}), ANSWERED + "500: m", Ending.ERROR_IN_BAND),
}  # fmt: skip


@pytest.mark.parametrize("name", ["openai", "api_server"])
@pytest.mark.parametrize(("data", "error", "ending"), BROKEN.values(), ids=BROKEN.keys())
def test_an_event_that_is_no_text_is_an_error_after_which_nothing_comes(
    name: Front, data: bytes, error: str, ending: Ending
) -> None:
    api = TEXT
    good = chunk("a", api=TEXT) if name == "openai" else texts_of("a")
    end = chunk("", "stop", api=TEXT) if name == "openai" else texts_of("")
    assert stream(name, good, data, end, DONE, api=api) == Told(200, ending, ("a",), error=error)


def flat(code: int, message: str) -> bytes:
    return json.dumps({"object": "error", "message": message, "code": code}).encode()


API_KEY = b'{"detail":{"error":{"message":"","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}}'
LEAK = "Traceback in /models/v-ds/lib/python3.11/site-packages/mii/x.py, line 5\n  more"

ERRORS: dict[str, tuple[int, bytes, int, Ending, str]] = {
    "API key": (401, API_KEY, 401, CLIENT, "DeepSpeed-MII refused the API key"),
    "context": (400, flat(40303, "m"), 400, Ending.CONTEXT_LENGTH, "the prompt exceeds DeepSpeed-MII's context length"),
    "overload by code": (400, flat(42903, "busy"), 429, Ending.OVERLOADED, ANSWERED + "429: busy"),
    "server's fault by code": (400, flat(50002, "CUDA"), 500, SERVER, ANSWERED + "500: CUDA"),
    "a code of no status": (400, flat(99999, "m"), 400, CLIENT, ANSWERED + "400: m"),
    "text alone": (400, b'{"error":"Prompt is required."}', 400, CLIENT, ANSWERED + "400: Prompt is required."),
    "paths": (500, json.dumps({"detail": LEAK}).encode(), 500, SERVER, ANSWERED + "500: Traceback in ..., line 5"),
    "validation without places": (422, b'{"detail":"no"}', 400, CLIENT, REFUSED + "it is not what it takes"),
    "a gateway's page": (502, b"<html><h1>Bad Gateway</h1></html>", 502, SERVER, ANSWERED + "502"),
    "an empty 503": (503, b"", 503, SERVER, ANSWERED + "503"),
    "too large": (413, b"", 413, Ending.CONTEXT_LENGTH, ANSWERED + "413"),
    "a redirect": (307, b"", 502, SERVER, ANSWERED + "307"),
    "no content": (204, b"", 502, SERVER, ANSWERED + "204"),
    "no such status": (799, b"", 502, SERVER, ANSWERED + "799"),
    "200 of nothing": (200, b"", 502, SERVER, ANSWERED + "200 with nothing"),
    "200 of another": (200, b'{"ok":true}', 502, SERVER, UNREADABLE),
    "200 of an empty list": (200, b"[]", 502, SERVER, UNREADABLE),
    "200 of no choice": (200, b'{"choices":[],"text":[]}', 502, SERVER, UNREADABLE),
    "200 of no text": (200, b'{"choices":[{"finish_reason":"stop"}]}', 502, SERVER, UNREADABLE),
    "200 that is an error": (200, b'{"error":"gone"}', 500, SERVER, ANSWERED + "500: gone"),
}  # fmt: skip


@each_front
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("status", "body", "told_status", "ending", "error"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_of_every_shape_is_told_with_its_own_status(
    name: Front, streams: bool, status: int, body: bytes, told_status: int, ending: Ending, error: str
) -> None:
    reading = front(name).reading(ask(CHAT, stream=streams))
    out = play(reading, status, JSON, body)
    assert told(reading, out, CHAT) == Told(told_status, ending, error=error)


@each_front
@pytest.mark.parametrize(("status", "expected"), [(404, None), (405, OTHER_FRONT)])
def test_a_path_that_a_server_lacks_is_the_endpoints_fault(name: Front, status: int, expected: str | None) -> None:
    reading = front(name).reading(ask(CHAT))
    out = play(reading, status, JSON, b'{"detail":"Not Found"}')
    if expected is None and name == "gateway":  # whose path is its deployment
        assert told(reading, out, CHAT) == Told(503, SERVER, error=NO_MODEL)
    else:
        assert told(reading, out, CHAT) == Told(502, SERVER, error=OTHER_FRONT)


@pytest.mark.parametrize(("name", "file"), [("openai", "oai_bad_model.txt"), ("gateway", "rest_unknown.txt")])
def test_a_model_that_the_client_named_is_the_clients_mistake(name: Front, file: str) -> None:
    reading = front(name).reading(ask(CHAT, engine_model=""))
    out = play(reading, captures.status(f"mii/{file}"), JSON, recorded(file))
    assert told(reading, out, CHAT) == Told(404, CLIENT, error=f"DeepSpeed-MII does not serve the model {MODEL}")


def test_a_whole_answer_without_an_end_is_none() -> None:
    expected = Told(502, SERVER, error="the engine's answer ended before it was whole")
    answer = {"choices": [{"message": {"content": "a"}, "finish_reason": None}]}
    reading = front("openai").reading(ask(CHAT))
    assert told(reading, play(reading, 200, JSON, json.dumps(answer).encode()), CHAT) == expected
    reading = front("gateway").reading(ask(CHAT))
    reply = [{"generated_text": "a", "finish_reason": "none"}]
    assert told(reading, play(reading, 200, JSON, json.dumps(reply).encode()), CHAT) == expected


def test_a_long_validation_error_is_cut() -> None:
    detail = [{"loc": ["body", f"field{number}"], "msg": "Field required"} for number in range(100)]
    reading = front("api_server").reading(ask(CHAT))
    out = play(reading, 422, JSON, json.dumps({"detail": detail}).encode())
    error = told(reading, out, CHAT).error
    assert len(error) == 200 and error.startswith(REFUSED + "field0: Field required; field1: ")


# Properties.

PROMPT_TOKENS = {CHAT: 2, TEXT: 1}  # a token for four characters
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=8)


@st.composite
def split(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@given(data=st.data(), texts=TEXTS, finish=st.sampled_from(["stop", "length"]), api=st.sampled_from([CHAT, TEXT]))
def test_a_stream_of_the_openai_front_says_what_the_engine_said(
    data: st.DataObject, texts: list[str], finish: str, api: Api
) -> None:
    order = data.draw(st.permutations(["index", "delta", "finish_reason"]))

    def said(text: str, finish: str | None) -> bytes:
        members = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        choice = {name: members[name] for name in order}
        if api is TEXT:
            choice = {"text" if name == "delta" else name: value for name, value in choice.items()}
            choice["text"] = text
        return b"data: %b\n\n" % msgspec.json.encode({"choices": [choice], "id": "x"})

    sent_bytes = b"".join(said(text, None) for text in texts) + said("", finish) + DONE
    expected = Told(200, COMPLETE, tuple(text for text in texts if text), finish, Usage(PROMPT_TOKENS[api], len(texts)))
    reading = front("openai").reading(ask(api, stream=True, stream_options={"include_usage": True}))
    pieces = data.draw(split(sent_bytes))
    assert told(reading, play(reading, 200, SSE, *pieces), api) == expected


@given(data=st.data(), texts=TEXTS, streams=st.booleans(), ascii_only=st.booleans())
def test_a_stream_of_api_server_says_what_the_engine_said(
    data: st.DataObject, texts: list[str], streams: bool, ascii_only: bool
) -> None:
    lines = [json.dumps({"text": [text]}, ensure_ascii=ascii_only) for text in [*texts, ""]]
    pieces = data.draw(split("".join(f"data: {line}\n\n" for line in lines).encode() + DONE))
    asked = ask(TEXT, stream=streams, stream_options={"include_usage": True}, max_tokens=4)
    reading = front("api_server").reading(asked)
    said = tuple(text for text in texts if text) if streams else ("".join(texts),)
    finish = "length" if len(texts) >= 4 else "stop"
    expected = Told(200, COMPLETE, said, finish, Usage(1, len(texts)))
    assert told(reading, play(reading, 200, SSE, *pieces), TEXT) == expected


@given(data=st.data(), text=st.text(st.characters(exclude_categories=["Cs"])), streams=st.booleans())
def test_an_answer_of_the_gateway_says_what_the_engine_said(data: st.DataObject, text: str, streams: bool) -> None:
    reply = {"generated_text": text, "prompt_length": 3, "generated_length": 2, "finish_reason": "length"}
    order = data.draw(st.permutations(list(reply)))
    pieces = data.draw(split(json.dumps([{name: reply[name] for name in order}]).encode()))
    reading = front("gateway").reading(ask(TEXT, stream=streams))
    said = (text,) if text or not streams else ()
    expected = Told(200, COMPLETE, said, "length", None if streams else Usage(3, 2))
    assert told(reading, play(reading, 200, JSON, *pieces), TEXT) == expected


PARTS = st.sampled_from(
    [b"data: ", b"\n\n", b"[DONE]", b'{"choices":[{"text":"a"}]}', b'{"text":["a"]}', b"{", b'"', b"\xff"]
)


@each_front
@given(
    pieces=st.lists(PARTS | st.binary(max_size=9), max_size=12),
    status=st.sampled_from([200, 400, 404, 500]),
    media_type=st.sampled_from([SSE, JSON]),
    streams=st.booleans(),
)
def test_any_bytes_end_in_an_answer_or_in_a_stream_that_is_none(
    name: Front, pieces: list[bytes], status: int, media_type: bytes, streams: bool
) -> None:
    reading = front(name).reading(ask(TEXT, stream=streams))
    out = play(reading, status, media_type, *pieces)
    assert 200 <= reading.status <= 599
    result = told(reading, out, TEXT)
    if result.ending is COMPLETE:
        assert result.finish
