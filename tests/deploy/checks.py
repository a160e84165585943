"""All that is asked of one rendering: by kustomize, by the chart, by `sidecar inject`."""

import functools
from pathlib import Path

from tests.deploy import crds, kubernetes, references, safety
from tests.deploy.objects import DEPLOY, Object, called

CHECKS = (*safety.CHECKS, *references.CHECKS)


@functools.cache
def _others() -> crds.Crds:
    ours = sorted((DEPLOY / "crds").glob("*.yaml"))
    return crds.of(Path(__file__).parent / "schemas" / "others.yaml", *(each for each in ours if _is_crd(each)))


def _is_crd(path: Path) -> bool:
    return "kind: CustomResourceDefinition" in path.read_text(encoding="utf-8")


def schema_faults(each: Object) -> list[str]:
    """What API servers of all releases, Istio and other owners of kinds would not take of an object."""
    for known in (crds.istio(), _others()):
        if known.known(each):
            return known.faults(each)
    if not kubernetes.known(each):
        return [f"{called(each)}: nobody knows {each.get('kind')} of {each.get('apiVersion')}"]
    return [fault for release in kubernetes.RELEASES for fault in kubernetes.faults(each, release)]


def faults(objects: list[Object]) -> list[str]:
    """Schemas first; what the schemas refuse is not looked at further."""
    found = [fault for each in objects for fault in schema_faults(each)]
    return found or [fault for check in CHECKS for fault in check(objects)]
