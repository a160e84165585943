"""The verb: where a recording comes from, what is printed of it, and what is said where there is none."""

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from sidecar import replay as verb
from sidecar.admin.app import serve_admin
from sidecar.cli import main
from sidecar.kernel.outcome import Ending
from sidecar.txlog.recording import End, Line, Span, write
from tests.admin.facts import A, FakeLog, StillFacts, service, snapshot
from tests.processes import engine, sidecar
from tests.txlog.recorded import Hand, at_ms

ONE, TWO, THREE = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"

POLICY = """apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    endpoints: [{url: "http://10.0.0.1:8000"}, {url: "http://10.0.0.2:8000"}, {url: "http://10.0.0.3:8000"}]
    breakers:
      node: {consecutive: 2, failure_ratio: 0, successes: 1, min_closed_ratio: 0, adaptive: false}
"""


def lines(seconds: int = 60) -> list[Line]:
    """ONE fails from the eleventh second to the thirtieth; it was opened at the twentieth, and proved at the 31st."""
    hand = Hand()
    for second in range(1, seconds + 1):
        ended = {TWO: {Ending.COMPLETE: 10}, THREE: {Ending.COMPLETE: 10}}
        if second <= 20 or second > 31:
            ended[ONE] = {Ending.SERVER_ERROR if 11 <= second <= 20 else Ending.COMPLETE: 10}
        hand.second(second, ended)
        if second == 20:
            hand.moved(20.0, ONE, "open", "consecutive", evidence="100 failures in a row")
        elif second == 30:
            hand.moved(30.0, ONE, "half_open", "waited")
            hand.moved(31.0, ONE, "closed", "proved")
    return [Span(at_ms(0), at_ms(seconds)), *hand.lines, End(len(hand.lines) + 1)]


def written(some: Sequence[Line]) -> bytes:
    return b"".join(write(line) for line in some)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "stricter.yaml"
    file.write_text(POLICY)
    return file


@pytest.fixture
def record(tmp_path: Path) -> Path:
    file = tmp_path / "monday.ndjson"
    file.write_bytes(written(lines()))
    return file


def argv(policy: Path, *more: str) -> list[str]:
    return ["log", "replay", "--policy", str(policy), *more]


def test_what_would_have_been_is_said_in_words_and_as_a_table(
    capsys: pytest.CaptureFixture[str], policy: Path, record: Path
) -> None:
    assert main(argv(policy, "--from", str(record))) == 0
    out = capsys.readouterr().out
    assert (
        f"with this file {ONE} would have opened at 02:33:30 instead of 02:33:40, 9.8 s sooner (consecutive), and "
        "closed at 02:33:51, as it did; 98 requests would have been shed, 98 of which failed or were late"
    ) in out
    assert "evidence: 2 failures in a row, the last: server_error" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["node", ONE, "chat", "490", "100", "-", "-", "1x_11_s", "1x_21_s", "98"] in rows
    assert ["node", TWO, "chat", "600", "0", "-", "-", "-", "-", "0"] in rows
    assert "1 opened in the record, 1 with this file, 0 of them at the same time" in out
    assert "What cannot be said:" in out
    assert "is not in the record" in out


def test_the_same_as_json(capsys: pytest.CaptureFixture[str], policy: Path, record: Path) -> None:
    assert main(argv(policy, "--from", str(record), "--json")) == 0
    page = json.loads(capsys.readouterr().out)
    (difference,) = next(key for key in page["keys"] if key["key"] == ONE)["differences"]
    assert difference["verdict"] == "sooner"
    assert difference["shift_s"] == pytest.approx(-9.85)
    assert difference["replayed"]["kept_away"] == page["totals"]["kept_away"] == 98
    assert (page["since"], page["until"]) == ("2025-11-30T02:33:20Z", "2025-11-30T02:34:20Z")
    assert page["unsaid"]


def test_of_a_file_a_span_is_counted_from_its_end(
    capsys: pytest.CaptureFixture[str], policy: Path, record: Path
) -> None:
    for flags, differences in ((("--since", "30s"), 1), (("--since", "20s"), 0), (("--until", "50s"), 0)):
        assert main(argv(policy, "--from", str(record), "--json", *flags)) == 0
        page = json.loads(capsys.readouterr().out)
        found = [difference for key in page["keys"] for difference in key["differences"]]
        assert len(found) == differences, flags
    assert page["until"] == "2025-11-30T02:33:30Z"


