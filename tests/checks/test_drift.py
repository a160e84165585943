import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.policy.json_schema import text
from tests.checks import drift

CODE = '"""Does."""\n\n\ndef go() -> int:\n    """Go."""\n    return 1\n'


def tree(root: Path, files: dict[str, str]) -> Path:
    """A repository of these files, with a schema that is right unless they say otherwise."""
    for name, content in {"policies/schema.json": text(), "sidecar/__init__.py": '"""Ours."""\n', **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def faults(root: Path) -> list[str]:
    return [*drift.schema_drift(root), *drift.untested_modules(root), *drift.dead_references(root)]


def test_a_tree_in_order_has_no_fault(tmp_path: Path) -> None:
    files = {"sidecar/core/go.py": CODE, "tests/core/test_go.py": "", "README.md": "[go](sidecar/core/go.py)"}
    assert faults(tree(tmp_path, files)) == []


@pytest.mark.parametrize("content", ["", "{}", text().replace("60", "61", 1), text().rstrip("\n")])
def test_a_schema_other_than_generated_is_told(tmp_path: Path, content: str) -> None:
    (fault,) = faults(tree(tmp_path, {"policies/schema.json": content}))
    assert "make schema" in fault


def test_a_missing_schema_is_told(tmp_path: Path) -> None:
    tree(tmp_path, {})
    (tmp_path / "policies" / "schema.json").unlink()
    assert len(faults(tmp_path)) == 1


@pytest.mark.parametrize("name", ["go.py", "core/go.py", "core/deep/go.py"])
def test_a_module_without_its_test_is_told_with_the_place_of_the_test(tmp_path: Path, name: str) -> None:
    (fault,) = faults(tree(tmp_path, {f"sidecar/{name}": CODE}))
    assert f"sidecar/{name} has no test" in fault
    assert f"tests/{name}".replace("go.py", "test_go.py") in fault


def test_a_test_at_another_path_does_not_count(tmp_path: Path) -> None:
    assert len(faults(tree(tmp_path, {"sidecar/core/go.py": CODE, "tests/test_go.py": ""}))) == 1


def test_a_package_with_code_in_its_init_needs_a_test(tmp_path: Path) -> None:
    assert len(faults(tree(tmp_path, {"sidecar/core/__init__.py": CODE}))) == 1


def test_the_program_entry_needs_no_test(tmp_path: Path) -> None:
    assert faults(tree(tmp_path, {"sidecar/__main__.py": CODE})) == []


@pytest.mark.parametrize(
    ("source", "has"),
    [
        pytest.param("", False, id="empty"),
        pytest.param('"""Names."""\nfrom typing import NewType\n\nKey = NewType("Key", str)\n', False, id="names"),
        pytest.param("class Record:\n    size: int = 0\n", False, id="record"),
        pytest.param("class Port:\n    def go(self) -> None: ...\n", False, id="protocol"),
        pytest.param('class Port:\n    def go(self) -> None:\n        """Go."""\n', False, id="documented protocol"),
        pytest.param("class Port:\n    async def go(self) -> None: ...\n", False, id="async protocol"),
        pytest.param("def go():\n    pass\n", True, id="function"),
        pytest.param("async def go():\n    return 1\n", True, id="coroutine"),
        pytest.param("class Thing:\n    def go(self):\n        return 1\n", True, id="method"),
        pytest.param("class Port:\n    def a(self): ...\n    def b(self):\n        return 1\n", True, id="one of two"),
        pytest.param("if True:\n    def go():\n        return 1\n", True, id="nested"),
    ],
)
def test_declarations_are_no_code(source: str, has: bool) -> None:
    assert drift.has_code(source) is has


@pytest.mark.parametrize(
    ("prose", "count"),
    [
        pytest.param("[a](docs/a.md) [b](docs/a.md#a-part-of-it) [d](https://example.com/x#y)", 0, id="good links"),
        pytest.param("# Here\n[c](#here)", 0, id="a part of its own"),
        pytest.param("[c](#here) [b](docs/a.md#part)", 2, id="dead parts"),
        pytest.param("```\n# Here\n```\n[c](#here)", 1, id="a comment of an example is no part"),
        pytest.param("[a](docs/gone.md)", 1, id="dead link"),
        pytest.param("[a](docs/gone.md#part)", 1, id="dead link with a part"),
        pytest.param("`sidecar/core/go.py` and `docs/`", 0, id="good names"),
        pytest.param("`sidecar/core/gone.py`", 1, id="dead name"),
        pytest.param("`/run/sidecar/admin.sock` `sidecar run` `proxy/`", 0, id="names of other things"),
        pytest.param("`tests/a.py` and [x](b.md)", 2, id="both"),
    ],
)
def test_dead_references_are_told(tmp_path: Path, prose: str, count: int) -> None:
    files = {"README.md": prose, "docs/a.md": "[up](../README.md)\n## A `part`, of it", "sidecar/core/go.py": ""}
    assert len(faults(tree(tmp_path, files))) == count


def test_links_are_read_from_where_their_document_stands(tmp_path: Path) -> None:
    (fault,) = faults(
        tree(tmp_path, {"README.md": "", "docs/adr/0001-x.md": "[up](../README.md) [up](../../README.md)"})
    )
    assert fault.startswith("docs/adr/0001-x.md links to ../README.md")


def test_faults_are_printed_and_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(tree(tmp_path, {"sidecar/go.py": CODE})) == 1
    assert capsys.readouterr().err.startswith("drift: sidecar/go.py has no test")
    tree(tmp_path, {"tests/test_go.py": ""})
    assert drift.main(tmp_path) == 0


def test_it_runs_as_a_script() -> None:
    command = [sys.executable, "-m", "tests.checks.drift"]
    found = subprocess.run(command, cwd=drift.ROOT, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    assert all(line.startswith("drift: ") for line in found.stderr.splitlines()), found.stderr
