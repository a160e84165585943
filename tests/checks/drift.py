"""What the linters cannot see: files that must say what the code says, and modules that nobody tests.

`make lint` runs it; it prints one line per fault and exits with 1 if there is any.

1. `policies/schema.json` is what the policy types generate, and `sidecar/control/pb/` what the protocol does.
2. Every module of `sidecar/` that has code of its own has a test of its own, at the same path under `tests/`. A module
   of declarations alone (names, records, Protocols) has none: there is nothing in it that could fail.
3. What the documents refer to exists: the targets of relative links with their parts (`#here`), and the paths of this
   repository that they name.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sidecar.policy.json_schema import text
from tests.checks import proto

ROOT = Path(__file__).resolve().parents[2]

DOCUMENTS = ("*.md", "docs/**/*.md")

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
_HEADING = re.compile(r"^#+ (.*)$", re.M)
_NAMED = re.compile(r"`((?:sidecar|tests|bench|docs|policies|\.ci)/[A-Za-z0-9_./-]*)`")


def schema_drift(root: Path) -> Iterator[str]:
    """Whether the schema beside the policies is the one that the types generate."""
    path = root / "policies" / "schema.json"
    if not path.is_file() or path.read_text(encoding="utf-8") != text():
        yield "policies/schema.json is not what the policy types say: run `make schema`"


def untested_modules(root: Path) -> Iterator[str]:
    """Modules without a test of their own. There are no exceptions: what seems to need one wants to be split."""
    for path in sorted((root / "sidecar").rglob("*.py")):
        name = path.relative_to(root / "sidecar")
        test = Path("tests") / name.with_name(f"test_{name.name}")
        if path.name == "__main__.py" or (root / test).is_file():
            continue
        if has_code(path.read_text(encoding="utf-8")):
            yield f"sidecar/{name.as_posix()} has no test: {test.as_posix()} is missing"


def has_code(source: str) -> bool:
    """Whether a module has a function that does something: more than a docstring and `...`."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return any(not _is_declaration(statement) for function in functions for statement in function.body)


def _is_declaration(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def dead_references(root: Path) -> Iterator[str]:
    """Links and paths in the documents that lead nowhere."""
    for document in sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)}):
        shown = document.relative_to(root).as_posix()
        prose = document.read_text(encoding="utf-8")
        for target, part in sorted(set(_LINK.findall(prose))):
            there = document.parent / target if target else document
            if "://" in target:
                continue
            if not there.exists():
                yield f"{shown} links to {target}, which does not exist"
            elif part and there.suffix == ".md" and part not in parts_of(there.read_text(encoding="utf-8")):
                yield f"{shown} links to {target}#{part}, which has no such part"
        for named in sorted(set(_NAMED.findall(prose))):
            if not (root / named).exists():
                yield f"{shown} names {named}, which does not exist"


def parts_of(prose: str) -> set[str]:
    """What `#` may name in a document: its headings, as GitHub spells them."""
    said = (heading.replace("`", "") for heading in _HEADING.findall(_FENCED.sub("", prose)))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in said}


def main(root: Path = ROOT) -> int:
    """Prints every fault; the exit code."""
    faults = [*schema_drift(root), *proto.drift(root), *untested_modules(root), *dead_references(root)]
    for fault in faults:
        print(f"drift: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
