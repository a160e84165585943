import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from urllib.request import Request, urlopen

import pytest

from sidecar.cli import main
from sidecar.demo.script import Kind

Start = Callable[..., "subprocess.Popen[str]"]
FREE = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--control", "127.0.0.1:0")


@pytest.fixture
def start() -> Iterator[Start]:
    """`sidecar demo` with these arguments, as a process; killed in the end if it still runs."""
    begun: list[subprocess.Popen[str]] = []

    def _start(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "sidecar", "demo", *arguments]
        environ = {**os.environ, "SIDECAR_REDIS": "local"}
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        begun.append(process)
        return process

    yield _start
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process: "subprocess.Popen[str]", word: str) -> list[str]:
    """The lines up to the first with `word`, that one included."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if word in line:
            return lines
    raise AssertionError(lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_the_banner_says_works_and_a_signal_ends_it(start: Start, number: signal.Signals) -> None:
    process = start(*FREE)
    banner = read_until(process, "Ctrl-C ends")
    # Its log may be faster.
    banner = banner[next(at for at, line in enumerate(banner) if line.startswith("The sidecar listens")) :]
    address = banner[0].split()[4].rstrip(";")
    body = {"model": "demo", "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    asked = Request(f"http://{address}/v1/chat/completions", json.dumps(body).encode())
    with urlopen(asked, timeout=10) as answer:
        engine = answer.headers["x-sidecar-endpoint"]
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert f"http://{engine}" in "\n".join(banner[1:4])
    (breakers,) = (line.split()[1] for line in banner if line.endswith("/breakers"))
    with urlopen(breakers, timeout=10) as page:
        assert [line["state"] for line in json.load(page)] == ["closed"] * 3
    (command,) = (line.split() for line in banner if "--weight 0.1 " in line)
    assert main(command[1:]) == 0, "what the banner says can be pasted"
    process.send_signal(number)
    _, complaints = process.communicate(timeout=10)
    assert (process.returncode, complaints) == (0, "")


def test_a_fault_opens_a_breaker_that_closes_again(start: Start) -> None:
    process = start(*FREE, "--fault", Kind.STATUS.value, "--access-log", "all")
    said = read_until(process, "--- still serving")
    changes = [line.rpartition(": ")[2] for line in said if line.startswith("--- breaker of")]
    assert changes[0] == "closed -> open"
    assert changes[-1] == "half_open -> closed"
    assert not any(" request " in line for line in said), "request lines drown the act"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0


def test_a_canary_is_led_by_what_its_answers_are(start: Start) -> None:
    process = start(*FREE, "--canary", "--fault", Kind.SLOW.value)
    said = read_until(process, "rollout_begun")
    assert any("0.25 of its answers have the fault `slow`" in line for line in said)
    assert "--- canary v2: step 1, has 0.25" in said
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0


def test_a_taken_port_is_told_and_ends_with_1(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--listen", f"127.0.0.1:{port}", "--admin", "off", "--control", "off")
        _, complaints = process.communicate(timeout=10)
    assert process.returncode == 1
    assert complaints.startswith("sidecar demo: ")
    assert str(port) in complaints


def test_a_fault_that_there_is_none_is_a_usage_error(start: Start) -> None:
    process = start("--fault", "gremlins")
    _, complaints = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "stall" in complaints
