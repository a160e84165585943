"""Policy documents for the tests, from Python values: JSON is YAML, so `json.dumps` is all it takes."""

import json
from typing import Any

from sidecar.policy.load import PolicyErrors, load
from sidecar.policy.schema import Service, Snapshot

API = "sidecar/v1"
MESH_API = "resilience.example.com/v1"
INFRA_API = "infra.ai/v1"


def policy(*services: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": "Policy", "services": list(services), **changes}


def mesh(scope: str = "Session", name: str = "cb", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": MESH_API,
        "kind": "CircuitBreakerPolicy",
        "metadata": {"name": name},
        "spec": {"scope": scope, **spec},
    }


def llm_service(name: str = "llm", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": INFRA_API,
        "kind": "LLMService",
        "metadata": {"name": name},
        "spec": {"modelRef": "m", **spec},
    }


def token_quota(name: str = "tq", **spec: Any) -> dict[str, Any]:
    """Without a bound."""
    spec = {"tenant": "acme", **spec}
    return {"apiVersion": INFRA_API, "kind": "TokenQuota", "metadata": {"name": name}, "spec": spec}


def text(*documents: Any) -> bytes:
    return "\n---\n".join(json.dumps(document) for document in documents).encode()


def load_text(*documents: str | bytes, version: int = 1) -> Snapshot:
    """One file per document: `a.yaml`, `b.yaml` and so on."""
    files = [(f"{chr(97 + index)}.yaml", _bytes(document)) for index, document in enumerate(documents)]
    return load(files, version)


def load_documents(*documents: Any) -> Snapshot:
    return load([("a.yaml", text(*documents))], 1)


def load_service(**fields: Any) -> Service:
    return load_documents(policy({"name": "s", **fields})).services[0]


def faults(*documents: str | bytes) -> list[str]:
    """What is wrong with the files, each as `file:line: $.path: message`; empty if they load."""
    try:
        load_text(*documents)
    except PolicyErrors as errors:
        return [str(error) for error in errors.errors]
    return []


def faults_of(*documents: Any) -> list[tuple[str, str]]:
    """Path and message of each fault of documents given as values."""
    try:
        load_documents(*documents)
    except PolicyErrors as errors:
        return [(error.path, error.message) for error in errors.errors]
    return []


def _bytes(document: str | bytes) -> bytes:
    return document if isinstance(document, bytes) else document.encode()
