"""Classes: who is named, who is matched, and that nothing a client sends makes it slow."""

from fnmatch import fnmatchcase
from math import inf
from time import process_time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.classes import MAX_ITEMS, MAX_TEXT, Classes, QosClass, modality_of
from sidecar.kernel.errors import SidecarError
from sidecar.policy.load import load
from sidecar.policy.schema import QosMatch, QosPolicy, Seconds
from sidecar.wire.call import Api, read_call
from sidecar.wire.headers import PASSED, Line

MESH = b"""
apiVersion: sidecar/v1
kind: Policy
qos_policies:
  - {name: voice-realtime, latency_sla_ms: 50,   preemptible: false, priority: 9}
  - {name: code-batch,     latency_sla_ms: 2000, preemptible: true,  priority: 3}
"""


def classes(*policies: QosPolicy) -> Classes:
    return Classes(policies)


def policy(name: str, *matches: QosMatch, **fields: Any) -> QosPolicy:
    return QosPolicy(name=name, match=matches, **{"latency_sla_ms": 1000, **fields})


def lines(**headers: str | bytes) -> list[Line]:
    """`x_kind="a"` is `x-kind: a`."""
    made = []
    for name, value in headers.items():
        data = value if isinstance(value, bytes) else value.encode()
        made.append(Line(name.replace("_", "-").encode(), data, PASSED, b""))
    return made


def name_of(
    table: Classes,
    named: str = "",
    claims: dict[str, object] | None = None,
    path: bytes = b"/v1/chat/completions",
    model: str = "llama",
    tenant: str = "",
    modality: str = "",
    **headers: str | bytes,
) -> str:
    return table.classify(named, lines(**headers), claims or {}, path, model, tenant, modality).name


def facts(qos: QosClass) -> dict[str, object]:
    return {name: getattr(qos, name) for name in ("name", "index", "sla_s", "preemptible", "priority", "max_wait_s")}


def test_the_documents_of_the_mesh_make_two_classes_and_the_default_between_them() -> None:
    table = Classes(load([("a.yaml", MESH)], 1).qos_policies)
    assert [facts(qos) for qos in table.all] == [
        {
            "name": "voice-realtime",
            "index": 0,
            "sla_s": 0.05,
            "preemptible": False,
            "priority": 9,
            "max_wait_s": 30.0,
        },
        {"name": "default", "index": 1, "sla_s": inf, "preemptible": False, "priority": 5, "max_wait_s": 30.0},
        {"name": "code-batch", "index": 2, "sla_s": 2.0, "preemptible": True, "priority": 3, "max_wait_s": 30.0},
    ]
    assert name_of(table, "voice-realtime") == "voice-realtime"
    assert name_of(table, "code-batch") == "code-batch"
    assert name_of(table) == name_of(table, "nobody") == "default"
    assert not table.reads_modality


def test_a_class_has_what_its_policy_says() -> None:
    (qos, *_) = classes(
        policy(
            "gold",
            latency_sla_ms=250,
            preemptible=True,
            priority=7,
            weight=2.5,
            late="reject",
            evict="streams",
            max_wait_s=Seconds(4),
            budget_factor=1.5,
        )
    ).all
    assert (qos.name, qos.index, qos.sla_s, qos.preemptible, qos.priority) == ("gold", 0, 0.25, True, 7)
    assert (qos.weight, qos.late_reject, qos.evict_streams, qos.max_wait_s, qos.budget_factor) == (
        2.5,
        True,
        True,
        4.0,
        1.5,
    )


def test_no_policies_make_the_default_alone() -> None:
    table = classes()
    assert table.all == (table.default,)
    assert (table.default.late_reject, table.default.evict_streams, table.default.weight) == (False, False, 1.0)
    assert table.default.budget_factor == 1.0
    assert name_of(table, "default") == name_of(table, "gold", x_a="b") == "default"


