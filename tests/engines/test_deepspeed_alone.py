"""The real DeepSpeed behind each of MII's fronts, with no sidecar before it: what the launcher starts is what it says.

One deployment a front serves its tests in order; those that kill the engine start it again under the front that lived
on. The tiny model's words mean nothing but are the same each time, so that answers are compared whole.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.client import CHAT, Answer, call, post
from tests.engines.deepspeed import DeepSpeed, Front
from tests.engines.make_smollm2 import smollm2_dir
from tests.servers import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

COMPLETIONS = "/v1/completions"
PROMPT = "def main(argv):"
ENDLESS = 30_000  # tokens: nothing in a test ends by itself
PACE_MS = 5
GONE_S = 3.0  # a client that has left, until the engine holds nothing of it


def deployment(folder: Path, front: Front, **options: object) -> DeepSpeed:
    return DeepSpeed(front, f"127.0.0.1:{free_port()}", folder / f"{front}.log", **options)  # type: ignore[arg-type]


def running(front: Front, factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    started = deployment(factory.mktemp(front), front, pace_ms=PACE_MS)
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def openai(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    yield from running("openai", tmp_path_factory)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    yield from running("api", tmp_path_factory)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    yield from running("rest", tmp_path_factory)


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def completion(**fields: object) -> bytes:
    return body(**({"model": "tiny", "prompt": PROMPT, "max_tokens": 12} | fields))


def gateway(deepspeed: DeepSpeed, **fields: object) -> Answer:
    return call(deepspeed.address, "POST", f"/mii/{deepspeed.name}", body(**fields))


def first_choice(answer: Answer) -> dict[str, object]:
    assert answer.status == 200, answer.body
    choices = answer.json()["choices"]
    assert isinstance(choices, list) and isinstance(choices[0], dict), answer.body
    return choices[0]


def streamed(deepspeed: DeepSpeed, path: str, request: bytes) -> list[bytes]:
    """The payloads of a whole stream that ended as it should."""
    with post(deepspeed.address, path, request) as exchange:
        assert exchange.head().status == 200
        events = list(exchange.events())
        assert not exchange.cut
    assert all(event.startswith(b"data: ") for event in events), events
    return [event.removeprefix(b"data: ") for event in events]


def choices(payloads: list[bytes]) -> list[dict[str, object]]:
    *chunks, end = payloads
    assert end == b"[DONE]"
    return [json.loads(chunk)["choices"][0] for chunk in chunks]


# --- each front answers


def test_a_chat_is_answered_whole_and_streamed_alike(openai: DeepSpeed) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}
    whole = first_choice(call(openai.address, "POST", CHAT, body(**request)))
    stream = choices(streamed(openai, CHAT, body(stream=True, **request)))
    deltas = [chunk["delta"] for chunk in stream]
    assert all(isinstance(delta, dict) for delta in deltas)
    assert deltas[0] == {"role": "assistant"}
    message = whole["message"]
    assert isinstance(message, dict) and message["content"]
    assert "".join(delta["content"] for delta in deltas[1:] if isinstance(delta, dict)) == message["content"]
    assert whole["finish_reason"] == stream[-1]["finish_reason"] == "length"


def test_a_completion_is_answered_whole_and_streamed_token_by_token(openai: DeepSpeed) -> None:
    whole = first_choice(call(openai.address, "POST", COMPLETIONS, completion()))
    stream = choices(streamed(openai, COMPLETIONS, completion(stream=True)))
    assert len(stream) == 12 + 1  # the last says the reason alone
    assert "".join(str(chunk["text"]) for chunk in stream) == whole["text"] != ""
    assert [chunk["finish_reason"] for chunk in stream] == [None] * 12 + ["length"]


def test_a_stop_string_ends_the_answer_and_is_not_told(openai: DeepSpeed) -> None:
    text = str(first_choice(call(openai.address, "POST", COMPLETIONS, completion()))["text"])
    stop = text[5:8]
    stopped = first_choice(call(openai.address, "POST", COMPLETIONS, completion(stop=stop)))
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(stop)], "stop")
    stream = choices(streamed(openai, COMPLETIONS, completion(stop=stop, stream=True)))
    assert "".join(str(chunk["text"]) for chunk in stream) == stopped["text"]
    assert stream[-1]["finish_reason"] == "stop"


def test_generate_is_answered_whole_and_streamed_alike(api: DeepSpeed) -> None:
    whole = call(api.address, "POST", "/generate", body(prompt=PROMPT, max_tokens=12)).json()["text"]
    *chunks, end = streamed(api, "/generate", body(prompt=PROMPT, max_tokens=12, stream=True))
    assert end == b"[DONE]"
    assert ["".join(json.loads(chunk)["text"][0] for chunk in chunks)] == whole != [""]


def test_the_gateway_answers_each_prompt(rest: DeepSpeed) -> None:
    answer = gateway(rest, prompts=[PROMPT, "import"], max_new_tokens=12)
    assert answer.status == 200, answer.body
    first, second = json.loads(answer.body)
    assert first["generated_text"] != second["generated_text"]
    assert [row["finish_reason"] for row in (first, second)] == ["length", "length"]
    assert [row["generated_length"] for row in (first, second)] == [12, 12]
    alone = gateway(rest, prompts=PROMPT, max_new_tokens=12)
    assert json.loads(alone.body) == [first]


def test_the_real_model_answers_a_question(tmp_path: Path) -> None:
    smollm2 = deployment(tmp_path, "openai", model=smollm2_dir(), name="smollm2")
    try:
        smollm2.wait_ready()
        question = [{"role": "user", "content": "What is the capital of France?"}]
        choice = first_choice(call(smollm2.address, "POST", CHAT, body(model="smollm2", messages=question)))
        assert "Paris" in str(choice["message"])
        assert choice["finish_reason"] == "stop"
    finally:
        smollm2.stop()


# --- what the engine lets go of, and what it refuses


def test_a_client_that_leaves_frees_the_engine(openai: DeepSpeed) -> None:
    with post(openai.address, COMPLETIONS, completion(max_tokens=ENDLESS, stream=True)) as exchange:
        exchange.head()
        next(exchange.events())
        openai.wait_running(1, GONE_S)
    openai.wait_running(0, GONE_S)


def test_a_temperature_of_zero_is_the_engines_failure(openai: DeepSpeed) -> None:
    assert call(openai.address, "POST", COMPLETIONS, completion(temperature=0)).status == 500
    with post(openai.address, COMPLETIONS, completion(temperature=0, stream=True)) as exchange:
        assert exchange.head().status == 200
        assert list(exchange.events()) == []
        assert exchange.cut


# --- deployments come and go


def test_a_new_deployment_serves_before_the_old_one_has_drained(openai: DeepSpeed, tmp_path: Path) -> None:
    new = deployment(tmp_path, "openai", name="next")
    try:
        new.wait_ready()
        with post(openai.address, COMPLETIONS, completion(max_tokens=300, stream=True)) as exchange:
            exchange.head()
            next(exchange.events())
            openai.terminate()
            first_choice(call(new.address, "POST", COMPLETIONS, completion(model="next")))
            assert call(openai.address, "POST", COMPLETIONS, completion()).status == 500  # it takes nothing new
            assert next(exchange.events()).startswith(b'data: {"id":')
            *_, end = exchange.events()
            assert end == b"data: [DONE]"
            assert not exchange.cut
        openai.wait_exit(15)
    finally:
        new.stop()
    openai.restart_servicer()
    openai.wait_ready()


# --- the front's health knows nothing of the engine: last, since the engine dies


def test_a_killed_engine_cuts_a_stream_and_leaves_health_as_it_was(openai: DeepSpeed) -> None:
    with post(openai.address, COMPLETIONS, completion(max_tokens=ENDLESS, stream=True)) as exchange:
        exchange.head()
        next(exchange.events())
        openai.signal_servicer(signal.SIGKILL)
        for event in exchange.events():
            assert b"error" not in event
        assert exchange.cut
    openai.wait_exit(10)
    assert not openai.serving()
    assert openai.health() == 200
    assert call(openai.address, "POST", COMPLETIONS, completion()).status == 500
    openai.restart_servicer()
    openai.wait_ready()
    assert first_choice(call(openai.address, "POST", COMPLETIONS, completion()))["finish_reason"] == "length"


def test_a_killed_engine_leaves_the_generate_fronts_health(api: DeepSpeed) -> None:
    api.signal_servicer(signal.SIGKILL)
    api.wait_exit(10)
    assert api.health() == 200
    assert call(api.address, "POST", "/generate", body(prompt=PROMPT)).status == 500


def test_a_killed_engine_leaves_the_gateways_health(rest: DeepSpeed) -> None:
    rest.signal_servicer(signal.SIGKILL)
    rest.wait_exit(10)
    assert rest.health() == 200
    assert gateway(rest, prompts=PROMPT, max_new_tokens=2).status == 500
