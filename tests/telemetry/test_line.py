"""The canonical line has what the record has, under the same names."""

from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import Result
from sidecar.proxy.ports import RequestRecord
from sidecar.telemetry.line import line_of
from sidecar.telemetry.shapes import RequestLine
from tests.facts import members
from tests.telemetry.records import request


def test_a_line_has_every_member_of_its_record_and_no_other() -> None:
    assert sorted(RequestLine.__struct_fields__) == sorted(members(RequestRecord))


def test_each_member_stands_under_its_own_name() -> None:
    usual = line_of(request())
    marked = {name: _another(getattr(usual, name), number) for number, name in enumerate(RequestLine.__struct_fields__)}
    assert len({repr(value) for value in marked.values()}) == len(marked)
    line = line_of(request(**marked))
    assert {name: getattr(line, name) for name in RequestLine.__struct_fields__} == marked


def _another(value: object, number: int) -> object:
    """A value of the same type that no other member has."""
    match value:
        case None:
            return Reason.DRAINING
        case Result():
            return Result.FAILURE
        case bool():
            return not value
        case int():
            return 1000 + number
        case float():
            return number + 0.5
    return f"value of {number}"