def test_the_policy_s_own_default_takes_the_place_of_ours() -> None:
    table = classes(policy("high", priority=9), policy("default", priority=1, latency_sla_ms=2000))
    assert [qos.name for qos in table.all] == ["high", "default"]
    assert table.default is table.by_name["default"] is table.all[1]
    assert (table.default.priority, table.default.sla_s) == (1, 2.0)
    assert name_of(table) == "default"


def test_the_order_is_by_priority_and_then_by_the_file() -> None:
    table = classes(policy("a", priority=3), policy("b", priority=5), policy("c", priority=9), policy("d", priority=3))
    assert [qos.name for qos in table.all] == ["c", "b", "default", "a", "d"]
    assert [qos.index for qos in table.all] == [0, 1, 2, 3, 4]
    assert all(table.by_name[qos.name] is qos for qos in table.all)


def test_who_is_named_is_of_that_class_whatever_else_fits() -> None:
    table = classes(policy("first", QosMatch(path="*")), policy("named"))
    assert name_of(table, "named") == "named"
    assert name_of(table, "Named") == name_of(table, "named ") == name_of(table, "") == "first"


def test_the_first_class_of_the_file_wins_and_not_the_highest() -> None:
    table = classes(
        policy("low", QosMatch(header="x-kind", value="batch"), priority=0),
        policy("high", QosMatch(path="*"), priority=9),
    )
    assert name_of(table, x_kind="batch") == "low"
    assert name_of(table, x_kind="chat") == name_of(table) == "high"


MATCHES: list[tuple[QosMatch, dict[str, Any], bool]] = [
    (QosMatch(header="X-Kind"), {"x_kind": "anything"}, True),
    (QosMatch(header="x-kind"), {"x_other": "anything"}, False),
    (QosMatch(header="x-kind"), {"x_kind": ""}, False),
    (QosMatch(header="x-kind", value="batch"), {"x_kind": "batch"}, True),
    (QosMatch(header="x-kind", value="batch"), {"x_kind": "Batch"}, False),
    (QosMatch(header="x-kind", value="batch"), {"x_kind": "batches"}, False),
    (QosMatch(header="x-kind", value="batch*"), {"x_kind": "batches"}, True),
    (QosMatch(header="x-kind", value="*batch"), {"x_kind": "a batch"}, True),
    (QosMatch(header="x-kind", value="b?tch"), {"x_kind": "bätch"}, True),
    (QosMatch(header="x-kind", value="b?tch"), {"x_kind": "bätch".encode("latin-1")}, True),
    (QosMatch(header="x-kind", value="[ab]"), {"x_kind": "b"}, True),
    (QosMatch(header="x-kind", value="[ab"), {"x_kind": "[ab"}, True),
    (QosMatch(jwt_claim="tier"), {"claims": {"tier": "gold"}}, True),
    (QosMatch(jwt_claim="tier", value="g*"), {"claims": {"tier": "gold"}}, True),
    (QosMatch(jwt_claim="tier", value="g*"), {"claims": {"Tier": "gold"}}, False),
    (QosMatch(jwt_claim="tier"), {"claims": {}}, False),
    (QosMatch(jwt_claim="tier"), {"claims": {"tier": ""}}, False),
    (QosMatch(jwt_claim="tier"), {"claims": {"tier": None}}, False),
    (QosMatch(jwt_claim="tier"), {"claims": {"tier": {"gold": 1}}}, False),
    (QosMatch(jwt_claim="tier"), {"claims": {"tier": 1.5}}, False),
    (QosMatch(jwt_claim="tier", value="3"), {"claims": {"tier": 3}}, True),
    (QosMatch(jwt_claim="tier", value="true"), {"claims": {"tier": True}}, True),
    (QosMatch(jwt_claim="tier", value="1"), {"claims": {"tier": True}}, False),
    (QosMatch(jwt_claim="tier", value="false"), {"claims": {"tier": False}}, True),
    (QosMatch(jwt_claim="tier"), {"claims": {"tier": 10**5000}}, False),
    (QosMatch(jwt_claim="groups", value="voice"), {"claims": {"groups": ["a", "voice"]}}, True),
    (QosMatch(jwt_claim="groups", value="voice"), {"claims": {"groups": [["voice"]]}}, False),
    (QosMatch(jwt_claim="groups"), {"claims": {"groups": []}}, False),
    (QosMatch(jwt_claim="groups", value="voice"), {"claims": {"groups": ["a"] * MAX_ITEMS + ["voice"]}}, False),
    (QosMatch(jwt_claim="realm.tier", value="gold"), {"claims": {"realm": {"tier": "gold"}}}, True),
    (QosMatch(jwt_claim="realm.tier", value="gold"), {"claims": {"realm.tier": "gold", "realm": "x"}}, True),
    (QosMatch(jwt_claim="realm.tier", value="gold"), {"claims": {"realm": "gold"}}, False),
    (QosMatch(jwt_claim="a.b.c", value="x"), {"claims": {"a": {"b": {"c": ["y", "x"]}}}}, True),
    (QosMatch(path="/v1/*"), {"path": b"/v1/chat/completions"}, True),
    (QosMatch(path="/v1/completions"), {"path": b"/v1/chat/completions"}, False),
    (QosMatch(path="*/completions"), {"path": b"/v1/chat/completions"}, True),
    (QosMatch(path="/v1/?"), {"path": b"/v1/\xff"}, True),
    (QosMatch(model="llama*"), {"model": "llama-3"}, True),
    (QosMatch(model="llama*"), {"model": ""}, False),
    (QosMatch(model="*"), {"model": ""}, True),
    (QosMatch(tenant="acme"), {"tenant": "acme"}, True),
    (QosMatch(tenant="acme"), {"tenant": ""}, False),
    (QosMatch(tenant="*"), {"tenant": ""}, True),
    (QosMatch(tenant="?*"), {"tenant": ""}, False),
    (QosMatch(modality="voice"), {"modality": "voice"}, True),
    (QosMatch(modality="voice"), {"modality": "text"}, False),
    (QosMatch(modality="text"), {"modality": ""}, False),
    (QosMatch(header="x-kind", value="a", model="m"), {"x_kind": "a", "model": "m"}, True),
    (QosMatch(header="x-kind", value="a", model="m"), {"x_kind": "a", "model": "n"}, False),
    (QosMatch(header="x-kind", value="a", model="m"), {"x_kind": "b", "model": "m"}, False),
]


