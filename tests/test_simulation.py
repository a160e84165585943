import json
from pathlib import Path
from random import Random

import pytest

from sidecar import simulation
from sidecar.cli import main
from sidecar.settings import UsageError
from sidecar.simulate.fault import Fault, Kind
from sidecar.simulation import fault_of

POLICY = """apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    models: ["llama-[37]*"]
    fallback: small
    endpoints:
      - {url: "http://10.0.0.1:8000", zone: a}
      - {url: "http://10.0.0.2:8000", zone: b}
      - {url: "http://10.0.0.3:8000"}
  - name: small
    models: []
    endpoints: [{url: "http://10.0.0.9:8000"}]
"""
KEYS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.9:8000"]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "chat.yaml"
    file.write_text(POLICY)
    return file


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng, at, lines = Random(3), 50.0, []
    for _ in range(2400):
        at += rng.expovariate(20.0)
        prompt, output, user = rng.randrange(1, 2000), rng.randrange(1, 80), rng.randrange(40)
        lines.append(
            json.dumps({"arrival": at, "prompt_tokens": prompt, "output_tokens": output, "session": f"user-{user}"})
        )
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return file


def simulated(capsys: pytest.CaptureFixture[str], policy: Path, trace: Path, *more: str) -> str:
    argv = ["simulate", "--policy", str(policy), "--trace", str(trace), "--service", "chat", *more]
    code = main(argv)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_a_healthy_fleet_answers_all_and_opens_nothing(
    capsys: pytest.CaptureFixture[str], policy: Path, trace: Path
) -> None:
    page = json.loads(simulated(capsys, policy, trace, "--json"))
    assert page["requests"] == 2400
    assert page["goodput"] > 0.999
    assert page["trips"] == []
    assert [line["key"] for line in page["endpoints"]] == KEYS
    assert [line["zone"] for line in page["endpoints"]] == ["a", "b", "", ""]
    assert sum(line["share"] for line in page["endpoints"]) == pytest.approx(1.0, abs=1e-5)
    assert all(0.2 < line["share"] < 0.5 for line in page["endpoints"][:3])
    assert page["endpoints"][3]["attempts"] == 0


def test_a_fault_opens_a_breaker_and_the_evidence_is_told(
    capsys: pytest.CaptureFixture[str], policy: Path, trace: Path
) -> None:
    fault = ("--fault", "errors:40s:1.2m:10.0.0.2:8000:0.9")
    page = json.loads(simulated(capsys, policy, trace, *fault, "--json"))
    assert {trip["endpoint"] for trip in page["trips"]} == {KEYS[1]}
    assert 40.0 < page["trips"][0]["at"] < 60.0
    assert page["trips"][0]["fault"]
    assert page["trips"][0]["evidence"]
    assert page["endpoints"][1]["not_closed_s"] > 5.0
    assert page["retried"] > 0
    (harm,) = page["faults"]
    assert (harm["kind"], harm["tripped"]) == ("errors", 1)
    assert harm["saved"] >= harm["kept_away"] > 0.5
    table = simulated(capsys, policy, trace, *fault)
    for words in (
        "answered in time",
        "endpoint breakers opened",
        "fault errors",
        "ENDPOINT",
        page["trips"][0]["evidence"],
    ):
        assert words in table


def test_when_nobody_is_left_the_fallback_serves(capsys: pytest.CaptureFixture[str], policy: Path, trace: Path) -> None:
    page = json.loads(simulated(capsys, policy, trace, "--fault", "outage:30:90:0,1,2", "--json"))
    assert page["endpoints"][3]["attempts"] > 100
    assert page["goodput"] > 0.95


def test_the_same_seed_prints_the_same_bytes(capsys: pytest.CaptureFixture[str], policy: Path, trace: Path) -> None:
    fault = ("--fault", "stall:40:80:0:0.5", "--json")
    one, same, other = (simulated(capsys, policy, trace, *fault, "--seed", seed) for seed in ("4", "4", "5"))
    assert one == same != other


def test_pods_scale_and_limit(capsys: pytest.CaptureFixture[str], policy: Path, trace: Path) -> None:
    page = json.loads(simulated(capsys, policy, trace, "--pods", "2", "--limit", "500", "--scale", "4", "--json"))
    assert (page["requests"], page["scale"]) == (500, 4.0)
    assert [line["key"] for line in page["endpoints"]] == ["pod-0:8000", "pod-1:8000", KEYS[3]]
    slow = json.loads(simulated(capsys, policy, trace, "--pods", "2", "--limit", "500", "--json"))
    assert slow["seconds"] == pytest.approx(4 * page["seconds"], abs=0.01)
    assert slow["ttft_s"]["p50"] < page["ttft_s"]["p50"], "less at once"


