import math
from typing import Any

import pytest

from sidecar.control import convert
from sidecar.control.convert import Unusable, message_of, update_of
from sidecar.control.pb import control_pb2 as pb
from sidecar.control.writers import Caller
from sidecar.core.desk import Notice, TableView
from sidecar.core.revise import Accepted, Code, Refused, Update
from sidecar.core.table import Decay, Margins, Plan, Rollout, Step, Table, Target, Version

WHO = Caller("127.0.0.1")
HASH = "ab" * 32


def read(**fields: Any) -> Update:
    """The update of a message, over the wire."""
    message = pb.DescriptorUpdate(**{"service_name": "chat", "version": "v2", **fields})
    return update_of(message_of(message.SerializeToString()), WHO)


def test_what_is_not_said_is_not_made_up() -> None:
    assert read() == Update(service="chat", version="v2", by="stream@127.0.0.1")


def test_everything_that_can_be_said_arrives() -> None:
    assert read(
        canary_weight=0.15,
        schema_hash=f"sha256:{HASH.upper()}",
        compatible_schema_hashes=["0" * 64],
        engine="triton",
        endpoints=[pb.Endpoint(url="http://a:1", zone="az", node="n"), pb.Endpoint(url="http://b:1")],
        zone="az-2",
        signature={"b": "2", "a": "1"},
        update_id="u-1",
        expected_table_version=2**40,
        models=["chat-*"],
        by="argo",
    ) == Update(
        service="chat",
        version="v2",
        weight=0.15,
        schema_hash=HASH,
        compatible=("0" * 64,),
        engine="triton",
        endpoints=(Target("http://a:1", "az", "n"), Target("http://b:1")),
        zone="az-2",
        signature={"a": "1", "b": "2"},
        update_id="u-1",
        expected=2**40,
        models=("chat-*",),
        by="stream@127.0.0.1 (argo)",
    )


def test_how_endpoints_are_spoken_to_arrives_where_it_is_said() -> None:
    said = read(front="gateway", engine_model="llama", chat_template="/templates/llama")
    assert (said.front, said.engine_model, said.chat_template) == ("gateway", "llama", "/templates/llama")
    usual = read(front="", engine_model="", chat_template="")
    assert (usual.front, usual.engine_model, usual.chat_template) == ("", "", "")
    kept = read(engine="deepspeed")
    assert (kept.front, kept.engine_model, kept.chat_template) == (None, None, None)


def test_a_weight_of_nothing_is_said() -> None:
    assert read(canary_weight=0.0).weight == 0.0
    assert math.copysign(1, read(canary_weight=-0.0).weight or 0.0) == 1


def test_the_whole_split() -> None:
    assert read(weights={"v2": 0.25, "v1": 0.75}).weights == {"v1": 0.75, "v2": 0.25}


def test_no_endpoints_are_none_said_unless_they_are_cleared() -> None:
    assert read(endpoints=[]).endpoints is None
    assert read(clear_endpoints=True).endpoints == ()


def test_a_plan_has_defaults_for_what_it_does_not_say() -> None:
    plan = read(
        plan=pb.CanaryPlan(baseline="v1", steps=[pb.CanaryPlan.Step(weight=0.05, min_s=60, min_samples=200)])
    ).plan
    assert plan == Plan("v1", (Step(500, 60.0, 200),))


