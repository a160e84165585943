"""Counting one prompt: the whole, or what is left of one whose beginning is known."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Theirs

from sidecar.tokens.prefixes import Known, Prefixes
from sidecar.tokens.texts import BREATHE, MEDIA_TOKENS, Uncountable
from sidecar.tokens.tokenizer import Tokenizer
from sidecar.tokens.work import MOST_GUESSED_BYTES, TURN_BYTES, Beside, Work
from sidecar.wire.prompt import prompt_of

SYSTEM = {"role": "system", "content": "Answer in one word. " * 40}
USER = {"role": "user", "content": "Which is it?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Desk:
    """What a counter keeps for its work."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prefixes = Prefixes()
        self.beside = Beside()

    def work(self, prompt: bytes) -> Work:
        return Work(prompt, 1, self.prefixes.find(prompt, 1), (self.tokenizer,), self.beside)

    def count(self, prompt: bytes) -> Work:
        work = self.work(prompt)
        for _ in work.run(0):
            pass
        for found in work.found:
            self.prefixes.add(prompt, 1, found)
        for key, tokens in work.found_beside:
            self.beside.add(key, tokens)
        return work


@pytest.fixture
def desk(tiny: Tokenizer) -> Desk:
    return Desk(tiny)


def body(*messages: Any, indent: int | None = None, **more: Any) -> bytes:
    return prompt_of(json.dumps({"messages": messages, **more}, indent=indent).encode())


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"system": "Be brief.", "tools": TOOLS}])
def test_of_a_conversation_that_goes_on_the_end_is_counted(
    desk: Desk, tiny: Tokenizer, indent: int | None, more: dict[str, Any]
) -> None:
    first = desk.count(body(SYSTEM, USER, indent=indent, **more))
    assert first.known is None and first.messages == 2
    answer = {"role": "assistant", "content": "That."}
    prompt = body(SYSTEM, USER, answer, USER, indent=indent, **more)
    work = desk.work(prompt)
    work.prepare()
    assert work.size == sum(len(json.dumps(each["content"])) for each in (answer, USER))
    again = desk.count(prompt)
    assert again.known is not None and again.known.messages == 2 and again.messages == 4
    assert again.tokens == first.tokens + tiny.count("That.") + tiny.count(str(USER["content"]))
    assert again.tokens == Desk(tiny).count(prompt).tokens


def test_the_same_again_leaves_nothing_to_count(desk: Desk) -> None:
    for prompt in (body(SYSTEM, USER, tools=TOOLS), prompt_of(b'{"prompt":"a text"}')):
        first = desk.count(prompt)
        work = desk.work(prompt)
        work.prepare()
        assert work.size == 0 and desk.count(prompt).tokens == first.tokens and not work.found


def test_a_new_conversation_is_counted_from_what_all_begin_with(desk: Desk) -> None:
    desk.count(body(SYSTEM, USER))
    work = desk.count(body(SYSTEM, {"role": "user", "content": "Another thing."}))
    assert work.known is not None and work.known.messages == 1 and work.messages == 2


def test_a_text_that_goes_on_is_another(desk: Desk, tiny: Tokenizer) -> None:
    desk.count(b'"some words"')
    work = desk.count(b'"some words and more"')
    assert work.known is None and work.tokens == tiny.count("some words and more")


def test_orders_beside_a_text_are_counted_once(desk: Desk, tiny: Tokenizer) -> None:
    desk.count(b'"a"\n"be brief"')
    work = desk.work(b'"b"\n"be brief"')
    work.prepare()
    assert work.size == 3 and desk.count(b'"b"\n"be brief"').tokens == tiny.count("b") + tiny.count("be brief")


