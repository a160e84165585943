import msgspec
import pytest

from sidecar.core import table
from sidecar.policy.errors import PolicyErrors
from sidecar.policy.plan import read_plan
from sidecar.policy.schema import MAX_STEPS, PlanDocument, PlanMargins, PlanStep, Span

FULL = b"""\
baseline: v1
steps:
  - {weight: 0.05, min: 2m, min_samples: 500}
  - {weight: 1, min: 1.5s}
false_alarm: 0.02
margins: {first_token: 1.2, errors: 0}
min_ready: 0
"""
JSON = b"""{"baseline": "v1", "steps": [{"weight": 0.05, "min": "2m", "min_samples": 500},
{"weight": 1, "min": "1.5s"}], "false_alarm": 0.02, "margins": {"first_token": 1.2, "errors": 0}, "min_ready": 0}"""


@pytest.mark.parametrize(("file", "data"), [("plan.yaml", FULL), ("plan.json", JSON)])
def test_a_plan_is_read_from_yaml_and_json_alike(file: str, data: bytes) -> None:
    assert read_plan(file, data) == PlanDocument(
        baseline="v1",
        steps=(
            PlanStep(weight=0.05, min_s=Span(120), min_samples=500),
            PlanStep(weight=1.0, min_s=Span(1.5)),
        ),
        false_alarm=0.02,
        margins=PlanMargins(first_token=1.2, errors=0.0),
        min_ready=0.0,
    )


def test_a_step_may_take_days() -> None:
    plan = read_plan("p", b"{baseline: v1, steps: [{weight: 0.5, min: 2d}]}")
    assert plan.steps[0].min_s == 172_800.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a plan is one document, and here are 0"),
        ("{baseline: v1, steps: [{weight: 1}]}\n---\n{}", "here are 2"),
        ("[]", "p:1: $: expected a mapping"),
        ("{steps: [{weight: 1}]}", "$.baseline: missing"),
        ("{baseline: v1, steps: []}", "p: $.steps: a plan has at least one step"),
        ("{baseline: v1, steps: [{weight: 0}]}", "p:1: $.steps[0].weight: 0 is out of range 0.0001-1"),
        ("{baseline: v1, steps: [{weight: 1.5}]}", "1.5 is out of range 0.0001-1"),
        ("{baseline: v1, steps: [{weight: .nan}]}", ".nan is not a number to work with"),
        ("{baseline: v1, steps: [{weight: 1, min: 30}]}", '30 has no unit: write "30s" or "30m"'),
        ("{baseline: v1, steps: [{weight: 1, min: 8d}]}", '"8d" is not a duration from "1ms" to "7d"'),
        ("{baseline: v1, steps: [{weight: 1, min: }]}", 'expected a duration such as "90s"'),
        ("{baseline: v1, steps: [{weight: 1, min_samples: 0}]}", "0 is out of range 1-10000000"),
        ("{baseline: v1, steps: [{weight: 1}], basline: v2}", "unknown key; did you mean baseline?"),
        ("{baseline: v1, baseline: v2, steps: [{weight: 1}]}", "is here twice"),
        ("{baseline: 'v 1', steps: [{weight: 1}]}", "is not letters and digits"),
        ("{baseline: v1, steps: [{weight: 1}], false_alarm: 0.9}", "0.9 is out of range 1e-06-0.2"),
        ("{baseline: v1, steps: [{weight: 1}], margins: {first_token: 0.9}}", "0.9 is out of range 1-100"),
        ("{baseline: v1, steps: [" + "{weight: 1}," * 21 + "]}", "21 items; at most 20"),
        ("[", "not YAML"),
    ],
)
def test_a_plan_that_means_nothing_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(PolicyErrors) as caught:
        read_plan("p", text.encode())
    assert words in str(caught.value)


def test_every_fault_is_told() -> None:
    with pytest.raises(PolicyErrors) as caught:
        read_plan("p", b"steps: [{weight: 2}, {weight: 3}]\nmargins: {errors: -1}\n")
    assert len(caught.value.errors) == 4


def test_what_a_plan_leaves_out_is_what_a_table_would_have() -> None:
    assert msgspec.to_builtins(PlanMargins()) == msgspec.to_builtins(table.Margins())
    made = table.Plan("v1", ())
    read = PlanDocument(baseline="v1", steps=())
    assert (read.false_alarm, read.min_ready) == (made.false_alarm, made.min_ready)
    assert MAX_STEPS == table.MAX_STEPS