@pytest.mark.parametrize(("match", "request_", "fits"), MATCHES)
def test_a_match_fits_if_all_that_it_asks_for_holds(match: QosMatch, request_: dict[str, Any], fits: bool) -> None:
    table = classes(policy("it", match))
    assert name_of(table, **request_) == ("it" if fits else "default")
    assert table.reads_modality is bool(match.modality)


def test_any_of_a_class_s_matches_will_do() -> None:
    table = classes(
        policy("it", QosMatch(header="x-a", value="1"), QosMatch(header="x-b", value="2"), QosMatch(path="/x"))
    )
    assert name_of(table, x_a="1") == name_of(table, x_b="2") == name_of(table, path=b"/x") == "it"
    assert name_of(table, x_a="2", x_b="1") == "default"


def test_of_two_lines_the_first_counts() -> None:
    table = classes(policy("it", QosMatch(header="x-a", value="1")))
    two = [*lines(x_a="2"), *lines(x_a="1")]
    assert table.classify("", two, {}, b"/", "", "", "").name == "default"
    assert table.classify("", two[::-1], {}, b"/", "", "", "").name == "it"


def test_spaces_around_a_value_are_no_part_of_it() -> None:
    table = classes(policy("it", QosMatch(header="x-a", value="1")))
    assert name_of(table, x_a="1 ") == "it"


GLOBS = ["*", "a", "ab", "a*", "*b", "a*b", "?", "a?", "[ab]", "[!a]*", "*a*", "[z-a]", "[", "*[", "ä*", "**", "a[*]"]
TEXTS = st.text("abzä[]*?\n", max_size=5)


