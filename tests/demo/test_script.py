from math import exp
from statistics import fmean, stdev

import msgspec
import pytest

from sidecar.demo.script import MID_STREAM, Fault, Kind, Script, luck

IDS = [f"r{number}" for number in range(4000)]


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_can_be_asked_for_by_its_word(kind: Kind) -> None:
    assert msgspec.json.decode(b'{"kind":"%b"}' % kind.value.encode(), type=Fault) == Fault(kind=kind)


def test_fault_survives_its_own_json() -> None:
    fault = Fault(Kind.STATUS, status=429, retry_after="7", times=2, skip=1, code="slow_down", for_s=1.5)
    assert msgspec.json.decode(msgspec.json.encode(fault), type=Fault) == fault


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"{}", id="no kind"),
        pytest.param(b'{"kind":"explode"}', id="unknown kind"),
        pytest.param(b'{"kind":"stall","afer":3}', id="misspelt field"),
        pytest.param(b'{"kind":"stall","after":-1}', id="negative count"),
        pytest.param(b'{"kind":"status","status":200}', id="a status that is no error"),
        pytest.param(b'{"kind":"slow_drip","size":0}', id="a drip of nothing"),
        pytest.param(b'{"kind":"slow_drip","period_s":0}', id="a drip without a period"),
        pytest.param(b'{"kind":"stall","share":1.1}', id="more than all"),
        pytest.param(b'{"kind":"slow","factor":0.5}', id="slower by being quicker"),
        pytest.param(b'{"kind":"stall"', id="cut JSON"),
    ],
)
def test_bad_fault_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.json.decode(text, type=Fault)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"token_gap_s":-0.1}', id="negative gap"),
        pytest.param(b'{"first_token_s":"1s"}', id="a duration with a unit"),
        pytest.param(b'{"speed":3}', id="unknown field"),
        pytest.param(b'{"spread":-0.2}', id="negative spread"),
        pytest.param(b'{"fault":{"kind":"nap"}}', id="unknown fault within"),
    ],
)
def test_bad_script_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.json.decode(text, type=Script)


def test_default_script_is_quick_and_right() -> None:
    script = Script()
    assert script.fault is None
    assert script.first_token_s == script.token_gap_s == 0.0


def test_faults_before_the_first_token_are_not_mid_stream() -> None:
    assert not MID_STREAM & {Kind.HANG, Kind.STATUS, Kind.HEADERS_ONLY, Kind.ROLE_ONLY, Kind.DIE}


def test_luck_is_the_requests_own_and_another_for_each_purpose() -> None:
    assert luck("r1", "fault") == luck("r1", "fault")
    assert len({luck("r1", "fault"), luck("r1", "pace"), luck("r2", "fault")}) == 3
    assert luck("\udcff", "fault") != luck("", "fault")


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_share_of_the_requests_is_struck_whatever_their_order(share: float) -> None:
    fault = Fault(Kind.STALL, share=share)
    struck = {name for name in IDS if fault.strikes(name)}
    assert struck == {name for name in reversed(IDS) if fault.strikes(name)}
    assert len(struck) / len(IDS) == pytest.approx(share, abs=0.02)


def test_smaller_share_strikes_a_part_of_what_a_larger_one_does() -> None:
    small, large = Fault(Kind.STALL, share=0.2), Fault(Kind.STATUS, share=0.6)
    assert all(large.strikes(name) for name in IDS if small.strikes(name))


def test_first_token_waits_for_load_and_prompt() -> None:
    script = Script(first_token_s=0.1, first_token_per_live_s=0.01, first_token_per_prompt_token_s=0.001)
    assert script.first_token_after_s("r1", 0, 0) == pytest.approx(0.1)
    assert script.first_token_after_s("r1", 200, 3) == pytest.approx(0.33)


def test_spread_is_a_lognormal_factor() -> None:
    script = Script(first_token_s=1.0, spread=0.2)
    waits = [script.first_token_after_s(name, 0, 0) for name in IDS]
    assert fmean(waits) == pytest.approx(exp(0.02), rel=0.02)
    assert stdev(waits) == pytest.approx(0.206, rel=0.1)
    assert script.first_token_after_s("r1", 0, 0) == waits[1]
