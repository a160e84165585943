"""What becomes of an update: each rule, and that nothing of what is refused is kept."""

import math
from dataclasses import dataclass
from dataclasses import field as made_by

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.rules import MAX_ID, digest_of, revise
from sidecar.core.table import (
    MAX_ENDPOINTS,
    MAX_VERSIONS,
    PARTS,
    SEEN,
    Plan,
    Step,
    Table,
    Target,
    Version,
    table_version,
)
from sidecar.policy.schema import Endpoint, Service

NOW_US = 1_800_000_000_000_000
OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64
FILES = Service(
    name="chat",
    endpoints=(Endpoint(url="http://h1:80"), Endpoint(url="http://h2:80"), Endpoint(url="http://h3:80", version="v2")),
)


def to(*hosts: str) -> tuple[Target, ...]:
    return tuple(Target(f"http://{host}:80") for host in hosts)


def update(version: str = "v2", **fields: object) -> Update:
    return Update(service="chat", version=version, **fields)  # type: ignore[arg-type]


@dataclass
class Desk:
    """A table and what was made of it."""

    policy: Service | None = None
    table: Table | None = None
    number: int = 0
    ids: list[str] = made_by(default_factory=list)

    def ask(self, asked: Update) -> Table | Refused | Accepted:
        made = revise(self.table, self.policy, self.number, asked, NOW_US, self._new_id)
        if isinstance(made, Table):
            self.number = self.number + 1 if self.number else table_version(1_800_000_000, 1)
            self.table = made
        return made

    def does(self, asked: Update) -> Table:
        made = self.ask(asked)
        assert isinstance(made, Table), made
        return made

    def refuses(self, asked: Update, code: str, *words: str) -> None:
        before = self.table
        made = self.ask(asked)
        assert isinstance(made, Refused), made
        assert made.code == code, made
        assert made.version == self.number
        for word in words:
            assert word in made.message, made
        assert self.table is before

    def _new_id(self) -> str:
        self.ids.append(f"r{len(self.ids) + 1}")
        return self.ids[-1]


def begun() -> Desk:
    """v1 with all the traffic, of a service that no file names."""
    desk = Desk()
    desk.does(update("v1", engine="vllm", endpoints=to("a", "b")))
    return desk


def split() -> Desk:
    """v1 with 85 %, v2 with 15 %."""
    desk = begun()
    desk.does(update("v2", engine="triton", endpoints=to("c"), weight=0.15))
    return desk


# Weights.


def test_the_first_version_of_a_service_gets_all() -> None:
    table = begun().table
    assert table is not None and table.weights == {"v1": PARTS}
    assert table.version("v1") == Version("v1", PARTS, endpoints=to("a", "b"))


def test_a_weight_is_taken_from_the_others_in_proportion() -> None:
    desk = split()
    assert desk.table is not None and desk.table.weights == {"v1": 8500, "v2": 1500}
    made = desk.does(update("v3", engine="vllm", endpoints=to("d"), weight=0.5))
    assert made.weights == {"v1": 4250, "v2": 750, "v3": 5000}


def test_a_new_version_without_a_weight_gets_none() -> None:
    assert begun().does(update("v2", engine="vllm", endpoints=to("c"))).weights == {"v1": PARTS, "v2": 0}


def test_no_weight_said_leaves_them() -> None:
    assert split().does(update("v2", endpoints=to("c", "d"))).weights == {"v1": 8500, "v2": 1500}


def test_the_whole_split_at_once() -> None:
    assert split().does(update("v1", weights={"v1": 0.3, "v2": 0.7})).weights == {"v1": 3000, "v2": 7000}
    assert split().does(update("v1", weights={"v2": 1.0})).weights == {"v1": 0, "v2": PARTS}


def test_the_least_weight_is_a_part_and_the_most_of_several_leaves_one() -> None:
    assert split().does(update("v2", weight=1e-9)).weights == {"v1": PARTS - 1, "v2": 1}
    assert split().does(update("v2", weight=1 - 1e-9)).weights == {"v1": 1, "v2": PARTS - 1}
    assert split().does(update("v2", weight=0.0)).weights == {"v1": PARTS, "v2": 0}
    assert split().does(update("v2", weight=1.0)).weights == {"v1": 0, "v2": PARTS}


