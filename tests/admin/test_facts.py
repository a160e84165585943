"""The words that pages and scripts see of a process's life."""

from sidecar.admin.facts import Facts, Phase
from tests.admin.facts import StillFacts, snapshot


def test_phases_are_called_as_operators_grep_for_them() -> None:
    assert [phase.value for phase in Phase] == ["starting", "serving", "draining"]


def test_the_tests_own_process_is_one() -> None:
    facts: Facts = StillFacts(snapshot())
    facts.drain()
    assert facts.phase is Phase.DRAINING
