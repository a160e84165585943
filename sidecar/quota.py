"""The verbs of token budgets: `quota list` and `quota show`, by a sidecar's admin port.

What is shown is what that sidecar knows: of a tenant that it has not seen lately that is which quotas would hold it.
"""

import argparse
import os
from urllib.parse import quote, urlencode

import msgspec

from sidecar.kernel.count import counted
from sidecar.operate import (
    OK,
    Unanswered,
    admin_address,
    print_json,
    print_table,
    printable,
    unanswered,
    whole,
)
from sidecar.settings import UsageError

_HEAD = ("QUOTA", "WINDOW", "LIMIT", "USED", "LEFT", "AGE", "HELD", "RESERVED", "OWED", "REFUSED", "MODE")

_LIST_HEAD = (
    "QUOTA",
    "TENANT",
    "MODELS",
    "TOKENS/MIN",
    "TOKENS/DAY",
    "REQUESTS/MIN",
    "REQUESTS/DAY",
    "AT-A-TIME",
    "MODE",
    "LOG-AWAY",
    "USED-HERE",
    "REFUSED-HERE",
)


class LimitsTold(msgspec.Struct, frozen=True):
    """A quota of the policy within `GET /quotas`."""

    name: str
    tenant: str = "*"
    models: tuple[str, ...] = ("*",)
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    requests_per_minute: int | None = None
    requests_per_day: int | None = None
    concurrency: int | None = None
    mode: str = "enforce"
    when_log_away: str = "share"


class CountsTold(msgspec.Struct, frozen=True):
    """What a quota did, within `GET /quotas`."""

    settled_tokens: int = 0
    refused: dict[str, int] = {}
    shadow_refused: dict[str, int] = {}


class QuotaTold(msgspec.Struct, frozen=True):
    """A line of the quotas within `GET /quotas`."""

    quota: LimitsTold
    counts: CountsTold = CountsTold()


class WindowTold(msgspec.Struct, frozen=True):
    """A window within a budget."""

    window: str
    limit: int
    used: int = 0
    age_s: float | None = None
    left: int = 0
    held: int = 0
    owed: int = 0
    refused: int = 0
    room_s: float | None = None


class SlotsTold(msgspec.Struct, frozen=True):
    """A budget's requests under way."""

    limit: int
    here: int = 0
    may_be_here: int = 0
    in_use: int = 0
    age_s: float | None = None
    refused: int = 0


class BudgetTold(msgspec.Struct, frozen=True):
    """A budget of both pages."""

    tenant: str
    quota: str
    mode: str = ""
    seen: bool = True
    windows: list[WindowTold] = []
    slots: SlotsTold | None = None
    reserved: int = 0
    refused: int = 0


class QuotasTold(msgspec.Struct, frozen=True):
    """`GET /quotas`."""

    log: str
    members: int = 1
    tenants: int = 0
    quotas: list[QuotaTold] = []
    budgets: list[BudgetTold] = []


class TenantTold(msgspec.Struct, frozen=True):
    """`GET /quotas/<tenant>`."""

    tenant: str
    log: str
    members: int = 1
    seen: bool = False
    budgets: list[BudgetTold] = []


def ask(arguments: argparse.Namespace) -> int:
    """Run the query that `arguments` name; the exit code. UsageError for flags without sense."""
    address = admin_address(arguments.admin, os.environ)
    try:
        body = whole(address, "GET", _path(arguments))
        if arguments.json:
            print_json(body)
        elif arguments.query == "show":
            _show(msgspec.json.decode(body, type=TenantTold))
        else:
            _list(msgspec.json.decode(body, type=QuotasTold))
    except (Unanswered, msgspec.DecodeError) as exc:
        return unanswered(address, exc)
    return OK


def _path(arguments: argparse.Namespace) -> str:
    if arguments.query == "show":
        try:
            return f"/quotas/{quote(arguments.tenant, safe='')}"
        except UnicodeEncodeError as exc:
            raise UsageError("TENANT: what was typed is not UTF-8") from exc
    if not arguments.limit.isdecimal() or not arguments.limit.isascii() or not 1 <= int(arguments.limit[:5]) <= 1000:
        raise UsageError(f'--limit: "{arguments.limit[:40]}" is not a number from 1 to 1000')
    query = {"limit": arguments.limit} | ({"quota": arguments.quota} if arguments.quota else {})
    return f"/quotas?{urlencode(query)}"


def _show(page: TenantTold) -> None:
    name = printable(page.tenant) or "(no tenant)"
    if not page.budgets:
        print(f"{name}: no quota holds it")
        return
    if page.seen:
        print(f"{name}: {_log_words(page.log, page.members)}")
    else:
        print(f"{name}: not seen here lately; these would hold it ({_log_words(page.log, page.members)})")
    _print_budgets(page.budgets, named=False)


def _list(page: QuotasTold) -> None:
    if not page.quotas:
        print("the policy has no quotas")
        return
    rows = []
    for each in page.quotas:
        counts = each.counts
        refused = sum((counts.shadow_refused if each.quota.mode == "shadow" else counts.refused).values())
        limits = each.quota
        rows.append(
            (
                limits.name,
                limits.tenant,
                ",".join(limits.models),
                *(
                    "" if limit is None else str(limit)
                    for limit in (
                        limits.tokens_per_minute,
                        limits.tokens_per_day,
                        limits.requests_per_minute,
                        limits.requests_per_day,
                        limits.concurrency,
                    )
                ),
                limits.mode,
                limits.when_log_away,
                str(counts.settled_tokens),
                str(refused),
            )
        )
    print_table(_LIST_HEAD, rows)
    tenants = counted(page.tenants, "tenant")
    print(f"\n{tenants} seen here; {_log_words(page.log, page.members)}")
    if page.budgets:
        _print_budgets(page.budgets, named=True)


def _print_budgets(budgets: list[BudgetTold], *, named: bool) -> None:
    rows = []
    for budget in budgets:
        mode = budget.mode
        for window in budget.windows:
            row = (
                budget.quota,
                window.window,
                str(window.limit),
                str(window.used),
                str(window.left),
                _age(window.age_s),
                str(window.held),
                str(budget.reserved) if window.window.startswith("tokens") else "",
                str(window.owed),
                str(window.refused),
                mode,
            )
            rows.append((budget.tenant, *row) if named else row)
        slots = budget.slots
        if slots is not None:
            left = max(0, slots.limit - max(slots.in_use, slots.here))
            row = (
                budget.quota,
                "at a time",
                str(slots.limit),
                str(max(slots.in_use, slots.here)),
                str(left),
                _age(slots.age_s),
                str(slots.may_be_here),
                str(slots.here),
                "",
                str(slots.refused),
                mode,
            )
            rows.append((budget.tenant, *row) if named else row)
    print_table(("TENANT", *_HEAD) if named else _HEAD, rows)


def _log_words(log: str, members: int) -> str:
    sidecars = counted(members, "sidecar")
    if log == "up":
        return f"log up, {sidecars}"
    return f"log {log}: each of {sidecars} has its part" if members > 1 else f"log {log}, {sidecars}"


def _age(age_s: float | None) -> str:
    return "" if age_s is None else f"{age_s:.1f}s"
