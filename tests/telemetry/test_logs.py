"""The log as a whole: who is logged where, and what of the standard library's comes along."""

import json
import logging
import os
import warnings
from collections.abc import Callable

import pytest

from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import Result
from sidecar.telemetry.logs import CONSOLE_FIELDS, LEVEL_NUMBER, Access, Level, Logs
from sidecar.telemetry.shapes import RequestLine
from sidecar.telemetry.writer import LineWriter
from tests.telemetry.records import request

Fields = dict[str, object]


class Lines(LineWriter):
    """Keeps lines instead of writing them."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.lines: list[bytes] = []

    def start(self) -> None:
        pass

    def put(self, line: bytes) -> None:
        self.lines.append(line)

    def decoded(self) -> list[Fields]:
        return [json.loads(line) for line in self.lines]


def wall() -> float:
    return 1_700_000_000.25


def only(lines: Lines) -> Fields:
    (line,) = lines.decoded()
    return line


def test_request_line_begins_as_every_line() -> None:
    lines = Lines()
    Logs(lines, wall, fixed={"pod": "p-1", "zone": ""}).request(request())
    line = only(lines)
    assert list(line)[:4] == ["ts", "level", "event", "pod"]
    assert line["ts"] == "2023-11-14T22:13:20.250Z"
    assert (line["level"], line["event"], line["pod"]) == ("info", "request", "p-1")
    assert "zone" not in line
    assert line["request_id"] == "r-1"


def test_event_line_begins_as_every_line() -> None:
    lines = Lines()
    Logs(lines, wall, fixed={"pod": "p-1"}).event.warning("policy_refused", file="a.yaml", line=3)
    assert only(lines) == {
        "ts": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "event": "policy_refused",
        "pod": "p-1",
        "file": "a.yaml",
        "line": 3,
    }


@pytest.mark.parametrize("result", list(Result))
def test_failures_stand_out_by_their_level(result: Result) -> None:
    lines = Lines()
    Logs(lines, wall).request(request(result=result))
    warned = result in (Result.FAILURE, Result.OVERLOADED)
    assert only(lines)["level"] == ("warning" if warned else "info")


GOOD = pytest.param({}, False, id="good")
LEFT = pytest.param({"status": 499, "result": Result.IGNORED}, True, id="client left")
BAD = pytest.param({"status": 400, "result": Result.IGNORED}, True, id="client error")
CUT = pytest.param({"result": Result.FAILURE, "reason": Reason.UPSTREAM_TRUNCATED}, True, id="cut under 200")
IN_BAND = pytest.param({"result": Result.FAILURE}, True, id="error under 200")
OVERLOAD = pytest.param({"result": Result.OVERLOADED}, True, id="overload under 200")
REFUSED = pytest.param({"result": Result.IGNORED, "reason": Reason.DRAINING}, True, id="ours")


@pytest.mark.parametrize(("changes", "is_error"), [GOOD, LEFT, BAD, CUT, IN_BAND, OVERLOAD, REFUSED])
@pytest.mark.parametrize("access", ["off", "errors", "all"])
def test_access_log_holds_what_it_says(access: Access, changes: Fields, is_error: bool) -> None:
    lines = Lines()
    Logs(lines, wall, access=access).request(request(**changes))
    assert len(lines.lines) == {"off": 0, "errors": int(is_error), "all": 1}[access]


def test_access_log_is_no_matter_of_level() -> None:
    lines = Lines()
    Logs(lines, wall, level="error").request(request())
    assert len(lines.lines) == 1


@pytest.mark.parametrize("level", list(LEVEL_NUMBER))
def test_events_below_the_level_are_not_logged(level: Level) -> None:
    lines = Lines()
    logs = Logs(lines, wall, level=level)
    for each in LEVEL_NUMBER:
        getattr(logs.event, each)("event")
    levels = list(LEVEL_NUMBER)
    assert [line["level"] for line in lines.decoded()] == levels[levels.index(level) :]


def test_exception_comes_with_its_trace_back() -> None:
    lines = Lines()
    logs = Logs(lines, wall)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logs.event.exception("failed", task="x")
    line = only(lines)
    assert (line["level"], line["task"]) == ("error", "x")
    assert "RuntimeError: boom" in str(line["exception"])


def test_console_request_is_one_line_of_what_matters() -> None:
    lines = Lines()
    Logs(lines, wall, format="console").request(request(reason=Reason.TTFT_TIMEOUT, result=Result.FAILURE))
    (line,) = lines.lines
    text = line.decode()
    assert text.startswith("22:13:20.250 warning request status=200 method=POST path=/v1/chat/completions model=llama ")
    assert " reason=ttft_timeout why=expired " in text
    assert " ttft_s=0.500 " in text
    assert "client=" not in text
    assert " tenant=team-a qos=text queued_s=0.020 shadowed=queued " in text


def test_console_says_nothing_of_turns_where_there_are_none() -> None:
    lines = Lines()
    plain = request(tenant="", qos="", queued_s=None, shadowed="", why="")
    Logs(lines, wall, format="console").request(plain)
    assert not any(word in lines.lines[0] for word in (b"tenant=", b"qos=", b"queued_s=", b"shadowed=", b"why="))


def test_console_fields_exist() -> None:
    assert set(CONSOLE_FIELDS) < set(RequestLine.__struct_fields__)


def test_console_event_is_one_line() -> None:
    lines = Lines()
    Logs(lines, wall, format="console").event.info("draining", grace_s=120.0)
    assert lines.lines == [b"22:13:20.250 info    draining grace_s=120.000\n"]


def test_member_may_be_named_as_ours() -> None:
    lines = Lines()
    Logs(lines, wall).line("info", "policy", {"message": "m"})
    assert only(lines)["message"] == "m"


def library_warning() -> None:
    logging.getLogger("aiohttp.server").warning("Error handling %s", "a\nb")


def library_error() -> None:
    try:
        raise OSError("gone")
    except OSError:
        logging.getLogger("asyncio").exception("Task failed")


def library_misuse() -> None:
    logging.getLogger("x").warning("%d", "no number")


def python_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # As captureWarnings has it: through the function that it put there.
        warnings.showwarning("old", DeprecationWarning, "f.py", 1)


@pytest.mark.parametrize(
    ("act", "level", "logger", "message"),
    [
        pytest.param(library_warning, "warning", "aiohttp.server", "Error handling a\nb", id="warning"),
        pytest.param(library_error, "error", "asyncio", "Task failed", id="error"),
        pytest.param(library_misuse, "warning", "x", "%d", id="arguments that do not fit"),
        pytest.param(python_warning, "warning", "py.warnings", "f.py:1: DeprecationWarning: old\n", id="warnings"),
    ],
)
def test_what_libraries_log_becomes_an_event(act: Callable[[], None], level: str, logger: str, message: str) -> None:
    lines = Lines()
    with Logs(lines, wall):
        act()
    line = only(lines)
    assert (line["event"], line["level"], line["logger"]) == ("library", level, logger)
    assert str(line["message"]).rstrip() == message.rstrip()
    assert ("exception" in line) == (act is library_error)


def test_chatter_of_libraries_is_not_logged() -> None:
    lines = Lines()
    with Logs(lines, wall):
        logging.getLogger("asyncio").info("Using selector")
    assert lines.lines == []


def test_standard_logging_is_given_back() -> None:
    before = logging.getLogger().handlers[:]
    with Logs(Lines(), wall), Logs(Lines(), wall):
        assert logging.getLogger().handlers != before
    assert logging.getLogger().handlers == before


def test_lines_reach_a_real_pipe() -> None:
    reader, writer = os.pipe()
    with Logs(LineWriter(writer), wall) as logs:
        logs.request(request())
        logs.event.info("stopped")
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        events = [json.loads(line)["event"] for line in stream]
    assert events == ["request", "stopped"]


async def test_lines_are_written_to_the_end_from_within_a_loop() -> None:
    """As the process does it; whatever blocks the loop raises here."""
    reader, writer = os.pipe()
    with Logs(LineWriter(writer), wall) as logs:
        for _ in range(20):
            logs.request(request())
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert len(stream.readlines()) == 20
