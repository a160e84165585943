import pytest

from sidecar.proxy.request import Request
from tests import under_test
from tests.facts import members
from tests.harness import request
from tests.proxy.bench import request_of


@pytest.mark.parametrize(
    ("chunked", "length", "has_body"),
    [(False, None, False), (False, 0, False), (False, 1, True), (True, None, True)],
    ids=["none", "announced empty", "by length", "chunked"],
)
def test_a_body_is_what_is_announced(chunked: bool, length: int | None, has_body: bool) -> None:
    asked = Request()
    asked.chunked, asked.content_length = chunked, length
    assert asked.has_body is has_body


@pytest.mark.parametrize("body", [None, b"x"], ids=["bodiless", "with a body"])
@pytest.mark.parametrize(
    ("method", "idempotent"),
    [
        (b"GET", True),
        (b"HEAD", True),
        (b"OPTIONS", True),
        (b"PUT", True),
        (b"DELETE", True),
        (b"TRACE", True),
        (b"POST", False),
        (b"PATCH", False),
        (b"LOCK", False),
    ],
)
def test_only_bodiless_requests_of_idempotent_methods_may_be_sent_twice(
    method: bytes, idempotent: bool, body: bytes | None
) -> None:
    assert request_of(request(method=method, body=body)).resendable is (idempotent and body is None)


def test_a_held_inference_may_be_sent_twice() -> None:
    assert request_of(under_test.chat()).resendable


def test_a_new_request_shares_nothing_with_another() -> None:
    one, other = Request(), Request()
    assert len(members(Request)) > 10
    for name in members(Request):
        value = getattr(one, name)
        if isinstance(value, list):
            assert value is not getattr(other, name)
