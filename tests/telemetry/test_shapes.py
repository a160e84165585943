"""The line's shape: what is always told, and what only where there is something to tell."""

import msgspec

from sidecar.telemetry.line import line_of
from sidecar.telemetry.shapes import RequestLine
from tests.telemetry.records import request

NOTHING: dict[str, object] = {
    "tenant": "", "qos": "", "queued_s": None, "counted": "", "reserved_tokens": 0, "shadowed": "",
    "why": "",
}  # fmt: skip


def told(**changes: object) -> dict[str, object]:
    said: dict[str, object] = msgspec.json.decode(msgspec.json.encode(line_of(request(**changes))))
    return said


def test_nothing_of_admission_is_told_where_there_is_none() -> None:
    assert list(told(**NOTHING)) == [name for name in RequestLine.__struct_fields__ if name not in NOTHING]


def test_a_turn_that_came_at_once_is_told_and_none_is_not() -> None:
    assert told(**NOTHING | {"queued_s": 0.0})["queued_s"] == 0.0
    assert "queued_s" not in told(**NOTHING)


def test_members_that_were_always_told_still_are() -> None:
    assert (
        told(**NOTHING | {"reason": None, "session": "", "ttft_s": None}).items()
        >= {
            "reason": None,
            "session": "",
            "ttft_s": None,
        }.items()
    )
