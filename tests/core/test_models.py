"""Which service has a model: the table against asking every service in turn."""

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.models import MAX_TEXT, ModelTable, matches

WORDS = ["m", "mm", "mn", "m-1", "m-2", "n", ""]
GLOBS = [*WORDS[:-1], "*", "m*", "*1", "m-?", "m-[12]", "?", "[mn]", "m[", "m-*", "*m*"]


def asked_in_turn(entries: list[tuple[str, ...]], model: str) -> int | None:
    exact = next((number for number, globs in enumerate(entries) if model in globs), None)
    if exact is not None:
        return exact
    return next((number for number, globs in enumerate(entries) if matches(globs, model)), None)


@given(st.lists(st.lists(st.sampled_from(GLOBS), max_size=3).map(tuple), max_size=6), st.text("mn-12[*", max_size=4))
def test_it_finds_whom_asking_in_turn_finds(entries: list[tuple[str, ...]], model: str) -> None:
    table = ModelTable((globs, number) for number, globs in enumerate(entries))
    for name in (model, *WORDS):
        assert table.find(name) == asked_in_turn(entries, name)


def test_a_name_beyond_reason_fits_what_all_fit() -> None:
    name = "m" * (MAX_TEXT + 1)
    assert matches(("m*",), name[:-1]) and not matches(("m*",), name)
    assert matches(("*",), name) and matches((name,), name)
