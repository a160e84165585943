from pathlib import Path

import pytest

from tests.checks import lock

ROOT = Path(__file__).resolve().parents[2]
HASH, OTHER = f" \\\n    --hash=sha256:{'0' * 64}", f" \\\n    --hash=sha256:{'1' * 64}"
MSGSPEC, YAML, MYPY = f"msgspec==0.23.0{HASH}\n", f"pyyaml==6.0.4{HASH}{OTHER}\n", f"mypy==2.4.1{HASH}\n"


def tree(root: Path, run: str, build: str) -> Path:
    (root / "pyproject.toml").write_text(
        '[project]\ndependencies = ["msgspec>=0.23,<0.24", "PyYAML>=6.0.2,<7", "tzdata; sys_platform == \'none\'"]\n'
        '[project.optional-dependencies]\ncompile = ["mypy>=2.4.1,<2.5"]\n'
    )
    (root / lock.RUN).write_text(run)
    (root / lock.BUILD).write_text(build)
    return root


def test_the_lock_files_are_of_this_project() -> None:
    assert list(lock.drift(ROOT)) == []


@pytest.mark.parametrize(
    ("run", "build", "told"),
    [
        pytest.param(MSGSPEC + YAML, MYPY, [], id="in order"),
        pytest.param("# why\n" + MSGSPEC + YAML, MYPY, [], id="comment"),
        pytest.param(MSGSPEC, MYPY, ["requirements.lock: PyYAML is not pinned"], id="missing"),
        pytest.param(
            MSGSPEC + YAML, MSGSPEC + YAML, ["requirements-build.lock: mypy is not pinned"], id="missing to compile"
        ),
        pytest.param(
            f"msgspec==0.24.1{HASH}\n" + YAML,
            MYPY,
            ["requirements.lock: msgspec 0.24.1 is not"],
            id="does not fit",
        ),
        pytest.param(
            MSGSPEC + YAML,
            f"msgspec==0.23.0{OTHER}\n" + MYPY,
            ["requirements-build.lock: msgspec is another one"],
            id="other hashes",
        ),
        pytest.param(
            MSGSPEC + YAML + "extra==1\n",
            MYPY,
            ["requirements.lock: not a pin with hashes: extra==1"],
            id="no hash",
        ),
        pytest.param(
            "--index-url https://index.invalid/simple\n" + MSGSPEC + YAML,
            MYPY,
            ["requirements.lock: not a pin with hashes: --index-url"],
            id="an address",
        ),
    ],
)
def test_faults_are_told(tmp_path: Path, run: str, build: str, told: list[str]) -> None:
    faults = list(lock.drift(tree(tmp_path, run, build)))
    assert [fault[: len(start)] for fault, start in zip(faults, told, strict=False)] == told
    assert len(faults) >= len(told) and (told or not faults)


def test_a_dependency_that_cannot_be_read_is_told() -> None:
    assert list(lock.missing({}, ["a b"]))