@given(st.sampled_from(GLOBS) | st.text("ab*?[]!-", min_size=1, max_size=6), TEXTS)
def test_a_glob_fits_what_it_fits_elsewhere(glob: str, text: str) -> None:
    table = classes(policy("it", QosMatch(model=glob)))
    assert (name_of(table, model=text) == "it") == fnmatchcase(text, glob)


def slow(match: QosMatch, request_: dict[str, Any]) -> bool:
    """What `classify` says of one match, said as plainly as can be."""
    claim: object = request_["claims"].get(match.jwt_claim)
    checks = [
        not match.header
        or any(fnmatchcase(value, match.value) for value in request_["headers"].get(match.header, [])[:1]),
        not match.jwt_claim or (isinstance(claim, str) and claim != "" and fnmatchcase(claim, match.value)),
        not match.path or fnmatchcase(request_["path"], match.path),
        not match.model or fnmatchcase(request_["model"], match.model),
        not match.tenant or fnmatchcase(request_["tenant"], match.tenant),
        not match.modality or match.modality == request_["modality"],
    ]
    return all(checks)


_GLOB = st.sampled_from(["", "a", "a*", "*b", "*"])
_MATCH = st.builds(
    QosMatch,
    header=st.sampled_from(["", "x-a", "x-b"]),
    jwt_claim=st.sampled_from(["", "tier"]),
    value=st.sampled_from(["*", "a", "a*", "*b"]),
    path=_GLOB,
    model=_GLOB,
    tenant=_GLOB,
    modality=st.sampled_from(["", "text", "voice", "code"]),
).filter(lambda match: not (match.header and match.jwt_claim))  # no policy has both
_WORD = st.sampled_from(["a", "b", "ab", "ba"])
_REQUEST = st.fixed_dictionaries(
    {
        "headers": st.dictionaries(st.sampled_from(["x-a", "x-b", "x-c"]), st.lists(_WORD, min_size=1, max_size=2)),
        "claims": st.dictionaries(st.sampled_from(["tier", "sub"]), _WORD | st.just("")),
        "path": _WORD,
        "model": _WORD | st.just(""),
        "tenant": _WORD | st.just(""),
        "modality": st.sampled_from(["text", "voice", "code"]),
    }
)


@given(st.lists(st.lists(_MATCH, max_size=3), max_size=4), _REQUEST, st.sampled_from(["", "c0", "c3", "default", "x"]))
def test_it_is_the_class_that_reading_the_file_from_the_top_finds(
    matches: list[list[QosMatch]], request_: dict[str, Any], named: str
) -> None:
    table = classes(*(policy(f"c{n}", *each, priority=n % 3) for n, each in enumerate(matches)))
    made = [
        Line(name.encode(), value.encode(), PASSED, b"")
        for name, values in request_["headers"].items()
        for value in values
    ]
    expected = named if named in {"default", *(f"c{n}" for n in range(len(matches)))} else ""
    if not expected:
        expected = next(
            (f"c{n}" for n, each in enumerate(matches) if any(slow(match, request_) for match in each)), "default"
        )
    rest = (request_["model"], request_["tenant"], request_["modality"])
    assert table.classify(named, made, request_["claims"], request_["path"].encode(), *rest).name == expected


HUGE = 64 * 1024


@pytest.mark.parametrize(
    "glob", ["*" + "a" * 250 + "b*", "*a" * 120 + "*b", "*" + "a*b" * 80, "*?" * 120 + "b", "[!b]" * 60 + "*b"]
)
def test_nothing_that_a_client_sends_makes_a_glob_slow(glob: str) -> None:
    table = classes(policy("it", QosMatch(header="x-a", value=glob), QosMatch(jwt_claim="c", value=glob)))
    for size in (MAX_TEXT, MAX_TEXT + 1, HUGE):
        text = "a" * size
        began = process_time()
        assert name_of(table, x_a=text, claims={"c": [text] * 3}) == "default"
        assert process_time() - began < 0.1  # some 1 ms; unbounded it would be 20 times that for each


