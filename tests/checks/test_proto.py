from pathlib import Path

import pytest

from tests.checks import proto

SMALL = 'syntax = "proto3";\npackage sidecar.control.v1;\nmessage Said { string words = 1; }\n'


def tree(root: Path, text: str = SMALL) -> Path:
    (root / "proto" / proto.PROTO).parent.mkdir(parents=True)
    (root / "proto" / proto.PROTO).write_text(text, encoding="utf-8")
    (root / proto.PLACE).mkdir(parents=True)
    return root


def test_what_is_checked_in_is_what_the_protocol_says() -> None:
    assert list(proto.drift(proto.ROOT)) == []


def test_what_was_written_has_no_drift_until_the_protocol_changes(tmp_path: Path) -> None:
    assert proto.main(tree(tmp_path)) == 0
    assert list(proto.drift(tmp_path)) == []
    (tmp_path / "proto" / proto.PROTO).write_text(SMALL.replace("words", "word"), encoding="utf-8")
    code, types = proto.drift(tmp_path)
    assert code.startswith("sidecar/control/pb/control_pb2.py is not what proto/sidecar/control/v1/control.proto says")
    assert types.startswith("sidecar/control/pb/control_pb2.pyi ") and types.endswith("run `make proto`")


def test_code_that_was_never_written_is_told(tmp_path: Path) -> None:
    assert len(list(proto.drift(tree(tmp_path)))) == 2


def test_a_protocol_that_is_none_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"control\.proto is refused by protoc"):
        proto.generated(tree(tmp_path, "syntax = 3"))
    assert "control.proto:1" in capfd.readouterr().err


def test_where_no_protocol_is_there_is_nothing_to_hold(tmp_path: Path) -> None:
    assert list(proto.drift(tmp_path)) == []
