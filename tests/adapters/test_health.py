"""What Triton and MII say of themselves, as recorded and as nobody should say it."""

import json

import pytest

from sidecar.adapters.dialect import Load, Signs
from sidecar.adapters.health import Deepspeed, Triton, TritonOpenai
from tests import captures

TRITON = Triton()


def index(*models: object) -> bytes:
    return json.dumps(models).encode()


INDEXES = {
    "recorded": (captures.body("triton/repo_index.txt"), {"failing", "identity", "toy_llm"}),
    "recorded, ready ones": (captures.body("triton/repo_index_ready.txt"), {"failing", "identity", "toy_llm"}),
    "recorded after a bad load": (
        captures.body("triton/repo_index_after_badload.txt"),
        {"failing", "identity", "toy_llm"},
    ),
    "nothing is loaded": (index({"name": "a"}, {"name": "b"}), set()),
    "an empty repository": (index(), set()),
    "loading and unloading": (
        index({"name": "a", "version": "1", "state": "LOADING"}, {"name": "b", "state": "UNLOADING"}),
        set(),
    ),
    "one version of two": (
        index(
            {"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
            {"name": "a", "version": "2", "state": "READY"},
        ),
        {"a"},
    ),
}


@pytest.mark.parametrize(("body", "expected"), INDEXES.values(), ids=INDEXES.keys())
def test_models_that_are_ready_are_read_off_the_index(body: bytes, expected: set[str]) -> None:
    assert TRITON.read_models(body) == frozenset(expected)


def test_one_version_of_a_model_is_ready_or_not() -> None:
    body = index(
        {"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "a", "version": "2", "state": "READY"},
    )
    assert TRITON.read_models(body, "a/versions/2") == frozenset({"a", "a/versions/2"})
    for other in ("a/versions/1", "a/versions/", "a/versions/3", "b/versions/2", "/versions/2", "a"):
        assert TRITON.read_models(body, other) == frozenset({"a"})


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[1]", b'[{"a":' + b"[" * 100_000, b'[{"state":"READY"}]', b'{"error":"x"}', b'[{"name":"\xff"}]'],
)
def test_what_is_no_index_tells_nothing(body: bytes) -> None:
    assert TRITON.read_models(body) is None


def test_queue_is_read_off_the_recorded_page() -> None:
    page = captures.body("triton/metrics.txt")
    assert TRITON.read_load(page) == Load(0, 0)
    busy = page.replace(
        b'pending_request_count{model="toy_llm",version="1"} 0', b'pending_request_count{model="toy_llm",version="1"} 4'
    )
    assert busy != page
    assert TRITON.read_load(busy) == TritonOpenai().read_load(busy) == Load(0, 4)
    assert TRITON.read_load(b"# no such thing\n") is None


def test_openai_front_lists_its_models() -> None:
    assert TritonOpenai().read_models(b'{"object":"list","data":[{"id":"a"}]}') == frozenset({"a"})
    assert TritonOpenai().read_models(b'{"object":"list","data":[]}') is None


def test_mii_tells_nothing() -> None:
    mii = Deepspeed(b"/healthz")
    assert (mii.alive.path, mii.load, mii.models) == (b"/healthz", None, None)
    assert mii.read_load(b"ok") is None
    assert mii.read_signs(b"ok") == Signs((), False)
    assert mii.read_models(b"ok") is None