def test_progress_of_a_long_trace_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], policy: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "LONG", 1000)
    assert main(["simulate", "--policy", str(policy), "--trace", str(trace), "--service", "chat", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["requests"] == 2400
    lines = captured.err.splitlines()
    assert 5 <= len(lines) <= 10
    assert lines[0].startswith("sidecar simulate: 10 %, ")


def test_what_is_wrong_with_policy_or_trace_is_told_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], policy: Path, trace: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.write_text("{}\n[]\n")
    assert main(["simulate", "--policy", str(bad), "--trace", str(trace)]) == 1
    assert "bad:1" in capsys.readouterr().err
    assert main(["simulate", "--policy", str(policy), "--trace", str(bad)]) == 1
    captured = capsys.readouterr()
    assert [line.split(":")[1] for line in captured.err.splitlines()] == ["1", "2"]
    assert captured.out == ""


USAGE = [
    (["--service", "none"], '--service: "none" is not one of chat, small'),
    (["--service", "small"], "reached as a fallback only"),
    ([], "--service: the policy has 2 services (chat, small): name one"),
    (["--service", "chat", "--scale", "0"], '--scale: "0" is not a number from 0.001 to 1000'),
    (["--service", "chat", "--scale", "nan"], '--scale: "nan" is not a number'),
    (["--service", "chat", "--pods", "0"], '--pods: "0" is not a number from 1 to 1000'),
    (["--service", "chat", "--seed", "x"], '--seed: "x" is not a number'),
    (["--service", "chat", "--limit", "1.5"], '--limit: "1.5" is not a number'),
    (["--service", "chat", "--fault", "step"], "--fault step: write KIND:BEGIN:END:PODS[:STRENGTH]"),
]


@pytest.mark.parametrize(("more", "words"), USAGE, ids=[" ".join(row[0]) or "none" for row in USAGE])
def test_usage_errors(
    capsys: pytest.CaptureFixture[str], policy: Path, trace: Path, more: list[str], words: str
) -> None:
    assert main(["simulate", "--policy", str(policy), "--trace", str(trace), *more]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


FAULTS = [
    ("step:60:180:0:5", Fault(Kind.STEP, (0,), 60.0, 180.0, 5.0)),
    ("step:60:180:0", Fault(Kind.STEP, (0,), 60.0, 180.0, 5.0)),
    ("ramp:1m:2.5m:10.0.0.2:8000", Fault(Kind.RAMP, (1,), 60.0, 150.0, 6.0)),
    ("ramp:1m:2m:10.0.0.2:8000:9", Fault(Kind.RAMP, (1,), 60.0, 120.0, 9.0)),
    ("errors:0s:1h:all:0.3", Fault(Kind.ERRORS, (0, 1, 2, 3), 0.0, 3600.0, 1.0, 0.3)),
    ("multi:1:2:2,0,10.0.0.2:8000", Fault(Kind.MULTI, (0, 1, 2), 1.0, 2.0, 1.0, 0.8)),
    ("zone:1:2:2,2:0.9", Fault(Kind.ZONE, (2,), 1.0, 2.0, 0.9)),
    ("outage:1:2:all", Fault(Kind.OUTAGE, (0, 1, 2, 3), 1.0, 2.0, 1.0)),
]


@pytest.mark.parametrize(("text", "fault"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert fault_of(text, KEYS) == fault


BAD_FAULTS = [
    ("", "write KIND"),
    ("step:1:2", "write KIND"),
    ("gremlins:1:2:0", '"gremlins" is not one of step, ramp,'),
    ("step:x:2:0", '"x" is not a time'),
    ("step:1:-2:0", '"-2" is not a time'),
    ("step:1:2d:0", '"2d" is not a time'),
    ("step:1:9999999h:0", "is not a time"),
    ("step:2:2:0", "it must end after it begins"),
    ("step:1:2:4", '"4" is no endpoint: write "all", 0 to 3, or one of 10.0.0.1:8000, '),
    ("step:1:2:", '"" is no endpoint'),
    ("step:1:2:0,", '"" is no endpoint'),
    ("step:1:2:10.0.0.5:8000", '"10.0.0.5" is no endpoint'),
    ("step:1:2:0:fast", '"fast" is not a number'),
    ("step:1:2:0:0.5", "the strength of step is a factor, from 1 to 1000"),
    ("step:1:2:0:nan", "the strength of step is a factor"),
    ("errors:1:2:0:1.5", "the strength of errors is a share of requests"),
    ("gray:1:2:0:0", "the strength of gray is a share of requests"),
    ("zone:1:2:0:-1", "the strength of zone is seconds, from 0 to 3600"),
]


@pytest.mark.parametrize(("text", "words"), BAD_FAULTS, ids=[row[0] or "empty" for row in BAD_FAULTS])
def test_a_bad_fault_is_told_in_words(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fault_of(text, KEYS)
    assert f"--fault {text}: " in str(caught.value)
    assert words in str(caught.value)
