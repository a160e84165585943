"""Every conformance case runs with its bytes sent whole and sent one by one."""

import pytest


@pytest.fixture(params=[False, True], ids=["whole", "bytewise"])
def split(request: pytest.FixtureRequest) -> bool:
    """Whether client and upstream send byte by byte."""
    assert isinstance(request.param, bool)
    return request.param