def test_a_text_that_is_too_long_fits_words_and_beginnings_alone() -> None:
    long = "a" * (MAX_TEXT + 1)
    for glob, fits in (("*", True), ("a*", True), (long, True), ("*a", False), ("a*a", False), ("??*", False)):
        assert (name_of(classes(policy("it", QosMatch(model=glob))), model=long) == "it") is fits
        assert name_of(classes(policy("it", QosMatch(model=glob))), model="a" * MAX_TEXT) == (
            "default" if glob == long else "it"
        )


@given(
    st.text(max_size=20),
    st.lists(st.tuples(st.sampled_from([b"x-a", b"x-b"]), st.binary(max_size=30)), max_size=5),
    st.dictionaries(
        st.sampled_from(["c", "d"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
            max_leaves=6,
        ),
    ),
    st.binary(max_size=20),
    st.text(max_size=10),
)
def test_no_request_raises(
    named: str, headers: list[tuple[bytes, bytes]], claims: dict[str, object], path: bytes, text: str
) -> None:
    table = classes(
        policy("a", QosMatch(header="x-a", value="*a*"), QosMatch(jwt_claim="c", value="*a*"), QosMatch(path="*a*")),
        policy("b", QosMatch(jwt_claim="d.x"), QosMatch(model="*\x00*"), QosMatch(tenant="[a-c]*")),
    )
    made = [Line(name, value, PASSED, b"") for name, value in headers]
    assert table.classify(named, made, claims, path, text, text, "").name in ("a", "b", "default")


CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"


def body(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.mark.parametrize(
    ("path", "model", "content", "modality"),
    [
        (CHAT, "llama", body(messages=[{"role": "user", "content": "hi"}]), "text"),
        (CHAT, "", b"", "text"),
        (CHAT, "", b"{", "text"),
        (b"/v1/audio/speech", "tts-1", body(input="hi"), "voice"),
        (b"/v1/audio/transcriptions", "", b"--x\r\n", "voice"),
        (b"/v1/realtime", "", b"", "voice"),
        (b"/v1/realtime/sessions", "", b"{}", "voice"),
        (b"/v1/realtimes", "", b"{}", "text"),
        (b"/v1/audio", "", b"{}", "text"),
        (CHAT, "gpt", body(modalities=["text", "audio"]), "voice"),
        (CHAT, "gpt", body(modalities=["text"]), "text"),
        (CHAT, "gpt", body(modalities="audio"), "text"),
        (CHAT, "gpt", body(modalities=[["audio"], 1, None]), "text"),
        (CHAT, "gpt", b'{"mod\\u0061lities": ["\\u0061udio"]}', "voice"),
        (CHAT, "gpt", body(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}, AUDIO]}]), "voice"),
        (CHAT, "gpt", body(messages=[{"role": "user", "content": [{"type": "audio_url"}]}]), "voice"),
        (CHAT, "gpt", body(messages=[{"role": "user", "content": [{"type": "text", "text": "input_audio"}]}]), "text"),
        (CHAT, "gpt", body(messages=[{"role": "user", "content": "input_audio audio"}]), "text"),
        (CHAT, "gpt", body(messages=[{"content": ["audio", AUDIO]}]), "text"),  # no prompt: the engine says so
        (CHAT, "gpt", body(messages=["audio"]), "text"),
        (CHAT, "gpt", body(messages="audio"), "text"),
        (CHAT, "gpt", body(audio={"voice": "alloy"}), "text"),
        (b"/v1/responses", "gpt", body(input=[{"role": "user", "content": [AUDIO]}]), "voice"),
        (b"/v1/responses", "gpt", body(input="input_audio"), "text"),
        (
            b"/v1/responses",
            "gpt",
            body(input=[{"type": ["input_audio"]}, {"type": {}}, {"content": [{"type": []}]}]),
            "text",
        ),
        (b"/v1/responses", "gpt", body(input=[{"content": []}, {"content": None}, {"content": [{}]}, AUDIO]), "voice"),
        (b"/v1/responses", "gpt", body(input=[{"type": "input_audio"}]), "voice"),
        (COMPLETIONS, "llama", body(prompt="def f(", suffix="return x"), "code"),
        (COMPLETIONS, "llama", body(prompt="def f(", suffix=""), "text"),
        (COMPLETIONS, "llama", body(prompt="def f(", suffix=None), "text"),
        (COMPLETIONS, "llama", body(prompt="def f(", suffix=5), "text"),
        (COMPLETIONS, "llama", body(prompt="suffix"), "text"),
        (CHAT, "llama", body(suffix="x"), "text"),
        (COMPLETIONS, "llama", b'{"suff\\u0069x": "x"}', "code"),
        (CHAT, "CodeLlama-7b", b"{}", "code"),
        (CHAT, "qwen2.5-CODER", b"{}", "code"),
        (CHAT, "starcoder", b"{}", "code"),
        (CHAT, "infly/OpenCoder-8B", b"{}", "code"),
        (CHAT, "cross-encoder/ms-marco", b"{}", "text"),
        (CHAT, "encodec_24khz", b"{}", "text"),
        (CHAT, "decoder-only", b"{}", "text"),
        (CHAT, "bi_encoder-for-code", b"{}", "code"),
        (CHAT, "m" * MAX_TEXT + "code", b"{}", "text"),
        (COMPLETIONS, "coder", body(modalities=["audio"], suffix="x"), "voice"),
        (CHAT, "coder", b'{"messages": "audio', "code"),
        (CHAT, "gpt", b"[" * 5000 + b"audio", "text"),
        (CHAT, "gpt", b'{"messages": ' + b"[" * 5000 + b'"audio"' + b"]" * 5000 + b"}", "text"),
    ],
)
def test_a_modality_is_guessed_from_path_model_and_body(path: bytes, model: str, content: bytes, modality: str) -> None:
    assert modality_of(path, model, content) == modality
    try:
        whole = read_call(Api.CHAT, content).whole
    except SidecarError:
        return
    assert modality_of(path, model, content, whole) == modality


