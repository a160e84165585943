"""Objects of Kubernetes itself through the schemas that PyPI's kubernetes-validate carries, in every release it has.

It reads a release's schemas anew for each object, half a second for a dozen releases: here they are read once.
"""

import functools
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import referencing
from jsonschema import Draft202012Validator
from kubernetes_validate import utils

from tests.deploy.objects import Object, called

OLDEST = (1, 29)


def _releases() -> list[str]:
    found = {utils.major_minor(each) for each in utils.all_versions()}
    numbers = sorted(tuple(int(part) for part in each.split(".")) for each in found)
    return [f"{major}.{minor}" for major, minor in numbers if (major, minor) >= OLDEST]


RELEASES = _releases()
"""The releases of Kubernetes that are checked, from 1.29, where native sidecars are on by default, to the newest."""


@functools.cache
def _definitions(release: str) -> referencing.Resource[Any]:
    contents = utils.schema_contents(f"{_folder(release)}/_definitions.json", release)
    return referencing.Resource.from_contents(contents)


@functools.cache
def _validator(release: str, kind: str, api_version: str) -> Draft202012Validator | None:
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    try:
        schema = utils.schema_contents(f"{_folder(release)}/{kind.lower()}-{name}.json", release)
    except FileNotFoundError:
        return None
    registry: referencing.Registry[Any] = _definitions(release) @ (
        referencing.Resource.from_contents(schema) @ referencing.Registry()
    )
    return Draft202012Validator(schema, registry=registry)


def _folder(release: str) -> str:
    # The package names its folders by the first patch release of each.
    versions = [each for each in utils.all_versions() if utils.major_minor(each) == release]
    return f"kubernetes-json-schema/v{versions[-1]}-local-strict"


def known(each: Object, release: str = RELEASES[-1]) -> bool:
    """Whether it is an object of Kubernetes itself."""
    return _validator(release, str(each.get("kind")), str(each.get("apiVersion"))) is not None


def faults(each: Object, release: str) -> list[str]:
    """What that release's API server would not take, unknown fields among them."""
    validator = _validator(release, str(each.get("kind")), str(each.get("apiVersion")))
    if validator is None:
        return [f"{called(each)}: Kubernetes {release} has no {each.get('kind')} of {each.get('apiVersion')}"]
    found = sorted(validator.iter_errors(each), key=lambda error: list(map(str, error.absolute_path)))
    return [f"{called(each)}: {error.json_path}: {_words(error)} ({release})" for error in found]


def _words(error: jsonschema.ValidationError) -> str:
    return error.message if len(error.message) < 300 else f"{error.message[:300]} ..."
