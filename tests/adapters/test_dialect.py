"""What holds for every dialect there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters import DIALECTS
from sidecar.adapters.dialect import Dialect
from sidecar.policy.schema import FRONTS

each = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=[" ".join(key) for key in DIALECTS])


def test_every_front_that_a_policy_may_name_has_a_dialect() -> None:
    assert set(DIALECTS) == {(engine, front) for engine, fronts in FRONTS.items() for front in fronts}


@each
def test_pages_are_at_paths_that_a_request_line_can_name(dialect: Dialect) -> None:
    for query in (dialect.alive, dialect.load, dialect.models):
        if query is not None:
            path = query.path
            assert path.startswith(b"/") and path.isascii() and path.decode().isprintable() and b" " not in path
    assert dialect.models_every >= 1


@each
@given(page=st.binary())
def test_a_page_of_anything_is_read_or_is_none(dialect: Dialect, page: bytes) -> None:
    load = dialect.read_load(page)
    assert load is None or (load.running >= 0 and load.waiting >= 0)
    signs = dialect.read_signs(page)
    assert all(number >= 0 for number in signs.mark)
    models = dialect.read_models(page)
    assert models is None or all(isinstance(name, str) for name in models)


@each
@pytest.mark.parametrize("start", [b"[", b'{"a":', b'[{"a":', b'{"data":[{"id":"a","b":'])
def test_a_page_without_end_says_nothing(dialect: Dialect, start: bytes) -> None:
    assert dialect.read_models(start * 100_000) is None
    assert dialect.read_models(start + b"[" * 100_000) is None


@each
def test_an_empty_page_says_nothing(dialect: Dialect) -> None:
    assert dialect.read_load(b"") is None
    assert dialect.read_models(b"") is None