@pytest.mark.parametrize("weight", [-1.0, -1e-9, 1.5, 1 + 1e-9, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_share(weight: float) -> None:
    split().refuses(update(weight=weight), "invalid", "no share")
    split().refuses(update(weights={"v1": 0.5, "v2": weight}), "invalid", "'v2'")


@pytest.mark.parametrize("weights", [{"v1": 0.0, "v2": 0.0}, {"v1": 0.5}, {"v1": 0.6, "v2": 0.5}])
def test_a_split_that_is_no_whole(weights: dict[str, float]) -> None:
    split().refuses(update(weights=weights), "invalid", "sum")


def test_a_split_of_an_unknown_version() -> None:
    split().refuses(update(weights={"v1": 0.5, "v9": 0.5}), "not_found", "v9", "v1, v2")


def test_weights_are_said_once() -> None:
    split().refuses(update(weight=0.5, weights={"v1": 0.5, "v2": 0.5}), "invalid", "twice")


def test_a_whole_that_would_go_to_nobody() -> None:
    desk = begun()
    desk.refuses(update("v1", weight=0.15), "conflict", "nobody")
    desk.refuses(update("v1", weight=0.0), "conflict", "nobody")
    Desk().refuses(update("v1", engine="vllm", endpoints=to("a"), weight=0.15), "conflict", "nobody")
    assert desk.ask(update("v1", weight=1.0)) == Accepted(desk.table, desk.number, repeated=True)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from(["v1", "v2", "v3"]), st.floats(0, 1)), max_size=20))
def test_any_updates_leave_a_whole(asked: list[tuple[str, float]]) -> None:
    desk = split()
    desk.does(update("v3", engine="vllm", endpoints=to("d")))
    for version, weight in asked:
        desk.ask(update(version, weight=weight))
        assert desk.table is not None
        assert sum(desk.table.weights.values()) == PARTS


# Endpoints.


def test_endpoints_are_left_or_replaced() -> None:
    desk = split()
    assert desk.does(update("v2", weight=0.2)).version("v2") == Version("v2", 2000, "triton", to("c"))
    made = desk.does(update("v2", endpoints=to("d", "e"))).version("v2")
    assert made is not None and made.endpoints == to("d", "e")


def test_a_version_with_a_weight_keeps_an_endpoint() -> None:
    split().refuses(update("v2", endpoints=()), "conflict", "last endpoints")
    begun().refuses(update("v2", engine="vllm", weight=0.1), "invalid", "no endpoint")
    begun().refuses(update("v2", engine="vllm", endpoints=(), weight=0.1), "invalid", "no endpoint")


def test_a_version_that_gets_a_weight_has_an_endpoint() -> None:
    desk = begun()
    desk.does(update("v2", engine="vllm"))
    desk.refuses(update("v2", weight=0.1), "invalid", "'v2'")
    desk.refuses(update("v1", weights={"v1": 0.5, "v2": 0.5}), "invalid", "'v2'")


def test_a_version_without_weight_and_endpoints_goes() -> None:
    desk = split()
    made = desk.does(update("v2", endpoints=(), weight=0.0))
    assert made.weights == {"v1": PARTS}


def test_the_files_endpoints_count() -> None:
    desk = Desk(FILES)
    assert desk.does(update("v2", weight=0.25, endpoints=to("c"))).weights == {"v1": 7500, "v2": 2500}
    assert desk.does(update("v2", endpoints=())).weights == {"v1": 7500, "v2": 2500}
    assert desk.does(update("v2", endpoints=(), weight=0.0)).weights == {"v1": PARTS, "v2": 0}


def test_a_version_that_others_files_have_endpoints_for_may_keep_its_weight() -> None:
    desk = Desk(table=Table("chat", (Version("v1", 9000), Version("v2", 1000, endpoints=to("c")))), number=7)
    assert desk.does(update("v2", weight=0.2)).weights == {"v1": 8000, "v2": 2000}
    desk.refuses(update("v2", weight=0.1), "invalid", "'v1'")  # more than it had: from where?