def test_a_file_without_its_first_line_is_read_as_well(
    capsys: pytest.CaptureFixture[str], policy: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cut.ndjson"
    file.write_bytes(b"\n" + written(lines()[1:-1]))
    for flags in ((), ("--since", "1h")):
        assert main(argv(policy, "--from", str(file), "--json", *flags)) == 0
        assert json.loads(capsys.readouterr().out)["totals"]["kept_away"] == 98


def test_a_file_that_was_cut_off_says_so(capsys: pytest.CaptureFixture[str], policy: Path, record: Path) -> None:
    record.write_bytes(record.read_bytes()[:-30])
    assert main(argv(policy, "--from", str(record))) == 0
    assert "the recording breaks off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "there is nothing in it", id="empty"),
        pytest.param(b"hello\n", "line 1 is not of a recording", id="foreign"),
        pytest.param(written(lines()[:3]) + b'{"is":"seen"}\n', "line 4 is not of a recording", id="broken"),
        pytest.param(written([*lines()[10:12], *lines()[1:3]]), "comes after one of", id="out of order"),
    ],
)
def test_a_file_that_is_no_recording_fails_in_words(
    capsys: pytest.CaptureFixture[str], policy: Path, record: Path, content: bytes, words: str
) -> None:
    record.write_bytes(content)
    assert main(argv(policy, "--from", str(record))) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert str(record) in captured.err
    assert captured.out == ""


def test_a_file_that_is_not_there_fails_in_words(
    capsys: pytest.CaptureFixture[str], policy: Path, tmp_path: Path
) -> None:
    assert main(argv(policy, "--from", str(tmp_path / "none"))) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_a_policy_that_is_none_fails_with_every_error(
    capsys: pytest.CaptureFixture[str], policy: Path, record: Path
) -> None:
    policy.write_text(POLICY.replace("consecutive: 2", "consecutive: 0").replace("successes: 1", "successes: x"))
    assert main(argv(policy, "--from", str(record))) == 1
    err = capsys.readouterr().err
    assert "$.services[0].breakers.node.consecutive" in err
    assert "$.services[0].breakers.node.successes" in err


def test_endpoints_that_the_policy_lacks_are_named(
    capsys: pytest.CaptureFixture[str], policy: Path, record: Path
) -> None:
    policy.write_text(POLICY.replace('{url: "http://10.0.0.1:8000"}, ', ""))
    assert main(argv(policy, "--from", str(record))) == 0
    assert f"not in this file, and left out: {ONE}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--since", "soon"), "--since: "),
        (("--until", "31d"), "--until: "),
        (("--since", "10m", "--until", "10m"), "would be empty"),
        (("--service", "voice"), "there are chat"),
        (("--from", "x", "--admin", "127.0.0.1:1"), "--from reads a file"),
        (("--from", "x", "--save", "y"), "--from reads a file"),
        (("--admin", "off"), "the admin port is off"),
    ],
)
def test_flags_without_sense_are_told(
    capsys: pytest.CaptureFixture[str], policy: Path, flags: tuple[str, ...], words: str
) -> None:
    assert main(argv(policy, *flags)) == 2
    assert words in capsys.readouterr().err


