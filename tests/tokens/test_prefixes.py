"""The cache of counts: what is found of a prompt that goes on, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tokens import prefixes
from sidecar.tokens.prefixes import BLOCK, FIRST, Known, Prefixes, begin_of, index_of


def known(end: int, tokens: int = 7) -> Known:
    return Known(end, tokens, 1, False)


@pytest.mark.parametrize("end", [1, 255, 256, 257, 1024, 1025, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 9, 130_000])
def test_a_prefix_is_found_however_the_prompt_goes_on(end: int) -> None:
    cache = Prefixes()
    prompt = bytes(index * 7 & 0xFF for index in range(end)) + b"]"
    cache.add(prompt, 1, known(end))
    for more in (b"", b"x", b"x" * 300, b"x" * 20_000):
        found = cache.find(prompt[:end] + more, 1)
        assert found is not None and (found.end, found.tokens) == (end, 7)
    assert cache.find(prompt[: end - 1], 1) is None
    assert cache.find(b"\xff" + prompt[1:], 1) is None
    assert cache.find(prompt[: end - 1] + b"\xff" * 300, 1) is None
    assert cache.find(prompt, 2) is None


def test_the_longest_is_found() -> None:
    cache = Prefixes()
    prompt = b"a" * 10_000
    for end in (100, 200, 5000, 4999):
        cache.add(prompt, 1, known(end, end))
    assert [cache.find(prompt[:length], 1).end for length in (150, 4999, 10_000)] == [100, 4999, 5000]  # type: ignore[union-attr]
    assert len(cache) == 4


def test_what_is_added_after_a_look_up_is_the_same_as_without() -> None:
    looked, other = Prefixes(), Prefixes()
    prompt = b"b" * 20_000
    looked.find(prompt, 1)
    for end in (1, 256, 3000, BLOCK, 20_000):
        looked.add(prompt, 1, known(end))
        other.add(bytes(bytearray(prompt)), 1, known(end))
        assert looked.find(prompt[:end], 1) is not None and other.find(prompt[:end], 1) is not None


@given(st.integers(1, 40_000))
def test_a_prefix_lies_in_one_block(end: int) -> None:
    index = index_of(end)
    assert begin_of(index) < end <= begin_of(index + 1)


def test_blocks_follow_each_other() -> None:
    assert [begin_of(index) for index in range(5)] == [0, *FIRST, BLOCK, 2 * BLOCK]


def test_what_was_not_asked_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_BLOCKS", 3)
    cache = Prefixes()
    prompts = [bytes([65 + number]) * 300 for number in range(4)]
    for prompt in prompts[:3]:
        cache.add(prompt, 1, known(300))
    assert cache.find(prompts[0], 1) is not None
    cache.add(prompts[3], 1, known(300))
    assert [cache.find(prompt, 1) is not None for prompt in prompts] == [True, False, True, True]
    assert len(cache) == 3


def test_many_ends_in_one_block_are_bounded() -> None:
    cache = Prefixes()
    for number in range(100):
        cache.add(b"c" * 300 + b"%03d" % number, 1, known(303))
    assert len(cache) == prefixes.MOST_ENDS
    assert cache.find(b"c" * 300 + b"099", 1) is not None


def test_what_many_conversations_begin_with_stays() -> None:
    cache = Prefixes()
    cache.add(b"c" * 300, 1, known(300))
    for number in range(100):
        prompt = b"c" * 300 + b"%03d" % number
        found = cache.find(prompt, 1)
        assert found is not None and found.end == 300
        cache.add(prompt, 1, known(303))


def test_cleared_it_knows_nothing() -> None:
    cache = Prefixes()
    cache.add(b"abc", 1, known(3))
    cache.clear()
    assert cache.find(b"abc", 1) is None and len(cache) == 0
