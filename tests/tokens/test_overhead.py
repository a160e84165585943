"""What a template adds is learnt from reports, and nonsense is not."""

import random

from sidecar.tokens.overhead import ENOUGH, KEPT, PER_MESSAGE, PER_REQUEST, Overhead


def taught(per_message: int, per_request: int, prompts: int = KEPT, lies: int = 0) -> Overhead:
    chance = random.Random(3)
    overhead = Overhead()
    for number in range(prompts):
        messages = chance.randrange(1, 12)
        texts = chance.randrange(10, 3000)
        told = texts + messages * per_message + per_request
        if number < lies:
            told = chance.randrange(1, 5000)
        overhead.learn(texts, messages, told)
    return overhead


def test_before_anything_is_learnt_it_is_that_of_chatml() -> None:
    assert Overhead().of(2) == round(2 * PER_MESSAGE + PER_REQUEST)
    assert Overhead().of(0) == 0


def test_what_each_message_and_each_request_takes_is_told_apart() -> None:
    for per_message, per_request in ((5, 3), (0, 0), (4, 12), (9, 1000)):
        overhead = taught(per_message, per_request)
        assert overhead.of(7) == 7 * per_message + per_request
        assert not overhead.disagrees


def test_a_few_lies_change_nothing() -> None:
    assert taught(5, 3, lies=KEPT // 4).of(7) == 38


def test_an_engine_that_always_lies_is_not_believed() -> None:
    overhead = taught(5, 3, lies=KEPT)
    assert overhead.disagrees and overhead.of(3) == round(3 * PER_MESSAGE + PER_REQUEST)


def test_prompts_of_one_length_teach_the_sum() -> None:
    overhead = Overhead()
    for _ in range(ENOUGH):
        overhead.learn(100, 2, 130)
    assert overhead.of(2) == 30


def test_another_template_is_learnt_anew() -> None:
    overhead = taught(5, 3)
    for number in range(3 * KEPT):
        overhead.learn(50, 1 + number % 5, 50 + 8 * (1 + number % 5) + 20)
    assert overhead.of(4) == 52
