"""The port: what its errors say, and that its numbers fit each other and the machine that they serve."""

from typing import get_args

import pytest

from sidecar.core import breaker
from sidecar.txlog import store
from sidecar.txlog.store import Call, StoreDown, StoreUnfit, Verdict


@pytest.mark.parametrize("error", [StoreDown, StoreUnfit])
def test_an_error_has_a_word_for_metrics_and_a_text_for_people(error: type[StoreDown]) -> None:
    down = error("timeout", "no answer in 0.5 s")
    assert (down.word, str(down)) == ("timeout", "no answer in 0.5 s")
    assert isinstance(down, StoreDown)


def test_the_fleet_probes_as_one_sidecar_does() -> None:
    assert store.MOST_PROBES == breaker.MOST_PROBES
    assert store.PATIENCE_MS == breaker.PATIENCE_S * 1000
    assert store.MAX_DOUBLINGS == breaker.MAX_DOUBLINGS


def test_every_call_says_which_shard_it_is_for() -> None:
    for call in get_args(Call):
        assert {"key", "service", "by"} & set(call.__struct_fields__)


def test_verdicts_are_words_of_one_kind() -> None:
    assert all(verdict.value == verdict.name.lower() for verdict in Verdict)
