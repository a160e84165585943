"""That the lock files are of the dependencies in pyproject.toml; nothing is asked of any index.

    python -m tests.checks.lock EXTRA   what an extra asks for, one a line: what `make lock` pins without the rest

1. Every dependency is pinned to a version that it allows: those of a run in `requirements.lock`, those of the extra
   `compile` in `requirements-build.lock`.
2. Every pin has hashes, and there is nothing else: no option, address or version that only a machine of ours has.
3. A package in both has the same version and the same hashes.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
RUN, BUILD = "requirements.lock", "requirements-build.lock"

Pins = dict[str, tuple[str, frozenset[str]]]
"""Version and hashes by the package's normal name."""

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)")


def drift(root: Path) -> Iterator[str]:
    """One line for each fault."""
    wanted = {RUN: dependencies(root), BUILD: dependencies(root, "compile")}
    found: dict[str, Pins] = {}
    for name, asked in wanted.items():
        found[name], faults = pins((root / name).read_text(encoding="utf-8"))
        yield from (f"{name}: {fault}" for fault in faults)
        yield from (f"{name}: {fault}: run `make lock`" for fault in missing(found[name], asked))
    for package in found[RUN].keys() & found[BUILD].keys():
        if found[RUN][package] != found[BUILD][package]:
            yield f"{BUILD}: {package} is another one than in {RUN}: run `make lock`"


def dependencies(root: Path, extra: str = "") -> list[str]:
    """What pyproject.toml asks for: the package's own, or those of an extra alone."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return found


def pins(text: str) -> tuple[Pins, list[str]]:
    """The pins of a lock file, and what is in it besides."""
    found: Pins = {}
    faults = []
    for line in filter(None, (each.strip() for each in re.sub(r"\s*\\\n\s*", " ", text).splitlines())):
        if line.startswith("#"):
            continue
        match = _PIN.fullmatch(line)
        if match is None:
            faults.append(f"not a pin with hashes: {line[:60]}")
            continue
        found[canonicalize_name(match["name"])] = match["version"], frozenset(match["hashes"].split())
    return found, faults


def missing(found: Pins, asked: list[str]) -> Iterator[str]:
    """The dependencies that no pin meets."""
    for each in asked:
        try:
            wanted = Requirement(each)
        except InvalidRequirement as exc:
            yield str(exc)
            continue
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        version, _ = found.get(canonicalize_name(wanted.name), (None, None))
        if version is None:
            yield f"{wanted.name} is not pinned"
        elif not wanted.specifier.contains(version, prereleases=True):
            yield f"{wanted.name} {version} is not {wanted.specifier}"


if __name__ == "__main__":
    print(*dependencies(ROOT, *sys.argv[1:]), sep="\n")
