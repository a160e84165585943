"""Tallies over the wire: small, and refused where they can be none."""

import msgspec
import pytest

from sidecar.core.verdict import KEYS, MOST_COUNTED, MOST_KEYS, Tally


def test_a_tally_is_small_and_the_same_after_msgpack() -> None:
    tally = Tally("r-1", 2, {0: 17, 3072: 1, 30_000: 200})
    blob = msgspec.msgpack.encode(tally)
    assert len(blob) < 24
    assert msgspec.msgpack.decode(blob, type=Tally) == tally
    assert tally.valid()


@pytest.mark.parametrize(
    "tally",
    [
        Tally("r" * 257, 0, {}),
        Tally("r", -1, {}),
        Tally("r", 0, {-1: 1}),
        Tally("r", 0, {KEYS: 1}),
        Tally("r", 0, {0: 0}),
        Tally("r", 0, {0: MOST_COUNTED + 1}),
        Tally("r", 0, dict.fromkeys(range(MOST_KEYS + 1), 1)),
    ],
    ids=["id", "step", "below", "beyond", "zero", "many", "keys"],
)
def test_what_cannot_be_ours_is_not_valid(tally: Tally) -> None:
    assert not tally.valid()


@pytest.mark.parametrize("blob", [b"", b"\x93", b"\xc0", b"\x93\xa1r\xa1s\x80", b"\x93\xa1r\x00\x81\xa1x\x01"])
def test_what_is_no_tally_is_not_decoded(blob: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(blob, type=Tally)
