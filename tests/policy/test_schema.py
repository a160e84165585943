from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from sidecar.policy.schema import Deadlines, Seconds, Service, Strict, encode_hook
from tests.policy.fields import durations, places

POLICIES = Path(__file__).parents[2] / "policies"
DEFAULTS = "".join((POLICIES / name).read_text() for name in ("default.yaml", "kubernetes.yaml"))


@pytest.mark.parametrize("key", sorted({step for place in places() for step in place.path if isinstance(step, str)}))
def test_the_default_files_mention_every_key(key: str) -> None:
    if key == "v1":
        return  # stands for the operator's own keys
    assert f"{key}:" in DEFAULTS or f"{key}," in DEFAULTS


def test_every_policy_struct_is_frozen_and_refuses_unknown_keys() -> None:
    structs = Strict.__subclasses__() + [sub for kind in Strict.__subclasses__() for sub in kind.__subclasses__()]
    assert len(structs) > 15
    for kind in structs:
        assert kind.__struct_config__.frozen
        assert kind.__struct_config__.forbid_unknown_fields


def test_every_duration_has_its_unit_in_the_code_and_none_in_the_file() -> None:
    for place in durations():
        assert not str(place.path[-1]).endswith("_s")
    for field in msgspec.structs.fields(Deadlines):
        assert field.name == f"{field.encode_name}_s"


def test_a_policy_goes_out_as_it_is_written_in_files() -> None:
    service = Service(name="s", deadlines=Deadlines(connect_s=Seconds(0.25)))
    data = msgspec.json.decode(msgspec.json.encode(service, enc_hook=encode_hook))
    assert data["deadlines"]["connect"] == "250ms"
    assert data["breakers"]["node"]["open_max"] == "5m"


def test_the_encoder_knows_no_other_types() -> None:
    with pytest.raises(NotImplementedError, match="complex"):
        msgspec.json.encode(1j, enc_hook=encode_hook)


def test_every_text_is_bounded() -> None:
    unbounded = [
        place.id
        for place in places()
        if isinstance(place.kind, inspect.StrType) and place.kind.max_length is None and "annotations" not in place.path
    ]
    assert unbounded == []