def test_a_plan_that_says_all() -> None:
    message = pb.CanaryPlan(
        baseline="v1",
        steps=[pb.CanaryPlan.Step(weight=0.00014, min_s=0, min_samples=1), pb.CanaryPlan.Step(weight=1)],
        false_alarm=0.05,
        min_ready=0,
        margins=pb.Margins(success=0, first_token=1, token_gap=2, errors=0.1, length=3, finish=1),
    )
    steps = (Step(1, 0.0, 1), Step(10_000, 300.0, 600))
    assert read(plan=message).plan == Plan("v1", steps, 0.05, Margins(0.0, 1.0, 2.0, 0.1, 3.0, 1.0), 0.0)


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"canary_weight": value}, "canary_weight is") for value in (math.nan, math.inf, -math.inf, -1, 1.5, -1e-9)),
    *(({"weights": {"v1": value}}, r"weights\[v1\] is") for value in (math.nan, math.inf, -1, 1.5)),
    ({"weights": {"v\n1": 2.0}}, r"weights\[v\?1\] is 2"),
    ({"canary_weight": 0.5, "weights": {"v1": 0.5}}, "say the same thing twice"),
    ({"service_name": ""}, "service_name is missing"),
    ({"clear_endpoints": True, "endpoints": [pb.Endpoint(url="http://a:1")]}, "contradict each other"),
    *(({"schema_hash": text}, "schema_hash is to be a SHA-256") for text in ("x", HASH[1:], HASH + "0", "g" * 64)),
    ({"schema_hash": "md5:" + HASH}, "schema_hash is to be"),
    ({"compatible_schema_hashes": ["no"]}, "compatible_schema_hashes is to be"),
]
BAD_PLANS: list[tuple[dict[str, Any], str]] = [
    *(({"steps": [pb.CanaryPlan.Step(weight=w)]}, r"plan.steps\[0\].weight is") for w in (math.nan, -1, 1.5, 0.00001)),
    *(({"steps": [pb.CanaryPlan.Step(min_s=s)]}, r"plan.steps\[0\].min_s is") for s in (math.nan, math.inf, -1)),
    ({"false_alarm": math.nan}, "plan.false_alarm is nan"),
    ({"min_ready": 2}, "plan.min_ready is 2"),
    *(({"margins": pb.Margins(**{f: math.nan})}, f"margins.{f} is nan") for f in ("success", "errors", "finish")),
    *(({"margins": pb.Margins(**{f: 0.9})}, f"margins.{f} is 0.9") for f in ("first_token", "token_gap", "length")),
    ({"margins": pb.Margins(length=math.inf)}, "margins.length is inf"),
]


@pytest.mark.parametrize(
    ("fields", "words"), [*BAD, *(({"plan": pb.CanaryPlan(**f)}, words) for f, words in BAD_PLANS)]
)
def test_what_makes_no_update_says_why(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Unusable, match=words):
        read(**fields)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"], ids=["tag", "cut", "not UTF-8"])
def test_bytes_that_are_no_message_are_told(data: bytes) -> None:
    with pytest.raises(Unusable, match="cannot be decoded"):
        message_of(data)


# --- what is sent -----------------------------------------------------------------------------------------------------

ROLLOUT = Rollout("r-1", "v2", Plan("v1", (Step(500, 60.0, 200),)), 0, "held", 7, "why", "seen", "me")
TABLE = Table(
    "chat",
    (
        Version(
            "v1", 9_999, "vllm", (Target("http://a:1", "az", "n"), Target("http://b:1")), HASH, ("0" * 64,), {"a": "1"}
        ),
        Version("v2", 1, "deepspeed", front="gateway", engine_model="llama", chat_template="/templates/llama"),
    ),
    models=("chat-*",),
    zones={"az": Decay(0.1, 5, "slow")},
    rollout=ROLLOUT,
)


def told(data: bytes) -> pb.DescriptorEvent:
    return pb.DescriptorEvent.FromString(data)


def test_a_table_is_told_whole() -> None:
    said = told(convert.Encoder().event(TableView(TABLE, 3, 42, "me", "update", "asked"))).table
    assert (said.service_name, said.table_version, said.at_us, [*said.models]) == ("chat", 3, 42, ["chat-*"])
    assert (said.by, said.why, said.evidence) == ("me", "update", "asked")
    one, two = said.versions
    assert (one.name, one.weight, one.engine, one.schema_hash) == ("v1", 0.9999, "vllm", HASH)
    assert ([*one.compatible_schema_hashes], dict(one.signature)) == (["0" * 64], {"a": "1"})
    assert list(one.endpoints) == [pb.Endpoint(url="http://a:1", zone="az", node="n"), pb.Endpoint(url="http://b:1")]
    assert (two.name, two.weight, two.engine, list(two.endpoints)) == ("v2", 0.0001, "deepspeed", [])
    assert (two.front, two.engine_model, two.chat_template) == ("gateway", "llama", "/templates/llama")
    assert (one.front, one.engine_model, one.chat_template) == ("", "", "")
    assert said.zones["az"] == pb.ZoneDecay(share=0.1, since_us=5, why="slow")
    rollout = said.rollout
    assert (rollout.id, rollout.version, rollout.step, rollout.since_us) == ("r-1", "v2", 0, 7)
    assert (rollout.phase, rollout.why, rollout.evidence, rollout.by) == (pb.Rollout.HELD, "why", "seen", "me")
    assert rollout.plan.steps[0] == pb.CanaryPlan.Step(weight=0.05, min_s=60, min_samples=200)
    assert rollout.plan.margins.first_token == 1.1