def test_pictures_count_as_a_guess_from_then_on(desk: Desk, tiny: Tokenizer) -> None:
    seen = {"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "What?"}]}
    first = desk.count(body(seen))
    assert first.media and first.tokens == MEDIA_TOKENS + tiny.count("What?")
    again = desk.count(body(seen, USER))
    assert again.known is not None and again.media
    assert again.tokens == first.tokens + tiny.count(str(USER["content"]))


def test_ids_are_not_remembered(desk: Desk) -> None:
    work = desk.count(b"[1,2,3]")
    assert work.tokens == 3 and not work.found


def test_what_only_python_reads_is_counted_and_not_remembered(desk: Desk, tiny: Tokenizer) -> None:
    work = desk.count(prompt_of(b'{"messages":[{"role":"user","content":"a\\ud800"}],"system":"s"}'))
    assert work.tokens == tiny.count("a\ufffd") + tiny.count("s") and not work.found


def test_what_cannot_be_counted_says_so(desk: Desk) -> None:
    with pytest.raises(Uncountable):
        desk.count(b'{"query":"q"}')


def test_looking_for_texts_gives_others_a_turn(desk: Desk) -> None:
    held = list(desk.work(body(*[USER] * 3000)).run(0))
    assert held.count(True) > 3000 // BREATHE


def test_a_long_text_is_counted_in_turns_to_the_same_sum(desk: Desk, theirs: Theirs) -> None:
    text = "Some words, and a few more of them. " * 6000
    work = desk.work(json.dumps([{"role": "user", "content": text}]).encode())
    turns: Iterator[bool] = work.run(0)
    assert len(list(turns)) >= len(text) // (4 * TURN_BYTES) - 1
    assert work.tokens == len(theirs.encode(text).ids)


HARD = {
    "one letter": "a" * 100_000,
    "emoji": "\U0001f600" * 25_000,
    "combining marks": "e" + "\u0301" * 50_000,
    "Chinese without spaces": "没有空格的文字" * 5_000,
    "spaces": " " * 100_000,
}


@pytest.mark.parametrize("text", HARD.values(), ids=list(HARD))
def test_the_hardest_texts_are_right_but_for_the_cuts(desk: Desk, theirs: Theirs, text: str) -> None:
    work = desk.count(json.dumps([{"role": "user", "content": text}], ensure_ascii=False).encode())
    exact = len(theirs.encode(text).ids)
    assert exact <= work.tokens <= exact + 8 * (len(text.encode()) // 24_000)


def test_beside_forgets_what_was_not_used_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.tokens.work.MOST_BESIDE", 2)
    beside = Beside()
    for key in (1, 2, 1, 3):
        beside.add(key, key)
    assert [beside.get(key) for key in (1, 2, 3)] == [1, None, 3]
    beside.clear()
    assert beside.get(1) is None


def test_a_prefix_of_another_tokenizer_is_none(desk: Desk, tiny: Tokenizer) -> None:
    prompt = body(USER)
    desk.count(prompt)
    assert desk.prefixes.find(prompt, 2) is None
    assert isinstance(desk.prefixes.find(prompt, 1), Known)


TALK = [{"role": "user", "content": "some words and a few more of them, " * 40}] * 12


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"system": "Be brief.", "tools": TOOLS}])
def test_a_short_end_of_a_long_conversation_is_guessed_by_what_is_known(desk: Desk, more: dict[str, Any]) -> None:
    known = desk.count(body(*TALK, **more))
    prompt = body(*TALK, {"role": "assistant", "content": "some words and a few more"}, USER, **more)
    work = desk.work(prompt)
    assert work.guess() and work.messages == known.messages + 2 and not work.found
    exact = desk.count(prompt)
    assert known.tokens < work.tokens and abs(work.tokens - exact.tokens) <= exact.tokens / 100


def test_what_was_asked_before_is_not_guessed_but_known(desk: Desk) -> None:
    prompt = body(*TALK, tools=TOOLS)
    exact, again = desk.count(prompt), desk.work(prompt)
    assert again.guess() and (again.tokens, again.messages) == (exact.tokens, exact.messages)


@pytest.mark.parametrize(
    ("known", "then", "more"),
    [
        (TALK[:1], [USER], {}),
        (TALK, [TALK[0]], {}),
        (TALK, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], {}),
        (TALK, [USER], {"tools": [{"type": "function", "function": {"name": "another"}}]}),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u" * 9999}}]}], [USER], {}),
    ],
    ids=["little is known", "a long end", "a picture", "other tools", "known is a picture"],
)
def test_other_ends_are_not_guessed(desk: Desk, known: list[Any], then: list[Any], more: dict[str, Any]) -> None:
    desk.count(body(*known))
    work = desk.work(body(*known, *then, **more))
    assert work.known is not None and not work.guess()


def test_the_end_of_what_is_no_conversation_is_not_guessed(desk: Desk) -> None:
    desk.count(prompt_of(b'{"prompt":"a text"}'))
    assert not desk.work(prompt_of(b'{"prompt":"a text"}')).guess() and not desk.work(body(USER)).guess()


def test_a_guess_of_much_that_has_few_tokens_is_bounded(desk: Desk) -> None:
    known = [{"role": "user", "content": " " * 1_000_000}]
    desk.count(body(*known))
    ends = [{"role": "user", "content": "x" * size} for size in (MOST_GUESSED_BYTES - 100, MOST_GUESSED_BYTES)]
    assert [desk.work(body(*known, end)).guess() for end in ends] == [True, False]