def test_an_endpoint_is_one_versions() -> None:
    split().refuses(update("v2", endpoints=to("c", "a")), "conflict", "a:80", "'v1'")
    split().refuses(update("v2", endpoints=to("c", "C")), "invalid", "twice")
    Desk(FILES).refuses(update("v2", endpoints=to("h1")), "conflict", "'v1'", "policy file")
    assert Desk(FILES).does(update("v2", endpoints=to("h3"))).version("v2") is not None


@pytest.mark.parametrize(
    "url",
    ["", "h1:80", "ftp://h1", "http://h1/v1", "http://h1:0", "http://a b", "http://u:p@h1", "unix://x", "http://"],
)
def test_an_endpoint_of_unknown_form(url: str) -> None:
    split().refuses(update(endpoints=(Target(url),)), "invalid", f'"{url}"')


def test_an_endpoint_of_unknown_form_that_stands_is_named_and_may_be_replaced() -> None:
    bad = Version("v1", 8500, endpoints=(Target("http://h:99999"),))
    desk = Desk(table=Table("chat", (bad, Version("v2", 1500, endpoints=to("c")))), number=7)
    desk.refuses(update("v2", endpoints=to("d")), "conflict", "'v1'", '"http://h:99999"', "99999")
    desk.does(update("v1", endpoints=to("a")))
    desk.does(update("v2", endpoints=to("d")))


def test_words_that_are_none() -> None:
    split().refuses(update(endpoints=(Target("http://h", zone="a b"),)), "invalid", "zone")
    split().refuses(update(endpoints=(Target("http://h", node="a\n"),)), "invalid", "node")
    split().refuses(update(zone="x" * 254), "invalid", "zone")
    split().refuses(update(endpoints=(Target("http://" + "h" * 600),)), "invalid", "512")
    split().refuses(update("v 2"), "invalid", "version")
    split().refuses(update("v2\n"), "invalid", "version")
    split().refuses(replace(update(), service=""), "invalid", "service")
    split().refuses(update(update_id="x" * (MAX_ID + 1)), "invalid", "update id")
    split().refuses(update(update_id="a\nb"), "invalid", "update id")
    split().refuses(update(update_id="\ud800"), "invalid", "surrogate")
    split().refuses(update(expected=10**30), "invalid", "too large")
    split().refuses(update(signature={"a": "b" * 2000}), "invalid", "signature")
    split().refuses(update(models=("m",) * 1001), "invalid", "models")
    split().refuses(update(models=("",)), "invalid", "model")


def test_a_zone_is_for_those_who_name_none() -> None:
    named = (Target("http://c", zone="z2"), Target("http://d"))
    desk = split()
    made = desk.does(update(endpoints=named, zone="z1")).version("v2")
    assert made is not None and [target.zone for target in made.endpoints] == ["z2", "z1"]
    made = desk.does(update("v1", zone="z3")).version("v1")
    assert made is not None and [target.zone for target in made.endpoints] == ["z3", "z3"]


def test_a_new_version_names_its_engine() -> None:
    begun().refuses(update("v2", endpoints=to("c")), "invalid", "engine")
    begun().refuses(update("v2", engine="llama", endpoints=to("c")), "invalid", "'llama'", "vllm, triton, deepspeed")
    made = split().does(update("v2", engine="deepspeed")).version("v2")
    assert made is not None and made.engine == "deepspeed"


def test_there_are_so_many_at_most() -> None:
    many = tuple(Target(f"http://10.0.{n >> 8}.{n & 255}") for n in range(MAX_ENDPOINTS))
    desk = begun()
    desk.refuses(update("v2", engine="vllm", endpoints=many), "exhausted", str(MAX_ENDPOINTS))
    desk.refuses(update("v2", engine="vllm", endpoints=(*many, *to("x"))), "invalid", str(MAX_ENDPOINTS))
    versions = tuple(Version(f"v{n}", PARTS if n == 0 else 0) for n in range(MAX_VERSIONS))
    full = Desk(table=Table("chat", versions), number=7)
    full.refuses(update("new", engine="vllm", endpoints=to("c")), "exhausted", str(MAX_VERSIONS))
    full.does(update("v7", endpoints=()))
    full.does(update("new", engine="vllm", endpoints=to("c")))


