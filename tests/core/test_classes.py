"""Classes: who is named, who is matched, and that nothing a client sends makes it slow."""

from math import inf
from typing import Any

from sidecar.core.classes import Classes, QosClass
from sidecar.policy.load import load
from sidecar.policy.schema import QosMatch, QosPolicy
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
