import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.admin.update import TargetDocument, UpdateDocument, encode_update, parse_update, plan_of, update_of
from sidecar.core.revise import Update
from sidecar.core.table import Margins, Plan, Step, Target
from sidecar.policy.schema import PlanDocument, PlanMargins, PlanStep, Span

FULL = UpdateDocument(
    version="v2",
    update_id="release-7",
    expected=12,
    weight=0.15,
    weights={"v1": 0.85, "v2": 0.15},
    engine="vllm",
    endpoints=(TargetDocument(url="http://10.0.0.8:8000", zone="a", node="n1"), TargetDocument(url="unix:///run/e")),
    zone="b",
    schema_hash="ab" * 32,
    compatible=("cd" * 32,),
    signature={"dtype": "bf16"},
    models=("chat-*",),
    plan=PlanDocument(
        baseline="v1",
        steps=(PlanStep(weight=0.15, min_s=Span(90), min_samples=10), PlanStep(weight=1.0, min_s=Span(86400))),
        margins=PlanMargins(errors=0.01),
    ),
    front="openai",
    engine_model="llama",
    chat_template="/templates/llama",
)


def test_what_is_sent_is_what_is_read() -> None:
    assert parse_update("chat", encode_update(FULL), "ann") == update_of("chat", FULL, "ann")
    assert update_of("chat", FULL, "ann") == Update(
        service="chat",
        version="v2",
        update_id="release-7",
        expected=12,
        weight=0.15,
        weights={"v1": 0.85, "v2": 0.15},
        engine="vllm",
        endpoints=(Target("http://10.0.0.8:8000", "a", "n1"), Target("unix:///run/e")),
        zone="b",
        schema_hash="ab" * 32,
        compatible=("cd" * 32,),
        signature={"dtype": "bf16"},
        models=("chat-*",),
        plan=Plan("v1", (Step(1500, 90.0, 10), Step(10_000, 86_400.0, 600)), 0.01, Margins(errors=0.01), 0.5),
        by="ann",
        front="openai",
        engine_model="llama",
        chat_template="/templates/llama",
    )


def test_what_is_not_said_is_not_sent() -> None:
    assert encode_update(UpdateDocument(version="v2")) == b'{"version":"v2"}'
    assert parse_update("chat", b'{"version": "v2"}', "ann") == Update(service="chat", version="v2", by="ann")
    assert parse_update("chat", b'{"version": "v2", "endpoints": []}', "a").endpoints == ()
    usual = UpdateDocument(version="v2", front="", engine_model="", chat_template="")
    assert encode_update(usual) == b'{"version":"v2","front":"","engine_model":"","chat_template":""}'
    assert update_of("chat", usual, "ann").front == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"weight": 0.1}', "missing required field `version`"),
        (b'{"version": "v2", "wieght": 0.1}', "unknown field `wieght`"),
        (b'{"version": "v2", "service": "chat"}', "unknown field `service`"),
        (b'{"version": "v2", "by": "bob"}', "unknown field `by`"),
        (b'{"version": "v2", "weight": NaN}', "malformed"),
        (b'{"version": "v2", "weight": 1e999}', "no update"),
        (b'{"version": "v2", "weight": "0.1"}', "Expected `float | null`, got `str` - at `$.weight`"),
        (b'{"version": "v2", "expected": 1.5}', "at `$.expected`"),
        (b'{"version": "v2", "endpoints": [{"uri": "x"}]}', "at `$.endpoints[0]`"),
        (b'{"version": "v2", "version": "v3"}', '"version" is there twice'),
        (b'{"version": "v2", "plan": {"baseline": "v1", "steps": []}}', "at least one step"),
        (b'{"version": "v2", "plan": {"baseline": "v1", "steps": [{"weight": 0}]}}', "at `$.plan.steps[0].weight`"),
        (
            b'{"version": "v2", "plan": {"baseline": "v1", "steps": [{"weight": 1, "min": 30}]}}',
            "expected a duration such as 90s - at `$.plan.steps[0].min`",
        ),
        (
            b'{"version": "v2", "plan": {"baseline": "v1", "steps": [{"weight": 1, "min": "8d"}]}}',
            '"8d" is not a duration',
        ),
        (b'{"version": "v\xff"}', "UTF-8"),
        (b"[" * 100_000, "no update"),
    ],
)
def test_a_body_that_means_nothing_is_refused_with_its_place(body: bytes, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_update("chat", body, "ann")
    assert words in str(caught.value)


@given(st.binary(max_size=60) | st.from_regex(rb'\{"version": "v2"(, "[a-z]+": [^"]{1,10})?\}', fullmatch=True))
def test_whatever_comes_is_an_update_or_a_refusal(body: bytes) -> None:
    try:
        assert isinstance(parse_update("chat", body, "ann"), Update)
    except ValueError as exc:
        assert str(exc)


def test_a_weight_that_is_one_has_a_part() -> None:
    steps = (PlanStep(weight=0.0001), PlanStep(weight=0.33333))
    assert [step.weight for step in plan_of(PlanDocument(baseline="v1", steps=steps)).steps] == [1, 3333]