# Schema hashes.


def hashed() -> Desk:
    desk = begun()
    desk.does(update("v1", schema_hash=OLD))
    return desk


def test_versions_of_different_schemas_need_a_word() -> None:
    desk = hashed()
    wrong = update("v2", engine="vllm", endpoints=to("c"), weight=0.1, schema_hash=NEW)
    desk.refuses(wrong, "conflict", OLD[:12], NEW[:12], "compatible")
    desk.refuses(replace(wrong, compatible=(OTHER,)), "conflict", "compatible")
    made = desk.does(replace(wrong, compatible=("sha256:" + OLD.upper(),))).version("v2")
    assert made is not None and made.compatible == (OLD,)


def test_the_same_schema_needs_none() -> None:
    hashed().does(update("v2", engine="vllm", endpoints=to("c"), weight=0.1, schema_hash=OLD))
    hashed().does(update("v2", engine="vllm", endpoints=to("c"), weight=0.1))


def test_a_version_without_traffic_may_have_any_schema() -> None:
    desk = hashed()
    desk.does(update("v2", engine="vllm", endpoints=to("c"), schema_hash=NEW))
    desk.refuses(update("v2", weight=0.1), "conflict")
    desk.does(update("v1", compatible=(NEW,)))
    desk.does(update("v2", weight=0.1))
    # A new schema has its word to say anew.
    desk.refuses(update("v1", schema_hash=OTHER), "conflict")


@pytest.mark.parametrize("bad", ["x" * 64, OLD[:-1], "md5:" + OLD, OLD + "\n"])
def test_a_hash_that_is_none(bad: str) -> None:
    split().refuses(update(schema_hash=bad), "invalid", "SHA-256")
    split().refuses(update(compatible=(bad,)), "invalid", "SHA-256")
    split().refuses(update(compatible=("",)), "invalid")


# Services.


def test_it_begins_with_what_the_files_say() -> None:
    made = Desk(FILES).does(update("v3", engine="vllm", endpoints=to("c"), weight=0.1))
    assert made.weights == {"v1": 6000, "v2": 3000, "v3": 1000}
    policy = replace(FILES, split={"v1": 3.0, "v2": 1.0})
    assert Desk(policy).does(update("v2", zone="z")).weights == {"v1": 7500, "v2": 2500}


def test_a_split_in_the_file_may_wait_for_its_endpoints() -> None:
    desk = Desk(Service(name="chat", split={"v1": 90.0, "v2": 10.0}))
    assert desk.does(update("v1", endpoints=to("a"))).weights == {"v1": 9000, "v2": 1000}
    assert desk.does(update("v2", endpoints=to("b"))).weights == {"v1": 9000, "v2": 1000}


def test_a_table_that_says_nothing_of_versions_begins_with_the_files_too() -> None:
    desk = Desk(FILES, Table("chat"), 7)
    assert desk.does(update("v2", weight=0.5)).weights == {"v1": 5000, "v2": 5000}


def test_models_are_for_services_that_no_file_names() -> None:
    assert begun().does(update("v1", models=("llama-*",))).models == ("llama-*",)
    Desk(FILES).refuses(update("v2", models=("llama-*",)), "invalid", "policy file")


# Plans.

PLAN = Plan("v1", (Step(500, 60.0, 100), Step(PARTS, 60.0, 100)))


def test_a_plan_begins_a_rollout() -> None:
    desk = begun()
    made = desk.does(update("v2", engine="vllm", endpoints=to("c"), plan=PLAN, by="ann"))
    assert made.weights == {"v1": 9500, "v2": 500}
    assert made.rollout is not None
    assert (made.rollout.id, made.rollout.version, made.rollout.phase, made.rollout.by) == (
        "r1",
        "v2",
        "running",
        "ann",
    )


