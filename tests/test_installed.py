"""What is installed. Whether what says it is compiled is: tests/checks/test_compiled.py."""

import importlib.metadata

import pytest

from sidecar import installed


def test_a_tree_that_was_never_installed_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert installed.number() != "unknown"
    monkeypatch.setattr(installed, "version", nowhere)
    assert installed.number() == "unknown"


def test_a_package_without_a_request_path_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_OF_THE_PATH", "sidecar.nowhere")
    assert not installed.compiled()
