"""The real Triton with no sidecar before it: what the launcher and the models promise to the tests that have one.

One server for all, in the order of the damage done. Where Triton itself is odd (ready while its model is dead, 200 with
an error in it) the oddity is what is asserted: the dialect and its tests are built on it.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.client import Answer, Exchange, call, post
from tests.engines.engine import descendants, free_port
from tests.engines.triton import SHARED_MEMORY, Triton

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]  # SmolLM2 takes half a minute to load on a busy core

CAPITAL = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
WISHES = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
EVERY_WISH: dict[str, Any] = dict.fromkeys(WISHES, True)
SILENCE_S = 3.0  # ten times the gap between tokens; new requests learn that the stub is dead within 1-2.4 s
UNLOAD_S = 10.0  # how long Triton may take to let an idle version go; 1.3 s measured


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    started = Triton(f"127.0.0.1:{free_port()}", tmp_path_factory.mktemp("triton") / "triton.log")
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


def generate(triton: Triton, model: str = "toy_llm", **fields: object) -> Answer:
    return call(triton.address, "POST", f"/v2/models/{model}/generate", json.dumps(fields).encode())


def stream(triton: Triton, model: str = "toy_llm", **fields: object) -> Exchange:
    body = json.dumps({"stream": True} | fields).encode()
    return post(triton.address, f"/v2/models/{model}/generate_stream", body).head()


def events(exchange: Exchange) -> list[dict[str, object]]:
    """What is left of a stream; one that ends otherwise than by its own terminator fails the test."""
    with exchange:
        found = [json.loads(event.removeprefix(b"data: ")) for event in exchange.events()]
    assert not exchange.cut
    return found


def sampling(**parameters: object) -> str:
    return json.dumps(parameters)


def serving(*versions: int) -> dict[str, object]:
    """The config for a load that is to serve exactly these."""
    return {"backend": "python", "version_policy": {"specific": {"versions": list(versions)}}}


def test_answers_once_it_is_ready(triton: Triton) -> None:
    assert triton.ready()
    assert triton.ready("toy_llm")
    assert not triton.ready("smollm2")
    assert triton.states("toy_llm") == {"1": "READY"}
    assert call(triton.metrics_address, "GET", "/metrics").status == 200


def test_whole_answer_repeats_the_prompt_unless_told_not_to(triton: Triton) -> None:
    spoken = {"model_name": "toy_llm", "model_version": "1"}
    assert generate(triton, text_input="a b", max_tokens=2).json() == spoken | {"text_output": "a b v1-0 v1-1"}
    asked = generate(
        triton,
        text_input="a b",
        sampling_parameters=sampling(max_tokens=2),
        exclude_input_in_output=True,
        **EVERY_WISH,
    )
    told = {"text_output": " v1-0 v1-1", "finish_reason": "length", "num_input_tokens": 2, "num_output_tokens": 2}
    assert asked.json() == spoken | told


def test_stream_has_an_event_a_token_and_no_end_marker(triton: Triton) -> None:
    said = events(stream(triton, text_input="a stop_after=2", **EVERY_WISH))
    assert [(event["text_output"], event["finish_reason"]) for event in said] == [(" v1-0", "None"), (" v1-1", "stop")]
    assert [(event["num_input_tokens"], event["num_output_tokens"]) for event in said] == [(2, 1), (2, 1)]


def test_failure_is_an_event_with_200_once_a_token_was_said_and_400_before(triton: Triton) -> None:
    late = stream(triton, text_input="a fail_after=1")
    assert late.status == 200
    assert events(late)[1:] == [{"error": "Error generating stream: told to fail after 1 tokens"}]
    early = stream(triton, text_input="a fail_after=0")
    assert (early.status, early.headers["content-type"]) == (400, "text/event-stream; charset=utf-8")
    assert events(early) == [{"error": "Error generating stream: told to fail after 0 tokens"}]
    assert generate(triton, text_input="a fail_after=0").status == 400


def test_model_stops_when_a_streams_client_leaves(triton: Triton) -> None:
    with stream(triton, text_input="a delay_ms=20", max_tokens=1000) as leaving:
        next(leaving.events())
    triton.wait_log("toy_llm 1: cancelled after", within_s=5)


def test_load_of_a_newer_version_lets_the_streams_of_the_older_end(triton: Triton) -> None:
    old = stream(triton, text_input="a delay_ms=50", max_tokens=60)
    next(old.events())
    triton.publish("toy_llm", 2)
    assert triton.load("toy_llm").status == 200
    assert triton.ready("toy_llm")
    assert not triton.ready()  # all that it has: the older version is going
    assert triton.states("toy_llm") == {"1": "UNLOADING", "2": "READY"}
    assert generate(triton, text_input="a", max_tokens=1).json()["text_output"] == "a v2-0"
    assert [event["text_output"] for event in events(old)] == [f" v1-{n}" for n in range(1, 60)]
    triton.wait_states("toy_llm", {"1": "UNAVAILABLE", "2": "READY"}, UNLOAD_S)
    assert triton.ready()


def test_two_versions_serve_side_by_side_when_the_load_says_so(triton: Triton) -> None:
    assert triton.load("toy_llm", serving(1, 2)).status == 200
    assert triton.ready("toy_llm", 1)
    assert triton.ready("toy_llm", 2)
    for version in (1, 2):
        answer = generate(triton, f"toy_llm/versions/{version}", text_input="a", max_tokens=1)
        assert answer.json()["text_output"] == f"a v{version}-0"
    assert triton.load("toy_llm").status == 200  # and does nothing: no file has changed
    assert triton.states("toy_llm") == {"1": "READY", "2": "READY"}
    assert triton.load("toy_llm", serving(2)).status == 200
    triton.wait_states("toy_llm", {"1": "UNAVAILABLE", "2": "READY"}, UNLOAD_S)
    answer = generate(triton, "toy_llm/versions/1", text_input="a")
    assert (answer.status, b"version 1 is not at ready state" in answer.body) == (503, True)


def test_failed_load_leaves_the_version_that_serves(triton: Triton) -> None:
    triton.publish("toy_llm", 3, load_error="no such weights")
    failed = triton.load("toy_llm")
    assert (failed.status, b"no such weights" in failed.body) == (400, True)
    assert triton.ready("toy_llm")
    assert generate(triton, text_input="a", max_tokens=1).json()["text_output"] == "a v2-0"
    triton.withdraw("toy_llm", 3)
    assert triton.load("toy_llm").status == 200
    assert not triton.ready()  # whatever it loads: an old failure stays


def test_version_says_what_it_is_told_to_say(triton: Triton) -> None:
    triton.publish("wrong", 1, "toy_llm", says="I am another")
    assert triton.load("wrong").status == 200
    assert generate(triton, "wrong", text_input="a", max_tokens=4).json()["text_output"] == "a I am another I"
    triton.unload("wrong")


def test_smollm2_answers_and_streams_the_same_words(triton: Triton) -> None:
    triton.publish("smollm2", 1)
    assert triton.load("smollm2").status == 200
    whole = generate(triton, "smollm2", text_input=CAPITAL, exclude_input_in_output=True, **EVERY_WISH).json()
    assert whole["text_output"] == "The capital of France is Paris."
    assert (whole["finish_reason"], whole["num_input_tokens"], whole["num_output_tokens"]) == ("stop", 16, 8)
    said = events(stream(triton, "smollm2", text_input=CAPITAL, **EVERY_WISH))
    assert "".join(str(event["text_output"]) for event in said) == whole["text_output"]
    assert [event["finish_reason"] for event in said] == ["None"] * 7 + ["stop"]
    stopped = events(
        stream(triton, "smollm2", text_input=CAPITAL, sampling_parameters=sampling(stop=["ance is"]), **EVERY_WISH)
    )
    assert "".join(str(event["text_output"]) for event in stopped) == "The capital of Fr"
    assert stopped[-1]["finish_reason"] == "stop"


def test_smollm2_says_no_half_character_and_obeys_its_limits(triton: Triton) -> None:
    longer = {"max_tokens": 24, "ignore_eos": True}
    said = events(
        stream(triton, "smollm2", text_input="🙂🙃🙂🙃🙂🙃🙂🙃🙂", sampling_parameters=sampling(**longer), **EVERY_WISH)
    )
    assert len(said) == 24
    assert said[-1]["finish_reason"] == "length"
    assert "\ufffd" not in "".join(str(event["text_output"]) for event in said[:-1])
    refused = generate(triton, "smollm2", text_input=CAPITAL, max_tokens=9000)
    assert (refused.status, b"exceed the context of 8192" in refused.body) == (400, True)


def test_smollm2_serves_streams_in_turns(triton: Triton) -> None:
    with stream(triton, "smollm2", text_input=CAPITAL, sampling_parameters=sampling(max_tokens=500, ignore_eos=True)):
        answer = generate(triton, "smollm2", text_input=CAPITAL, exclude_input_in_output=True)
        assert answer.json()["text_output"] == "The capital of France is Paris."
    triton.wait_log("smollm2 1: cancelled after", within_s=5)


def test_killed_stub_is_still_called_ready(triton: Triton) -> None:
    os.kill(triton.stub_pid("toy_llm", 2), signal.SIGKILL)
    answer = generate(triton, text_input="a")
    assert (answer.status, b"is not healthy" in answer.body) == (400, True)
    assert triton.ready("toy_llm")
    assert triton.load("toy_llm").status == 200  # and does nothing: no file has changed
    assert generate(triton, text_input="a").status == 400
    triton.publish("toy_llm", 2)
    assert triton.load("toy_llm").status == 200
    assert generate(triton, text_input="a", max_tokens=1).json()["text_output"] == "a v2-0"


def test_stream_of_a_killed_stub_neither_goes_on_nor_ends(triton: Triton) -> None:
    """Killed between two tokens, that is: within one's sending it may take the server with it, and before the first
    it becomes an error event."""
    triton.publish("silent", 1, "toy_llm", delay_ms=300)
    assert triton.load("silent").status == 200
    body = json.dumps({"text_input": "a", "stream": True, "max_tokens": 1000}).encode()
    with post(triton.address, "/v2/models/silent/generate_stream", body, timeout_s=SILENCE_S) as exchange:
        said = exchange.head().events()
        assert [b"v1-" in next(said) for _ in range(3)] == [True] * 3
        time.sleep(0.1)
        os.kill(triton.stub_pid("silent"), signal.SIGKILL)
        with pytest.raises(TimeoutError):
            next(said)
    assert triton.ready("silent")


def test_unloaded_model_is_unknown(triton: Triton) -> None:
    assert triton.unload("smollm2").status == 200
    triton.wait_states("smollm2", {"1": "UNAVAILABLE"}, UNLOAD_S)
    answer = generate(triton, "smollm2", text_input="a")
    assert (answer.status, b"has no available versions" in answer.body) == (404, True)


def test_stop_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.glob("triton-*"))
    triton = Triton(f"127.0.0.1:{free_port()}", tmp_path / "triton.log")
    try:
        triton.wait_ready()
        held = {"server", "toy_llm/1"}
        assert set(triton.rss_bytes()) == held
        assert len(set(SHARED_MEMORY.glob("triton-*")) - before) == 1
        pids = [triton.server_pid(), *descendants(triton.server_pid())]
        triton.signal_server(signal.SIGSTOP)
    finally:
        triton.stop()
    assert set(SHARED_MEMORY.glob("triton-*")) <= before
    give_up = time.monotonic() + 5
    while any(running(pid) for pid in pids):  # a stub that lost its server ends by itself
        assert time.monotonic() < give_up
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process is more than an exit code that nobody has read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