def test_a_plan_is_held_against_the_same_rules() -> None:
    begun().refuses(update("v2", engine="vllm", plan=PLAN), "invalid", "no endpoint")
    hashed().refuses(update("v2", engine="vllm", endpoints=to("c"), plan=PLAN, schema_hash=NEW), "conflict")
    begun().refuses(update("v2", engine="vllm", endpoints=to("c"), plan=replace(PLAN, steps=())), "invalid", "steps")
    wrong = update("v2", engine="vllm", endpoints=to("c"), plan=PLAN, weight=0.5)
    begun().refuses(wrong, "invalid", "first step")
    begun().does(replace(wrong, weight=0.05))
    begun().refuses(replace(wrong, weight=None, weights={"v1": 1.0}), "invalid", "twice")


def test_a_weight_said_by_hand_ends_it_and_another_update_does_not() -> None:
    desk = begun()
    desk.does(update("v2", engine="vllm", endpoints=to("c"), plan=PLAN))
    made = desk.does(update("v2", endpoints=to("c", "d")))
    assert made.rollout is not None and made.rollout.phase == "running"
    for said in (update("v1", weight=0.5), update("v2", weights={"v1": 0.5, "v2": 0.5})):
        by_hand = Desk(table=made, number=7).does(said)
        assert by_hand.rollout is not None and by_hand.rollout.phase == "superseded"


# Ids, and the version that an update was made for.


def test_the_same_id_twice_is_one_update() -> None:
    desk = begun()
    asked = update("v2", engine="vllm", endpoints=to("c"), weight=0.1, update_id="u1", by="ann")
    table = desk.does(asked)
    made_as = desk.number
    desk.does(update("v2", weight=0.3))
    again = desk.ask(replace(asked, by="bob", expected=1))
    assert again == Accepted(desk.table, made_as, repeated=True)  # type: ignore[arg-type]
    assert table.seen[0].version == made_as


def test_the_first_of_a_register_is_answered_again_too() -> None:
    desk = Desk()
    asked = update("v1", engine="vllm", endpoints=to("a"), update_id="u1")
    desk.does(asked)
    first = desk.number
    desk.does(update("v1", zone="z"))
    again = desk.ask(asked)
    assert isinstance(again, Accepted) and again.repeated and again.version == first


def test_an_id_of_another_update() -> None:
    desk = split()
    desk.does(update("v2", weight=0.1, update_id="u1"))
    desk.refuses(update("v2", weight=0.2, update_id="u1"), "conflict", "'u1'")


def test_so_many_ids_are_remembered() -> None:
    desk = split()
    for number in range(SEEN + 1):
        desk.does(update("v2", weight=0.1, update_id=f"u{number}"))
    assert desk.table is not None and len(desk.table.seen) == SEEN
    assert isinstance(desk.ask(update("v2", weight=0.1, update_id="u1")), Accepted)
    assert isinstance(desk.ask(update("v2", weight=0.1, update_id="u0")), Table)


def test_an_update_for_another_version_of_the_table() -> None:
    desk = split()
    desk.refuses(update("v2", weight=0.2, expected=desk.number - 1), "stale", str(desk.number), str(desk.number - 1))
    desk.does(update("v2", weight=0.2, expected=desk.number))
    Desk().refuses(update("v1", engine="vllm", endpoints=to("a"), expected=1), "stale", "no table")


def test_what_stands_already_is_not_written_again() -> None:
    desk = split()
    again = desk.ask(update("v2", engine="triton", endpoints=to("c"), weight=0.15))
    assert again == Accepted(desk.table, desk.number, repeated=True)  # type: ignore[arg-type]
    assert isinstance(desk.ask(update("v2", weight=0.15, update_id="u1")), Table)  # to be remembered


def test_the_digest_of_an_update_is_that_of_releases_that_knew_less() -> None:
    asked = update("v2", weight=0.25, engine="triton", endpoints=(Target("http://a:1"),), update_id="u", by="ann")
    assert digest_of(asked).hex() == "eaf88c81137d9eae16336dd37e3a81de"
    later = [asked, replace(asked, front=""), replace(asked, engine_model=""), replace(asked, chat_template="")]
    assert len({digest_of(each) for each in later}) == 4


