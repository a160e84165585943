"""What every answer has."""

import msgspec

from sidecar.admin import answer


def test_pages_are_json() -> None:
    shown = answer.page({"a": 1}, 202)
    assert (shown.status, shown.content_type, shown.body) == (202, "application/json", b'{"a":1}')
    assert answer.encoded(b"[]").body == b"[]"


def test_errors_have_the_shape_that_clients_of_engines_know() -> None:
    refused = answer.error(404, "no such breaker", "unknown_breaker")
    assert refused.status == 404
    assert isinstance(refused.body, bytes)
    assert msgspec.json.decode(refused.body) == {
        "error": {
            "message": "no such breaker",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_breaker",
        }
    }
