"""`sidecar quota list` and `sidecar quota show`: what they ask, and what they make of the answer."""

import json
from typing import Any

import pytest

from sidecar.cli import main
from tests.test_operate import Admin, admin

__all__ = ["admin"]

WINDOW = {
    "window": "tokens per minute",
    "limit": 1000,
    "used": 990,
    "age_s": 0.25,
    "left": 10,
    "held": 5,
    "owed": 0,
    "refused": 7,
}
SLOTS = {"limit": 4, "here": 1, "may_be_here": 2, "in_use": 3, "age_s": 0.25, "refused": 2}
BUDGET = {"tenant": "ann", "quota": "free", "mode": "enforce", "windows": [WINDOW], "reserved": 300, "refused": 7}
SHOWN = {"tenant": "ann", "log": "up", "members": 3, "seen": True, "budgets": [BUDGET | {"slots": SLOTS}]}
QUOTA = {"quota": {"name": "free", "tenant": "*", "tokens_per_minute": 1000}, "counts": {"refused": {"a": 3, "b": 4}}}
LISTED = {"log": "away", "members": 3, "tenants": 1, "quotas": [QUOTA], "budgets": [BUDGET]}


def run(admin: Admin, *arguments: str) -> int:
    return main(["quota", *arguments, "--admin", admin.address])


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_tenants_windows_are_a_table(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says(SHOWN)
    assert run(admin, "show", "a/n\n") == 0
    assert admin.seen == [("GET", "/quotas/a%2Fn%0A")]
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "ann: log up, 3 sidecars"
    assert rows(told)[2:] == [
        ["free", "tokens", "per", "minute", "1000", "990", "10", "0.2s", "5", "300", "0", "7", "enforce"],
        ["free", "at", "a", "time", "4", "3", "1", "0.2s", "2", "1", "-", "2", "enforce"],
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seen": False}, "ann: not seen here lately; these would hold it (log up, 3 sidecars)"),
        ({"budgets": []}, "ann: no quota holds it"),
        ({"log": "away"}, "ann: log away: each of 3 sidecars has its part"),
        ({"tenant": "\x1b[2J"}, "\\x1b[2J: log up, 3 sidecars"),
        ({"tenant": ""}, "(no tenant): log up, 3 sidecars"),
    ],
)
def test_what_is_known_of_a_tenant_is_said_first(
    admin: Admin, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    admin.says(SHOWN | changes)
    assert run(admin, "show", "ann") == 0
    assert capsys.readouterr().out.splitlines()[0] == words


def test_quotas_are_a_table_and_then_budgets(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says(LISTED)
    assert run(admin, "list", "--limit", "5", "--quota", "free") == 0
    assert admin.seen == [("GET", "/quotas?limit=5&quota=free")]
    told = capsys.readouterr().out
    assert rows(told)[1] == ["free", "*", "*", "1000", "-", "-", "-", "-", "enforce", "share", "0", "7"]
    assert "1 tenant seen here; log away: each of 3 sidecars has its part" in told
    admin.says({"log": "up"})
    assert run(admin, "list") == 0
    assert capsys.readouterr().out == "the policy has no quotas\n"


def test_json_is_what_the_page_says(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, page in ((["show", "ann"], SHOWN), (["list"], LISTED)):
        admin.says(page)
        assert run(admin, *verb, "--json") == 0
        assert json.loads(capsys.readouterr().out) == page


def test_a_refusal_and_a_stranger_fail(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.says({"error": {"message": "no such quota"}}, 404)
    assert run(admin, "list", "--quota", "none") == 1
    assert "refused with 404: no such quota" in capsys.readouterr().err
    admin.says(b"<html>")
    assert run(admin, "show", "ann") == 1
    assert "not the admin port of a sidecar" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "99999999999"])
def test_a_limit_that_means_nothing_is_a_usage_error(admin: Admin, limit: str) -> None:
    assert run(admin, "list", f"--limit={limit}") == 2
    assert admin.seen == []
