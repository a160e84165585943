import msgspec
import pytest

from sidecar.demo.script import MID_STREAM, Fault, Kind, Script


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