def test_a_table_without_a_rollout_says_none() -> None:
    said = told(convert.Encoder().event(TableView(Table("chat"), 1, 0, "", ""))).table
    assert not said.HasField("rollout") and not said.versions


def test_a_plan_comes_back_as_it_went() -> None:
    said = told(convert.Encoder().event(TableView(TABLE, 3, 42, "me", "update"))).table
    assert read(plan=said.rollout.plan).plan == ROLLOUT.plan


def test_every_phase_and_every_code_has_its_word() -> None:
    for phase, word in convert.PHASES.items():
        assert pb.Rollout.Phase.Name(word) == phase.upper()
    assert len(convert.PHASES) == len(pb.Rollout.Phase.keys()) - 1
    for code, number in convert.CODES.items():
        assert pb.Nack.Code.Name(number) == code.upper()
    assert len(convert.CODES) == len(pb.Nack.Code.keys()) - 1


def test_a_notice() -> None:
    assert told(convert.Encoder().event(Notice("chat", "xds_nack", "no"))).notice == pb.Notice(
        service_name="chat", kind="xds_nack", text="no"
    )


def test_an_event_is_encoded_once_for_all() -> None:
    encoder = convert.Encoder()
    view, notice = TableView(TABLE, 3, 42, "me", "update"), Notice("", "a", "b")
    assert encoder.event(view) is encoder.event(view)
    assert told(encoder.event(notice)).HasField("notice")
    assert told(encoder.event(view)).HasField("table")


def test_an_answer_names_its_update() -> None:
    message = pb.DescriptorUpdate(update_id="u", service_name="chat")
    ack = told(convert.ack(message, 7, Accepted(TABLE, 3, repeated=True))).ack
    assert (ack.update_id, ack.service_name, ack.table_version, ack.repeated, ack.number) == ("u", "chat", 3, True, 7)
    assert dict(ack.weights) == {"v1": 0.9999, "v2": 0.0001}
    code: Code = "stale"
    nack = told(convert.nack(message, 8, Refused(code, "late", 4))).nack
    assert nack == pb.Nack(
        update_id="u", service_name="chat", code=pb.Nack.STALE, message="late", last_good_version=4, number=8
    )


def snapshot(views: list[TableView]) -> list[bytes]:
    pieces = convert.Pieces()
    full = [piece for view in views if (piece := pieces.add(view)) is not None]
    return [*full, pieces.last()]


def test_no_tables_are_a_snapshot_too() -> None:
    (piece,) = snapshot([])
    assert told(piece).snapshot == pb.Snapshot(complete=True)


def test_a_large_snapshot_comes_in_pieces_that_any_client_takes() -> None:
    endpoints = tuple(
        Target(f"http://engine-{number:04}.some-namespace.svc.cluster.local:8000") for number in range(1_000)
    )
    views = [TableView(Table(f"s-{n}", (Version("v1", 10_000, "vllm", endpoints),)), 1, 0, "", "") for n in range(60)]
    pieces = snapshot(views)
    assert len(pieces) > 2
    assert max(map(len, pieces)) <= convert.PIECE_BYTES + 100  # the frame around it
    said = [told(piece).snapshot for piece in pieces]
    assert [piece.complete for piece in said] == [False] * (len(said) - 1) + [True]
    assert [table.service_name for piece in said for table in piece.tables] == [f"s-{n}" for n in range(60)]


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (pb.DescriptorUpdate(endpoints=[pb.Endpoint(url="x")] * 5001), "5001 endpoints are too many: 5000 at most"),
        (pb.DescriptorUpdate(weights={f"{n}": 7.0 for n in range(101)}), "101 weights are too many: 100 at most"),
        (pb.DescriptorUpdate(compatible_schema_hashes=["x"] * 65), "65 compatible hashes are too many: 64 at most"),
        (pb.DescriptorUpdate(models=["x"] * 1001), "1001 models are too many: 1000 at most"),
        (pb.DescriptorUpdate(signature={f"{n}": "" for n in range(65)}), "65 signature's fields are too many"),
        (
            pb.DescriptorUpdate(plan=pb.CanaryPlan(steps=[pb.CanaryPlan.Step(weight=7)] * 21)),
            "21 steps of a plan are too many: 20 at most",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_much_there_is_comes_first(update: pb.DescriptorUpdate, words: str) -> None:
    """Of a million that are wrong none is read."""
    update.service_name = "chat"
    with pytest.raises(convert.Unusable, match=words):
        convert.update_of(update, Caller("127.0.0.1"))
