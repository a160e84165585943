"""Every overlay, built by kustomize, is taken by Kubernetes and Istio and says what it means."""

import pytest

from tests.deploy import checks
from tests.deploy.objects import ISTIO, kustomize

FOLDERS = sorted(
    path.parent.relative_to(ISTIO).as_posix()
    for path in ISTIO.rglob("kustomization.yaml")
    if "kind: Component" not in path.read_text(encoding="utf-8") and path.parent.name != "candidate"
)


def test_the_overlays_are_all_there() -> None:
    wanted = {"request", "session", "node", "dev", "canary", "prod", "ambient"}
    assert {f"overlays/{name}" for name in wanted} | {"base", "injection/webhook"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_overlay_is_without_fault(folder: str) -> None:
    assert checks.faults(kustomize(ISTIO / folder)) == []
