import pytest

from sidecar.wire.peer import is_this_machine


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0:0:0:0:0:0:0:1"])
def test_this_machine(address: str) -> None:
    assert is_this_machine(address)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.6", "127.0.0.2", "10.0.0.1", "::2", "::ffff:10.0.0.1", "localhost", "", "127.0.0.1:80", "fe80::1%lo"],
)
def test_others(address: str) -> None:
    assert not is_this_machine(address)
