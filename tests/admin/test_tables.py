import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.admin.tables import rollout_line, table_line, update_page
from sidecar.admin.views import encode
from sidecar.core.canary import Trial
from sidecar.core.desk import TableView
from sidecar.core.table import Decay, Table, Version
from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import Endpoint
from tests.admin.facts import CHAT, PLAN, A, B, StillFacts, breaker, rollout, service, snapshot, table, table_view

AT = "2023-11-14T22:13:20.000Z"


def test_a_table_is_shown_with_what_is_known_here_of_its_endpoints() -> None:
    facts = StillFacts(snapshot(service(A, Endpoint(url=f"http://{B}", version="v2"))))
    breaker(facts, B).force("open", 1000.0, "test")
    stood = Table(
        CHAT,
        (
            Version("v1", 9999),
            Version("v2", 1, "triton", (), "ab", ("cd",), {"dtype": "bf16"}, engine_model="m", chat_template="/t"),
            Version("v3", 0, "deepspeed", front="gateway"),
        ),
        zones={"z1": Decay(0.1, 1_700_000_000_000_000, "p90 1.2 s")},
    )
    line = table_line(facts, table_view(stood, 77))
    assert (line.version, line.at, line.by, line.why, line.evidence) == (
        77,
        AT,
        "ann at pod-0",
        "update",
        "v2 has 0.05",
    )
    assert [(each.name, each.weight, each.endpoints, each.usable) for each in line.versions] == [
        ("v1", 0.9999, 1, 1),
        ("v2", 0.0001, 1, 0),
        ("v3", 0.0, 0, 0),
    ]
    second = line.versions[1]
    assert (second.engine, second.schema_hash, second.compatible, second.signature) == (
        "triton",
        "ab",
        ("cd",),
        {"dtype": "bf16"},
    )
    assert [(each.front, each.engine_model, each.chat_template) for each in line.versions] == [
        ("", "", ""),
        ("", "m", "/t"),
        ("gateway", "", ""),
    ]
    assert [msgspec.to_builtins(zone) for zone in line.zones] == [
        {"zone": "z1", "share": 0.1, "since": AT, "why": "p90 1.2 s"}
    ]
    assert line.rollout is None


def test_a_table_of_a_service_that_is_not_made_here_has_no_endpoints() -> None:
    line = table_line(StillFacts(snapshot()), table_view(table("other")))
    assert [(each.endpoints, each.usable) for each in line.versions] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("phase", "step", "number", "live"),
    [("running", 0, 1, True), ("held", 1, 2, True), ("promoted", 2, 2, False), ("failed", 0, 1, False)],
)
def test_a_rollout_is_shown_with_its_step_among_its_steps(phase: str, step: int, number: int, live: bool) -> None:
    line = rollout_line(StillFacts(snapshot()), table(CHAT, rollout(phase, step, why="step", evidence="e")), 5)
    assert line is not None
    assert (line.service, line.table_version, line.version, line.baseline) == (CHAT, 5, "v2", "v1")
    assert (line.phase, line.live, line.step, line.weight) == (phase, live, number, 0.05)
    assert [(each.weight, each.min_s, each.min_samples) for each in line.steps] == [
        (0.05, 60.0, 100),
        (0.5, 600.0, 1000),
    ]
    assert (line.since, line.why, line.evidence, line.by) == (AT, "step", "e", "ann at pod-0")


def test_an_update_is_answered_with_what_it_made() -> None:
    facts = StillFacts(snapshot())
    page = update_page(facts, table(CHAT, rollout()), 6, True)
    assert (page.service, page.version, page.repeated, page.weights) == (CHAT, 6, True, {"v1": 0.95, "v2": 0.05})
    assert page.rollout is not None and update_page(facts, table(), 6, False).rollout is None


def test_what_the_analysis_would_say_is_told_while_it_judges_this_very_step() -> None:
    facts = StillFacts(snapshot(service(A)))
    stood = table(CHAT, rollout())
    trial = Trial("r1", 0, "v2", "v1", PLAN)
    facts.fleet.services[ServiceName(CHAT)].trial = trial
    line = rollout_line(facts, stood, 5)
    assert line is not None and line.verdict is not None
    assert (line.verdict.word, line.verdict.canary, line.verdict.baseline) == ("unclear", 0, 0)
    assert line.verdict.evidence == trial.verdict().evidence
    for other in (rollout(step=1), rollout(id="r2"), rollout("failed")):
        told = rollout_line(facts, table(CHAT, other), 5)
        assert told is not None and told.verdict is None


HOSTILE = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.text(max_size=9), HOSTILE, HOSTILE, st.floats(), st.sampled_from(["running", "failed"]))
def test_whatever_a_record_says_can_be_shown(name: str, since_us: int, step: int, share: float, phase: str) -> None:
    zones = {name: Decay(share, since_us, name)}
    made = rollout(phase, step, since_us=since_us, why=name, version=name)
    stood = Table(CHAT, (Version(name, 10_000),), zones=zones, rollout=made)
    line = table_line(StillFacts(snapshot(service(A))), TableView(stood, since_us, since_us, name, name))
    assert line.rollout is not None and line.rollout.version == name
    assert msgspec.json.decode(encode(line))
