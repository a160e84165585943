"""The real sidecar as a process: `sidecar run` with a policy file, its addresses read from its start line.

One per test, since a breaker remembers. It must also end well: `stop` asks for an orderly end (SIGTERM, exit code 0,
no traceback in its log), so that every test checks that too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.engines.client import call

START_TIMEOUT_S = 20
STOP_TIMEOUT_S = 20
POLL_S = 0.02


class Sidecar:
    """A running sidecar. `address` takes traffic, `admin` answers about it; both are `host:port`."""

    def __init__(self, folder: Path, policy: str) -> None:
        """Starts it and returns when it accepts traffic."""
        self._log = folder / "sidecar.log"
        policy_file = folder / "policy.yaml"
        policy_file.write_text(policy, encoding="utf-8")
        binary = Path(sys.executable).with_name("sidecar")  # of the environment that runs the tests
        flags = "--listen 127.0.0.1:0 --admin 127.0.0.1:0 --control off --drain 1s --settle 1ms --log-format json"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(binary), "run", *flags.split(), "--policy", str(policy_file), "--data", str(folder / "data")],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if not name.startswith("SIDECAR_")},
            )
        self.address, self.admin = self._wait_addresses()

    def _wait_addresses(self) -> tuple[str, str]:
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            for line in self.log_lines():
                if line.get("event") == "started":
                    return str(line["listen"]), str(line["admin"])
            assert self._process.poll() is None, f"the sidecar exited: {self.log()}"
            assert time.monotonic() < give_up, f"no start line after {START_TIMEOUT_S} s: {self.log()}"
            time.sleep(POLL_S)

    def breaker(self, scope: str, key: str) -> str:
        """The state of a breaker as the admin side tells it; one that is left out never left `closed`."""
        listed = json.loads(call(self.admin, "GET", "/breakers").body)
        return next((row["state"] for row in listed if (row["scope"], row["key"]) == (scope, key)), "closed")

    def wait_breaker(self, scope: str, key: str, wanted: str, within_s: float) -> None:
        """Returns when the breaker is in that state; later than `within_s` fails the test."""
        give_up = time.monotonic() + within_s
        while (state := self.breaker(scope, key)) != wanted:
            assert time.monotonic() < give_up, f"{scope} {key} is {state}, not {wanted}: {self.log()[-2000:]}"
            time.sleep(POLL_S)

    def requests(self, count: int, within_s: float = 3) -> list[dict[str, object]]:
        """The log's request lines, oldest first, once there are so many; fewer after `within_s` fail the test."""
        give_up = time.monotonic() + within_s
        while len(lines := [line for line in self.log_lines() if line["event"] == "request"]) < count:
            assert time.monotonic() < give_up, f"{len(lines)} of {count} request lines: {self.log()[-2000:]}"
            time.sleep(POLL_S)
        assert len(lines) == count, lines
        return lines

    def command(self, *words: str, timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
        """One of the sidecar's own commands about this one, such as `model load`: its exit code and what it said."""
        binary = Path(sys.executable).with_name("sidecar")
        return subprocess.run(
            [str(binary), *words, "--admin", self.admin], capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def in_flight(self) -> int:
        """Requests under way on all endpoints, as the admin side tells it."""
        services = json.loads(call(self.admin, "GET", "/routes").body)
        return sum(endpoint["in_flight"] for service in services for endpoint in service["endpoints"])

    def log(self) -> str:
        """Everything that it wrote."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def log_lines(self) -> list[dict[str, object]]:
        """The whole lines of the log, each a JSON object; anything else that it wrote fails the test."""
        lines = [json.loads(line) for line in self.log().split("\n")[:-1]]
        assert all(isinstance(line, dict) for line in lines), lines
        return lines

    def stop(self) -> None:
        """Ends it in an orderly way; a wrong exit code, a traceback in its log or no end at all fail the test.

        Once it has ended, does nothing.
        """
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
        assert code == 0, f"exit code {code}: {self.log()[-2000:]}"
        assert "Traceback" not in self.log(), self.log()
