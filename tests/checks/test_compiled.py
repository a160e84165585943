"""That what says it is compiled is, wholly, and its sources the ones beside it; and how the compiled tree is made."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from sidecar import installed
from sidecar.wire.sse import SseReader
from tests.checks import compiled
from tests.checks.drift import ROOT

NAMES = compiled.modules(ROOT)


def is_library(path: str | None) -> bool:
    return path is not None and path.endswith(tuple(EXTENSION_SUFFIXES))


def test_the_build_under_test_is_the_one_that_was_asked_for(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--compiled"):
        assert installed.compiled(), (
            "these are the plain modules: `make test-compiled` runs where the compiled ones are"
        )


@pytest.mark.parametrize("name", NAMES)
def test_all_of_the_path_is_compiled_or_none_is(name: str) -> None:
    module = importlib.import_module(name)
    assert is_library(module.__file__) is installed.compiled()
    assert Path(str(module.__file__)).is_relative_to(ROOT), "a package from elsewhere is tested"
    for member in vars(module).values():
        if getattr(member, "__module__", None) == name and callable(member) and not isinstance(member, type):
            assert inspect.isbuiltin(member) is installed.compiled(), member


def test_the_code_that_runs_is_no_python_where_it_is_compiled() -> None:
    assert inspect.isfunction(SseReader.feed) is not installed.compiled()


@pytest.mark.parametrize("folder", [ROOT, Path("/")], ids=["here", "elsewhere"])
def test_a_process_of_the_tests_runs_what_the_tests_run(folder: Path) -> None:
    command = [sys.executable, "-m", "sidecar", "version", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=50)
    assert json.loads(done.stdout)["compiled"] is installed.compiled()


def test_what_is_compiled_exists_and_is_told_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in NAMES)


# --- the tree ---------------------------------------------------------------------------------------------------------

SETUP = 'import os\nCOMPILED = ["sidecar/core/go.py"]\n'
"""Of a tree; the compiler, since it is no program, is one that makes an empty library, or none."""


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name, text in {
        "setup.py": SETUP,
        "pyproject.toml": "",
        "sidecar/__init__.py": "",
        "sidecar/core/__init__.py": "",
        "sidecar/core/go.py": "GO = 1\n",
        "tests/test_go.py": "",
        "build/other": "not copied",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_tree_is_what_the_sources_are(root: Path) -> None:
    tree = root / "build" / "compiled"
    compiled.copy(root, tree)
    assert files(tree) == files(root) - {"build/other"} - {f"build/compiled/{name}" for name in files(tree)}
    before = (tree / "sidecar/core/go.py").stat()
    (root / "tests/test_go.py").unlink()
    (root / "sidecar/core/new.py").write_text("")
    compiled.copy(root, tree)
    assert files(tree) >= {"sidecar/core/new.py"} and "tests/test_go.py" not in files(tree)
    assert (tree / "sidecar/core/go.py").stat() == before


def test_libraries_stay_when_the_sources_are_copied_again(root: Path) -> None:
    tree = root / "build" / "compiled"
    compiled.copy(root, tree)
    (tree / "sidecar/core/go.so").touch()
    compiled.copy(root, tree)
    assert (tree / "sidecar/core/go.so").exists()


@pytest.mark.parametrize("changed", ["setup.py", "sidecar/core/go.py", "sidecar/core/__init__.py", "pyproject.toml"])
def test_what_was_compiled_from_is_looked_at(root: Path, changed: str) -> None:
    assert compiled.stale(root)
    stamp(root)
    assert not compiled.stale(root)
    with (root / changed).open("a") as file:
        file.write("\n")
    assert compiled.stale(root)


def test_a_test_that_changes_needs_no_compiler(root: Path) -> None:
    stamp(root)
    (root / "tests/test_go.py").write_text("def test() -> None: ...\n")
    assert not compiled.stale(root)


def stamp(tree: Path) -> None:
    compiled.compile_in(tree)


def test_a_failed_build_tells_the_end_of_what_was_said_and_is_tried_again(root: Path) -> None:
    (root / "setup.py").write_text(SETUP + 'if __name__ == "__main__":\n    raise SystemExit("no compiler")\n')
    with pytest.raises(RuntimeError, match="no compiler"):
        compiled.compile_in(root)
    assert compiled.stale(root)


def test_other_modules_to_compile_leave_no_library_of_before(root: Path) -> None:
    stamp(root)
    library = root / "sidecar/core/old.so"
    library.touch()
    stamp(root)
    assert library.exists()
    (root / "setup.py").write_text(SETUP + "# another\n")
    stamp(root)
    assert not library.exists()


def test_what_comes_out_uncompiled_is_an_error(root: Path) -> None:
    with pytest.raises(RuntimeError, match=r"not compiled: sidecar\.core\.go"):
        compiled.build(root, root / "build" / "compiled")


def test_the_trees_interpreter_finds_the_trees_package_from_anywhere(root: Path) -> None:
    tree = root / "build" / "compiled"
    compiled.copy(root, tree)
    code = "import sidecar.core.go as go, msgspec, pytest; print(go.__file__)"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(compiled.interpreter(tree)), "-c", code]
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == str(tree / "sidecar/core/go.py")