def test_progress_of_a_long_recording_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], policy: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "LONG", 20)
    assert main(argv(policy, "--from", str(record), "--json")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    told = captured.err.splitlines()
    assert len(told) == 3
    assert told[0] == "sidecar log replay: 31 %, 20 lines, up to 02:33:39"


# A running sidecar.


async def asked(log: FakeLog | None, *flags: str) -> int:
    facts = StillFacts(snapshot(service(A)))
    facts.log = log
    async with asyncio.timeout(20), serve_admin(facts, "127.0.0.1", 0) as port:
        return await asyncio.to_thread(main, [*flags, "--admin", f"127.0.0.1:{port}"])


def log_of(some: Sequence[Line]) -> FakeLog:
    log = FakeLog()
    texts = [write(line) for line in some]
    log.pages = [texts[begin : begin + 10] for begin in range(0, len(texts), 10)]
    return log


async def test_a_running_sidecar_is_asked_and_what_it_told_is_kept(
    capsys: pytest.CaptureFixture[str], policy: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.ndjson"
    log = log_of(lines())
    assert await asked(log, *argv(policy, "--since", "2h", "--service", "chat", "--save", str(kept), "--json")) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["totals"]["kept_away"] == 98
    since_us, until_us, of = log.asked[0]
    assert (until_us - since_us, of) == (7_500_000_000, "chat")
    assert kept.read_bytes() == written(lines())
    assert list(tmp_path.glob("*.part")) == []
    assert main(argv(policy, "--from", str(kept), "--json")) == 0
    assert json.loads(capsys.readouterr().out)["totals"] == page["totals"]


async def test_only_what_was_asked_for_is_told(capsys: pytest.CaptureFixture[str], policy: Path) -> None:
    assert await asked(log_of(lines()), *argv(policy, "--since", "20s", "--json")) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["totals"]["recorded_openings"] == 0
    assert page["since"] == "2025-11-30T02:34:00Z"


async def test_a_sidecar_that_breaks_off_is_said_and_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], policy: Path, tmp_path: Path
) -> None:
    log = log_of(lines()[:-1])
    log.away = "timeout"
    kept = tmp_path / "kept.ndjson"
    code = await asked(log, *argv(policy, "--save", str(kept)))
    captured = capsys.readouterr()
    assert code == 1
    assert "breaks off" in captured.err
    assert not kept.exists()


@pytest.mark.parametrize(
    ("log", "words"), [(None, "keeps no log"), (log_of([]), "not the admin port of a sidecar that keeps a log")]
)
async def test_a_sidecar_that_cannot_tell_is_a_failure(
    capsys: pytest.CaptureFixture[str], policy: Path, log: FakeLog | None, words: str
) -> None:
    assert await asked(log, *argv(policy)) == 1
    assert words in capsys.readouterr().err


def test_nobody_there_is_a_failure(capsys: pytest.CaptureFixture[str], policy: Path, tmp_path: Path) -> None:
    assert main(argv(policy, "--admin", f"unix://{tmp_path}/none.sock")) == 1
    assert "no sidecar answers" in capsys.readouterr().err


RUNNING = """apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    endpoints: [{url: "http://127.0.0.1:%d"}, {url: "http://127.0.0.1:%d"}]
    breakers:
      node: {consecutive: %d, failure_ratio: 0, min_closed_ratio: 0, adaptive: false}
      session: {mode: "off"}
      request: {mode: "off"}
"""


async def test_a_real_sidecar_remembers_and_a_stricter_policy_would_have_opened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    running, stricter, kept = (tmp_path / name for name in ("running.yaml", "stricter.yaml", "kept.ndjson"))
    body = {"model": "m", "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    with socket.socket() as free:
        # Nobody listens there, and nobody else will while it is bound.
        free.bind(("127.0.0.1", 0))
        dead = free.getsockname()[1]
        async with engine() as (_, port):
            running.write_text(RUNNING % (port, dead, 1000))
            stricter.write_text(RUNNING % (port, dead, 3))
            async with sidecar("--policy", str(running)) as it, aiohttp.ClientSession() as client:
                for _ in range(40):
                    url = f"http://127.0.0.1:{it.port}/v1/chat/completions"
                    async with client.post(url, json=body) as response:
                        assert response.status in (200, 502)  # retries have a budget
                        await response.read()
                flags = ["--admin", f"127.0.0.1:{it.admin}", "--since", "1m", "--json", "--save", str(kept)]
                async with asyncio.timeout(10):
                    while True:  # a summary is told once a second
                        assert await asyncio.to_thread(main, argv(stricter, *flags)) == 0
                        page = json.loads(capsys.readouterr().out)
                        if page["attempts"] >= 40 and page["totals"]["replayed_openings"]:
                            break
    (difference,) = next(key for key in page["keys"] if key["key"] == f"127.0.0.1:{dead}")["differences"]
    assert difference["verdict"] == "only_replayed"
    assert difference["replayed"]["evidence"] == "3 failures in a row, the last: connect_failed"
    assert difference["replayed"]["spared"] == difference["replayed"]["kept_away"] > 0
    assert {key["key"] for key in page["keys"]} == {f"127.0.0.1:{port}", f"127.0.0.1:{dead}"}
    assert page["unknown_endpoints"] == []
    assert main(argv(running, "--from", str(kept), "--json")) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["replayed_openings"] == 0
