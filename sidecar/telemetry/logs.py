"""The log: one canonical line per request at its end, and events (transitions, policy, drain) through structlog.

Request lines do not pass structlog's processors: they are one frozen record, encoded at once, since they are paid per
request. Both kinds go to the same writer and carry the same first members: `ts`, `level`, `event`. The access log is a
switch of its own (`off | errors | all`), not a level. Never a prompt or a completion.
"""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from sidecar.kernel.outcome import Result
from sidecar.proxy.ports import RequestRecord
from sidecar.telemetry.line import line_of
from sidecar.telemetry.render import Field, Format, Stamp, Wall, console_line, fields_of, json_line
from sidecar.telemetry.writer import LineWriter

Access = Literal["off", "errors", "all"]
Level = Literal["debug", "info", "warning", "error"]

LEVEL_NUMBER: Mapping[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

CONSOLE_FIELDS = (
    "status", "method", "path", "model", "endpoint", "version", "reason", "why", "flag", "attempts", "tokens", "ttft_s",
    "max_gap_s", "duration_s", "session", "tenant", "qos", "queued_s", "shadowed", "request_id",
)  # fmt: skip
"""What a person at a terminal wants of a request, in this order; JSON has all."""


class Logs:
    """Where everything is logged. A context manager: lines are written between enter and exit.

    `fixed` members (pod, node, zone) stand in every JSON line. `wall`: Unix seconds.
    """

    def __init__(
        self,
        writer: LineWriter,
        wall: Wall,
        *,
        format: Format = "json",
        level: Level = "info",
        access: Access = "all",
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._put = writer.put
        self._writer = writer
        self._stamp = Stamp(wall)
        self._json = format == "json"
        self._access = access
        self._fixed = {name: value for name, value in (fixed or {}).items() if value}
        # What does not change from one request line to the next, from behind the time on.
        self._head_info, self._head_warning = (
            b'","level":' + msgspec.json.encode({"": level, "event": "request", **self._fixed})[4:-1] + b","
            for level in ("info", "warning")
        )
        self._bridge = _StdlibBridge(self)
        self.event: FilteringBoundLogger = structlog.wrap_logger(
            _Sink(self),
            processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, _as_is],
            wrapper_class=structlog.make_filtering_bound_logger(LEVEL_NUMBER[level]),
        ).bind()
        """For events: `logs.event.info("policy_applied", version=3)`; strings, numbers and None as values."""

    def request(self, record: RequestRecord) -> None:
        """The canonical line of a request that ended."""
        access = self._access
        if access == "off":
            return
        failed = record.result is Result.FAILURE or record.result is Result.OVERLOADED
        if access == "errors" and not failed and record.reason is None and record.status < 400:
            return
        if self._json:
            head = self._head_warning if failed else self._head_info
            self._put(json_line(b'{"ts":"' + self._stamp() + head, line_of(record)))
        else:
            fields = fields_of(line_of(record))
            shown = {name: fields[name] for name in CONSOLE_FIELDS}
            self._put(console_line(self._stamp(), "warning" if failed else "info", "request", shown))

    def line(self, level: str, event: str, fields: Mapping[str, Field]) -> None:
        """One event, rendered and handed to the writer."""
        if self._json:
            head = b'{"ts":"%s","level":"%s",' % (self._stamp(), level.encode())
            self._put(json_line(head, {"event": event, **self._fixed, **fields}))
        else:
            self._put(console_line(self._stamp(), level, event, fields))

    def __enter__(self) -> Self:
        """Start the writer and take over what the standard library logs from WARNING up."""
        self._writer.start()
        self._bridge.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is held and stop."""
        self._bridge.remove()
        self._writer.close()


class _Sink:
    """The end of structlog's chain."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def msg(self, event: str, level: str, **fields: Field) -> None:
        self._logs.line(level, event, fields)

    debug = info = warning = error = critical = exception = log = msg


def _as_is(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """structlog passes a dict on as keyword arguments."""
    return event


class _StdlibBridge(logging.Handler):
    """asyncio, aiohttp and warnings log through the standard library; theirs become events, too."""

    def __init__(self, logs: Logs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs
        self._before: list[logging.Handler] = []

    def install(self) -> None:
        root = logging.getLogger()
        self._before = root.handlers[:]
        root.handlers[:] = [self]
        logging.captureWarnings(True)

    def remove(self) -> None:
        logging.captureWarnings(False)
        root = logging.getLogger()
        if self in root.handlers:
            root.handlers[:] = self._before

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Field] = {"logger": record.name}
        try:
            fields["message"] = record.getMessage()
            if record.exc_info:
                fields["exception"] = logging.Formatter().formatException(record.exc_info)
        except Exception:  # noqa: BLE001 - a foreign record with arguments that do not fit it
            fields["message"] = str(record.msg)
        self._logs.line(record.levelname.lower(), "library", fields)
