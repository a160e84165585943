"""What holds for every dialect there is."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters import DIALECTS
from sidecar.adapters.dialect import Dialect
from sidecar.policy.schema import Engine

each = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())


def test_dialects_are_of_engines_that_policies_may_name() -> None:
    assert set(DIALECTS) <= set(get_args(Engine))


@each
def test_pages_are_at_paths_that_a_request_line_can_name(dialect: Dialect) -> None:
    for path in (dialect.load_path, dialect.models_path):
        assert path.startswith(b"/") and path.isascii() and path.decode().isprintable() and b" " not in path


@each
@given(page=st.binary())
def test_a_page_of_anything_is_read_or_is_none(dialect: Dialect, page: bytes) -> None:
    load = dialect.read_load(page)
    assert load is None or (load.running >= 0 and load.waiting >= 0)
    models = dialect.read_models(page)
    assert models is None or models


@each
def test_an_empty_page_says_nothing(dialect: Dialect) -> None:
    assert dialect.read_load(b"") is None
    assert dialect.read_models(b"") is None
