"""The canonical line has what the record has, under the same names."""

from sidecar.proxy.ports import RequestRecord
from sidecar.telemetry.line import RequestLine, line_of
from tests.telemetry.records import request


def test_a_line_has_every_member_of_its_record_and_no_other() -> None:
    assert sorted(RequestLine.__struct_fields__) == sorted(RequestRecord.__slots__)


def test_each_member_stands_under_its_own_name() -> None:
    marked = {name: f"value of {name}" for name in RequestLine.__struct_fields__}
    line = line_of(request(**marked))
    assert {name: getattr(line, name) for name in RequestLine.__struct_fields__} == marked