def test_a_digest_is_of_what_is_asked() -> None:
    asked = update("v2", weights={"v1": 0.5, "v2": 0.5}, update_id="u1", by="ann", expected=7)
    assert digest_of(asked) == digest_of(update("v2", weights={"v2": 0.5, "v1": 0.5}))
    assert digest_of(asked) != digest_of(update("v1", weights={"v2": 0.5, "v1": 0.5}))
    assert digest_of(update(endpoints=())) != digest_of(update())


# How a version's endpoints are spoken to.


def speaks(desk: Desk, name: str = "v2") -> tuple[str, str, str, str]:
    version = (desk.table or Table("chat")).version(name)
    assert version is not None
    return version.engine, version.front, version.engine_model, version.chat_template


def test_a_front_and_what_goes_with_it_are_the_versions() -> None:
    desk = split()
    desk.does(update(engine="deepspeed", front="gateway", engine_model="llama", chat_template="/templates/llama"))
    assert speaks(desk) == ("deepspeed", "gateway", "llama", "/templates/llama")
    desk.does(update(weight=0.5))
    desk.does(update(engine="deepspeed", front="api_server"))
    assert speaks(desk) == ("deepspeed", "api_server", "llama", "/templates/llama")
    desk.does(update(engine_model="", chat_template=""))
    assert speaks(desk) == ("deepspeed", "api_server", "", "")
    desk.does(update(front=""))
    assert speaks(desk) == ("deepspeed", "", "", "")


def test_another_engine_is_spoken_to_as_it_is_said_with_it() -> None:
    desk = split()
    desk.does(update(engine="deepspeed", front="gateway", engine_model="llama", chat_template="/t"))
    desk.does(update(engine="triton", engine_model="m"))
    assert speaks(desk) == ("triton", "", "m", "")
    desk.does(update(engine="vllm"))
    assert speaks(desk) == ("vllm", "", "", "")


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (update(front="grpc"), "invalid", ("front 'grpc'", "openai, generate, api_server, gateway")),
        (update(engine_model="a\nb"), "invalid", ("engine_model", "control")),
        (update(chat_template="x" * 1025), "invalid", ("chat_template", "1024")),
        (update(engine="vllm", front="generate"), "invalid", ("'v2': front", "vllm has no front generate")),
        (update(engine="vllm", engine_model="m"), "invalid", ("'v2': engine_model", "of use where")),
        (update(front="gateway"), "conflict", ("triton has no front gateway", "generate, openai")),
        (update(front="openai", chat_template="/t"), "conflict", ("chat_template", "applies its own")),
        (update(front="openai", engine_model="m"), "conflict", ("engine_model",)),
    ],
    ids=str,
)
def test_what_an_engine_does_not_speak_is_refused(asked: Update, code: str, words: tuple[str, ...]) -> None:
    split().refuses(asked, code, *words)


def test_a_version_of_a_file_keeps_how_the_file_speaks() -> None:
    spoken = Endpoint(url="http://h1:80", engine="deepspeed", front="gateway", engine_model="llama", version="v2")
    desk = Desk(Service(name="chat", endpoints=(spoken,)))
    desk.does(update(endpoints=to("c")))
    assert speaks(desk) == ("deepspeed", "gateway", "llama", "")


def test_endpoints_of_a_file_that_differ_are_not_made_alike_unsaid() -> None:
    own = {"engine": "triton", "engine_model": "llama", "chat_template": "/t"}
    first = Endpoint(url="http://h1:80", version="v2", **own)  # type: ignore[arg-type]
    last = Endpoint(url="http://h2:80", version="v2", engine="triton", front="openai")
    desk = Desk(Service(name="chat", endpoints=(first, last)))
    desk.refuses(update(endpoints=to("h1", "h2")), "conflict", "http://h1:80 is spoken to as triton llama /t", "openai")
    desk.does(update(endpoints=to("h2", "c")))
    desk.does(update(endpoints=to("h1"), engine="triton", front="openai"))  # whoever says it means it
    desk.does(update(endpoints=to("h1", "d")))  # it is the version's by now
    plain = Desk(Service(name="chat", endpoints=(first, Endpoint(url="http://h2:80", version="v2", engine="triton"))))
    plain.does(update(endpoints=to("h1", "h2")))  # an engine alone leaves the rest as the file has it
