"""What is reserved for an answer of unknown length: the P95 of those that ended."""

import random

import pytest

from sidecar.core.quotas.answer_lengths import FIRST, HALVE_AT, LEAST, MODELS, AnswerLengths


def test_nothing_is_believed_before_enough_were_seen() -> None:
    lengths = AnswerLengths()
    assert lengths.usual("chat", "m") == FIRST
    for _ in range(LEAST - 1):
        lengths.heard("chat", "m", 10)
    assert lengths.usual("chat", "m") == FIRST
    lengths.heard("chat", "m", 10)
    assert lengths.usual("chat", "m") == pytest.approx(10, rel=0.1)
    assert lengths.usual("chat", "other") == FIRST
    assert lengths.usual("other", "m") == FIRST


@pytest.mark.parametrize("mean", [20, 200, 4000])
def test_the_usual_length_is_exceeded_by_one_of_twenty(mean: int) -> None:
    chance = random.Random(mean)
    lengths = AnswerLengths()
    drawn = [max(1, int(chance.expovariate(1 / mean))) for _ in range(1000)]
    for tokens in drawn:
        lengths.heard("chat", "m", tokens)
    usual = lengths.usual("chat", "m")
    assert 0.02 <= sum(tokens > usual for tokens in drawn) / 1000 <= 0.07


def test_a_model_that_changes_its_habits_is_learnt_anew() -> None:
    lengths = AnswerLengths()
    for _ in range(5000):
        lengths.heard("chat", "m", 1000)
    for _ in range(8 * HALVE_AT):
        lengths.heard("chat", "m", 50)
    assert lengths.usual("chat", "m") == pytest.approx(50, rel=0.1)


def test_lengths_of_zero_and_without_bound_are_taken() -> None:
    lengths = AnswerLengths()
    for tokens in (0, 1, 1 << 40) * LEAST:
        lengths.heard("chat", "m", tokens)
    assert lengths.usual("chat", "m") >= 1


def test_models_that_clients_made_up_are_forgotten() -> None:
    lengths = AnswerLengths()
    for number in range(2 * MODELS):
        for _ in range(LEAST):
            lengths.heard("chat", f"m{number}", 10)
    assert lengths.usual("chat", "m0") == FIRST
    assert lengths.usual("chat", f"m{2 * MODELS - 1}") != FIRST


def test_a_name_as_long_as_a_body_is_not_kept() -> None:
    lengths = AnswerLengths()
    lengths.heard("chat", "m" * 1_000_000, 10)
    (name,) = lengths._by_model
    assert len(name) < 300
