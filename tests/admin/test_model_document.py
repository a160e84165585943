"""Model updates as JSON."""

import pytest

from sidecar.admin.model_document import CanaryDocument, ModelDocument, encode_wanted, parse_wanted
from sidecar.core.hot_plan import Wanted
from sidecar.core.hot_update import Canary
from sidecar.core.table import PARTS, Plan, Step
from sidecar.policy.schema import PlanDocument, PlanStep, Span


def test_a_document_is_read_as_it_was_written() -> None:
    document = ModelDocument(
        model="m",
        action="load",
        kind="version",
        service="chat",
        endpoints=("http://n:80",),
        version="v2",
        engine="triton",
        plan=PlanDocument(baseline="v1", steps=(PlanStep(weight=1.0, min_s=Span(90), min_samples=7),)),
        leaving="unload",
        rest=False,
        canary=CanaryDocument(expect="Paris"),
        deadlines={"load": Span(600), "drain": Span(90)},
    )
    assert parse_wanted(encode_wanted(document), "ann") == Wanted(
        model="m",
        action="load",
        kind="version",
        service="chat",
        endpoints=("http://n:80",),
        version="v2",
        engine="triton",
        plan=Plan("v1", (Step(PARTS, 90.0, 7),)),
        leaving="unload",
        rest=False,
        canary=Canary(max_tokens=16, expect="Paris"),
        deadlines={"load": 600.0, "drain": 90.0},
        by="ann",
    )


def test_what_is_left_out_is_as_usual() -> None:
    wanted = parse_wanted(b'{"model":"m","action":"unload","kind":"repository"}', "")
    assert wanted == Wanted(model="m", action="unload", kind="repository")
    said = parse_wanted(b'{"model":"m","action":"load","kind":"sleep","canary":{"prompt":"2+2=","max_tokens":3}}', "")
    assert said.canary == Canary("2+2=", 3)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no model update"),
        (b'{"model":"m"}', "missing required field `action`"),
        (b'{"model":"m","action":"reload","kind":"repository"}', "$.action"),
        (b'{"model":"m","action":"load","kind":"magic"}', "$.kind"),
        (b'{"model":"m","action":"load","kind":"repository","x":1}', "unknown field `x`"),
        (b'{"model":"m","model":"n","action":"load","kind":"repository"}', '"model" is there twice'),
        (b'{"model":"m","action":"load","kind":"repository","deadlines":{"load":9}}', "$.deadlines"),
        (b'{"model":"m","action":"load","kind":"repository","deadlines":{"load":"9"}}', "is not a duration"),
        (b'{"model":"m","action":"load","kind":"version","plan":{"baseline":"v1","steps":[]}}', "at least one step"),
    ],
)
def test_what_is_none_is_told_where(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse_wanted(body, "")
    assert words in str(raised.value)