@given(st.binary(max_size=40), st.text(max_size=10), st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_a_modality_is_one_of_three_whatever_comes(path: bytes, model: str, content: bytes) -> None:
    for data in (content, b'{"modalities": ' + content + b"}", b'{"messages": [{"content": ["audio' + content):
        assert modality_of(path, model, data) in ("text", "voice", "code")


def test_a_large_body_is_soon_read() -> None:
    content = body(messages=[{"role": "user", "content": "all is audio " * 300_000}] * 2)
    began = process_time()
    for _ in range(3):
        assert modality_of(CHAT, "llama", content) == "text"
    assert process_time() - began < 1  # some 4 ms each


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages":[%b{}]}' % (b"{}," * 2_000_000),
        b'{"messages":[{"content":[%b{}]}]}' % (b"{}," * 2_000_000),
        b'{"modalities":[%b0],"messages":[]}' % (b"0," * 3_000_000),
        b'{"messages":[{"type":[%b0]}]}' % (b"0," * 3_000_000),
        b'{"suffix":[%b0],"messages":[]}' % (b"0," * 3_000_000),
        b'{"messages":[%b{}]}' % (b"{}," * 10_000_000),
    ],
    ids=["turns", "parts", "modalities", "a type", "a suffix", "too large"],
)
def test_a_body_that_is_made_to_be_read_for_long_is_not(content: bytes) -> None:
    began = process_time()
    assert modality_of(CHAT, "llama", content) == "text"
    assert process_time() - began < 0.2  # some 15 ms; 0.5 to 2 s where all of it is built


def test_a_word_of_audio_may_be_escaped() -> None:
    assert modality_of(CHAT, "llama", b'{"messages":[{"content":[{"type":"input_\\u0061udio"}]}]}') == "voice"
