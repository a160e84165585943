"""The decoders of a prompt's JSON: what they keep raw, and what they refuse."""

import msgspec
import pytest

from sidecar.tokens import shapes


def test_values_of_a_prompt_are_kept_as_they_came() -> None:
    values = shapes.decode_values(b'[\n {"a": 1}]\n"b"\n\n[2]')
    assert [bytes(value) for value in values] == [b'[\n {"a": 1}]', b'"b"', b"[2]"]


def test_what_a_model_reads_of_a_message_is_raw_and_the_rest_skipped() -> None:
    (message,) = shapes.decode_messages(b'[{"role":"user","content":[{"type":"text"}],"x":[[[]]]}]')
    assert bytes(message.content) == b'[{"type":"text"}]' and bytes(message.name) == b""


@pytest.mark.parametrize("value", [b"[1]", b'[{"a":1},1]', b'["a"]', b"{}"])
def test_a_list_of_messages_holds_objects_alone(value: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        shapes.decode_messages(value)
