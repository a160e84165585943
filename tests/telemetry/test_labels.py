"""Labels stay few: what clients send can neither multiply series nor push real models out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.telemetry.labels import MAX_LENGTH, MAX_MODELS, MAX_UNPROVEN, OTHER, ModelNames, status_word


def test_model_that_answered_has_its_own_label() -> None:
    names = ModelNames()
    assert names.label("llama", True) == "llama"
    assert names.label("llama", False) == "llama"


def test_request_without_model_is_no_unknown_model() -> None:
    assert ModelNames().label("", False) == ""


def test_made_up_names_hide_no_real_model() -> None:
    names = ModelNames()
    labels = {names.label(f"made-up-{number}", False) for number in range(10_000)}
    assert len(labels) == MAX_UNPROVEN + 1
    assert OTHER in labels
    assert names.label("llama", True) == "llama"


def test_failing_model_is_seen_before_its_first_success() -> None:
    assert ModelNames().label("broken", False) == "broken"


def test_name_that_succeeds_gives_its_unproven_place_back() -> None:
    names = ModelNames()
    for number in range(MAX_UNPROVEN):
        names.label(f"m{number}", False)
    assert names.label("one more", False) == OTHER
    names.label("m0", True)
    assert names.label("one more", False) == "one more"


def test_labels_are_bounded_even_if_everything_succeeds() -> None:
    names = ModelNames()
    labels = {names.label(f"m{number}", True) for number in range(10_000)}
    assert len(labels) <= MAX_MODELS + MAX_UNPROVEN + 1
    assert names.label("m0", True) == "m0"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("x" * (MAX_LENGTH + 1), id="too long"),
        pytest.param("a\nb", id="line feed"),
        pytest.param("\x1b[31m", id="escape"),
        pytest.param("\ud800", id="lone surrogate"),
        pytest.param("a\u202eb", id="direction override"),
    ],
)
@pytest.mark.parametrize("succeeded", [True, False], ids=["succeeded", "failed"])
def test_name_that_no_label_can_hold_is_other(name: str, succeeded: bool) -> None:
    assert ModelNames().label(name, succeeded) == OTHER


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=MAX_LENGTH))
def test_printable_name_is_kept_as_it_is(name: str) -> None:
    assert ModelNames().label(name, True) == name


@pytest.mark.parametrize(
    ("status", "word"),
    [
        pytest.param(200, "200", id="known"),
        pytest.param(429, "429", id="too many requests"),
        pytest.param(499, "499", id="client left"),
        pytest.param(529, "529", id="overloaded"),
        pytest.param(0, "0", id="no head"),
        pytest.param(299, "2xx", id="unknown, of a class"),
        pytest.param(599, "5xx", id="last of the classes"),
        pytest.param(600, OTHER, id="above"),
        pytest.param(99, OTHER, id="below"),
        pytest.param(-1, OTHER, id="negative"),
    ],
)
def test_status_word(status: int, word: str) -> None:
    assert status_word(status) == word


def test_status_words_are_few() -> None:
    assert len({status_word(status) for status in range(-10, 2000)}) < 80
