import pytest

from tests.checks import sbom

PINS = {"pyyaml": ("6.0.4", frozenset({"--hash=sha256:0"}))}


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        pytest.param([("PyYAML", "6.0.4")], [], id="the same"),
        pytest.param([], ["pyyaml 6.0.4 is not in the bill"], id="missing"),
        pytest.param(
            [("PyYAML", "6.0.3")],
            ["pyyaml 6.0.4 is not in the bill", "pyyaml 6.0.3 is not in requirements.lock"],
            id="another version",
        ),
        pytest.param(
            [("PyYAML", "6.0.4"), ("pip", "26.0")], ["pip 26.0 is not in requirements.lock"], id="one too many"
        ),
    ],
)
def test_a_bill_that_is_not_the_locks_is_told(listed: list[tuple[str, str]], told: list[str]) -> None:
    bill = {"components": [{"name": name, "version": version} for name, version in listed]}
    assert sbom.differences(bill, PINS) == told
