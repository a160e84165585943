"""Estimates: near before anything is learnt, nearer after, whatever engines say."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tokens.estimate import ENOUGH, FEATURES, FEW, PRIOR, SAMPLE_BYTES, SCRIPTS, WIDTH, Estimator, look
from sidecar.tokens.texts import MEDIA_TOKENS

ROOT = Path(__file__).parents[2]
ENGLISH = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "adr").glob("*.md")))
CODE = (ROOT / "sidecar" / "proxy" / "pipeline.py").read_text(encoding="utf-8")
CHINESE = "今天天气很好\uff0c我们去公园里散步\u3002他说这本书写得不错\uff0c值得再读一遍\u3002" * 400


def chat(text: str, ascii_only: bool = False) -> bytes:
    return json.dumps([{"role": "user", "content": text}], ensure_ascii=ascii_only).encode()


def cuts(text: str, count: int, seed: int = 1) -> Iterator[str]:
    chance = random.Random(seed)
    for _ in range(count):
        size = chance.randrange(200, 8000)
        begin = chance.randrange(max(1, len(text) - size))
        yield text[begin : begin + size]


def words(text: str) -> int:
    """A tokenizer of a kind: a token for five letters of a word, for a mark, for a Chinese character."""
    total = 10
    for word in text.split(" "):
        letters = sum(letter.isascii() and letter.isalnum() for letter in word)
        total += (letters + 4) // 5 + sum(not letter.isascii() or letter in "().,:_=" for letter in word)
    return total


def error(estimator: Estimator, text: str, count: Callable[[str], int] = words) -> float:
    """The median of the relative errors of cuts that it did not learn from."""
    errors = sorted(abs(estimator.estimate(chat(cut)) / count(cut) - 1) for cut in cuts(text, 40, seed=9))
    return errors[len(errors) // 2]


def taught(*texts: str, count: Callable[[str], int] = words, prompts: int = 120) -> Estimator:
    estimator = Estimator()
    for several in zip(*(cuts(text, prompts) for text in texts), strict=True):
        for cut in several:
            estimator.learn(chat(cut), count(cut))
    return estimator


def test_there_is_a_weight_for_each_feature() -> None:
    assert len(PRIOR) == WIDTH == len(FEATURES) + 1


MARK = r"[!-/:-@\[\]-`{-~]"
CONSONANT = "[b-df-hj-np-tv-zB-DF-HJ-NP-TV-Z]"
PATTERNS = {
    "continuation bytes": r"[\x80-\xbf]",
    "mark after a space": f" {MARK}",
    "digits": "[0-9]",
    "backslashes": r"\\",
    "capitals": "[A-Z]",
    "word after a space": " [A-Za-z]",
    "marks": MARK,
    "letter after an escape": r"\\(?s:.)[A-Za-z]",
    "five consonants": CONSONANT * 5,
    "space after an escape": r"\\(?s:.) ",
    "escape after a mark": rf"{MARK}\\",
    "four marks": MARK * 4,
    "two digits": "[0-9][0-9]",
    "rare letters": "[jkqvwxyzbgJKQVWXYZBG]",
    "leading bytes EE and EF": r"[\xee\xef]",
    "letter after a mark": f"{MARK}[A-Za-z]",
    "leading bytes E4 to E9": r"[\xe4-\xe9]",
    "mark after an escape": rf"\\(?s:.){MARK}",
    "two marks": MARK * 2,
    "two spaces": "  ",
    "small letters": "[a-z]",
    "four spaces": "    ",
    "mark after a backslash": rf"\\{MARK}",
    "leading bytes E0 to E3": r"[\xe0-\xe3]",
}


@given(
    st.lists(st.sampled_from([b"word ", b"STRNGTH", b'\\n    "a"', b"....", b" 2026", b"\\\\", b"\\t."]), max_size=40)
    .map(b"".join)
    .flatmap(lambda text: st.binary(max_size=9).map(lambda more: text + more))
    .filter(lambda text: b"\\u" not in text)
)
def test_each_feature_is_counted_wherever_it_begins(text: bytes) -> None:
    assert tuple(PATTERNS) == FEATURES
    counted = dict(zip(FEATURES, look(text).counts[1:], strict=True))
    assert counted == {name: len(re.findall(f"(?={each})".encode("latin-1"), text)) for name, each in PATTERNS.items()}


@pytest.mark.parametrize(
    "text", ["x" * 90_000, "7" * 90_000, "\U0001f600" * 20_000], ids=["a letter", "a digit", "emoji"]
)
def test_no_text_has_more_tokens_than_bytes(text: str) -> None:
    prompt = chat(text)
    assert Estimator().estimate(prompt) <= len(prompt) + PRIOR[0]


@pytest.mark.parametrize(
    ("text", "least", "most"), [(ENGLISH, 3.0, 5.5), (CODE, 2.5, 5.0), (CHINESE, 3.0, 6.0)], ids=["en", "code", "zh"]
)
def test_before_it_learnt_anything_it_is_as_tokenizers_of_today_are(text: str, least: float, most: float) -> None:
    prompt = chat(text[:20_000])
    assert least < len(prompt) / Estimator().estimate(prompt) < most


@pytest.mark.parametrize(
    ("text", "script"), [(ENGLISH, "latin"), (CODE, "code"), (CHINESE, "cjk"), ("Ж" * 300, "other")]
)
def test_scripts_are_told_apart(text: str, script: str) -> None:
    assert SCRIPTS[look(chat(text[:6000])).script] == script


def test_what_it_learnt_of_each_script_it_knows() -> None:
    estimator = taught(ENGLISH, CODE, CHINESE)
    assert [error(estimator, text) < 0.04 for text in (ENGLISH, CODE, CHINESE)] == [True] * 3
    assert estimator.error_ratio < 0.05 and estimator.errors == 360


def test_a_prompt_of_escapes_is_estimated_as_the_same_without() -> None:
    for text in (CHINESE, ENGLISH):
        plain, escaped = (Estimator().estimate(chat(text, ascii_only)) for ascii_only in (False, True))
        assert abs(escaped / plain - 1) < 0.08


def test_any_size_is_looked_at_alike() -> None:
    estimator = taught(ENGLISH)
    per_byte = [estimator.estimate(prompt) / len(prompt) for prompt in (chat(ENGLISH[:20_000]), chat(ENGLISH * 8))]
    assert abs(per_byte[0] / per_byte[1] - 1) < 0.08
    assert len(chat(ENGLISH)) > 4 * SAMPLE_BYTES


@pytest.mark.parametrize("told", [0, -1, 10**9, 1], ids=["none", "less than none", "too many", "one"])
def test_what_no_tokenizer_gives_is_not_learnt(told: int) -> None:
    estimator = Estimator()
    for _ in range(50):
        estimator.learn(chat(ENGLISH[:9000]), told)
    assert estimator.learnt == 0 and estimator.nonsense == 50


def test_an_engine_that_says_anything_is_not_believed() -> None:
    chance = random.Random(4)
    liar = taught(ENGLISH, count=lambda text: chance.randrange(1, len(text)), prompts=300)
    usual = Estimator()
    for cut in cuts(ENGLISH, 20, seed=3):
        assert abs(liar.estimate(chat(cut)) / usual.estimate(chat(cut)) - 1) < 0.01
    assert liar.error_ratio > 0.3


def test_a_few_lies_among_many_reports_do_little() -> None:
    chance = random.Random(4)
    estimator = taught(
        ENGLISH, count=lambda text: words(text) if chance.random() > 0.05 else len(text) // 2, prompts=400
    )
    assert error(estimator, ENGLISH) < 0.06


def test_another_model_is_learnt_anew() -> None:
    estimator = taught(ENGLISH, prompts=200)
    for cut in cuts(ENGLISH, 200, seed=5):
        estimator.learn(chat(cut), 2 * words(cut))
    assert error(estimator, ENGLISH, lambda text: 2 * words(text)) < 0.06


def test_whatever_was_learnt_an_estimate_is_bounded() -> None:
    estimator = taught(ENGLISH, count=lambda text: len(text), prompts=200)
    prompt = chat(CODE[:9000])
    usual = Estimator().estimate(prompt)
    assert usual / 3.1 <= estimator.estimate(prompt) <= 3.1 * usual + 100


def test_a_script_of_which_little_was_seen_is_estimated_by_the_models_weights() -> None:
    estimator = taught(ENGLISH, prompts=ENOUGH * 2)
    for cut in cuts(CODE, FEW):
        estimator.learn(chat(cut), words(cut))
    assert error(estimator, CODE) < error(Estimator(), CODE)


@pytest.mark.parametrize("spaces", [True, False], ids=["Python's JSON", "others'"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "Qk3mAB01zXy9" * 40_000, "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "Qk3mAB01zXy9" * 8000}},
    ],
    ids=["sound", "a picture of Messages"],
)
def test_what_is_no_text_counts_as_one_takes_wherever_it_stands(part: dict[str, object], spaces: bool) -> None:
    content = [part, {"type": "text", "text": "What is it?"}, part]
    separators = None if spaces else (",", ":")
    prompt = json.dumps([{"role": "user", "content": content}], separators=separators).encode()
    assert 2 * MEDIA_TOKENS < Estimator().estimate(prompt) < 2 * MEDIA_TOKENS + 150


def test_a_picture_counts_as_what_one_takes() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "Qk3mAB01zXy9" * 8000}}
    prompt = json.dumps([{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]).encode()
    estimator = Estimator()
    assert MEDIA_TOKENS < estimator.estimate(prompt) < MEDIA_TOKENS + 100
    estimator.learn(prompt, 5000)
    assert estimator.learnt == 0


@given(st.binary(max_size=300), st.integers(1, 60), st.integers(-3, 10**6))
def test_any_bytes_have_an_estimate(data: bytes, times: int, told: int) -> None:
    estimator = Estimator()
    prompt = data * times
    for _ in range(10):
        estimator.learn(prompt, told)
    assert 1 <= estimator.estimate(prompt) <= 4 * len(prompt) + 5000
