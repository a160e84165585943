import pytest

from sidecar.kernel.count import counted


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 sidecars"), (1, "1 sidecar"), (2, "2 sidecars"), (1000, "1000 sidecars")]
)
def test_one_of_a_thing_has_no_s(count: int, words: str) -> None:
    assert counted(count, "sidecar") == words


def test_a_plural_of_its_own_is_taken() -> None:
    assert counted(1, "summary", "summaries") == "1 summary"
    assert counted(2, "summary", "summaries") == "2 summaries"
