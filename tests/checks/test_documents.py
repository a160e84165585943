"""What the documents say in tables is what the code has: a word added here must be explained there."""

import argparse
import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from sidecar.adapters import TRANSLATORS
from sidecar.admin.routes import ORDERS
from sidecar.admin.routes import STATUS as STATUS_OF
from sidecar.admin.update import UpdateDocument
from sidecar.core.hot_update import DEADLINES
from sidecar.core.hot_update import Phase as UpdatePhase
from sidecar.core.table import Phase
from sidecar.kernel.errors import STATUS, Reason
from sidecar.kernel.outcome import DOCTRINE, Ending
from sidecar.policy.duration import format_seconds
from sidecar.policy.load import load
from sidecar.policy.schema import Adaptive, Deadlines, PlanDocument, PlanMargins, PlanStep, Seconds
from sidecar.settings import add_arguments
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.shapes import RequestLine
from sidecar.txlog.codec import Record
from sidecar.txlog.connect import WORDS
from sidecar.txlog.store import Verdict
from sidecar.verbs.tree import tree
from tests.checks.drift import ROOT

DOCS = ROOT / "docs"
HEAD = ("titles", "rule")  # lines of a table that are no rows of it
PROSE = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])


def rows(document: str, columns: int) -> list[list[str]]:
    """The lines of all tables of that many columns; cells as text, code marks removed."""
    lines = (DOCS / document).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return [row for row in cells if len(row) == columns]


def test_every_ending_has_its_row_of_the_doctrine() -> None:
    said = {row[0]: row[2:] for row in rows("outcomes.md", 6)}
    for ending in Ending:
        verdict = DOCTRINE[ending]
        reason = "-" if verdict.reason is None else verdict.reason.value
        resend = "yes" if verdict.resend else "no"
        assert said.get(ending.value) == [verdict.node.value, verdict.session.value, resend, reason], ending
    assert len(said) == len(Ending) + len(HEAD), "a row speaks of an ending that there is none"


def test_every_reason_is_explained_with_its_status() -> None:
    said = {row[0]: row[1] for row in rows("operations.md", 4) if row[1].isdigit()}
    assert said == {reason.value: str(STATUS[reason]) for reason in Reason}


def test_what_each_engine_can_do_is_what_its_translator_does_not_lack() -> None:
    lines = iter((DOCS / "engines.md").read_text(encoding="utf-8").splitlines())
    title, relayed, *columns = _cells(next(line for line in lines if line.startswith("| A request's")))
    engines = {"Triton": "triton", "MII": "deepspeed"}
    fronts = [(engines[name], front.strip("`")) for name, _, front in (column.partition(" ") for column in columns)]
    assert (title, relayed) == ("A request's", "vLLM")
    assert sorted(fronts) == sorted(TRANSLATORS), "a front that is translated has no column, or one that is not has"
    next(lines)
    said: dict[str, list[str]] = {}
    for line in lines:
        if not line:
            break
        what, *cells = _cells(line)
        for need in re.findall(r"`([a-z_]+)`", what):
            assert need not in said, f"{need} has two rows"
            said[need] = cells
    expected = {need: ["yes"] for need in ("chat", *(need for each in TRANSLATORS.values() for need in each.lacks))}
    for engine, front in fronts:
        translator = next(each for key, each in TRANSLATORS.items() if key == (engine, front))
        for need, cells in expected.items():
            if need == "chat":
                cells.append("yes" if translator.applies_template else "with `chat_template`")
            else:
                cells.append("no" if need in translator.lacks else "yes")
    assert said == expected


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_every_metric_is_explained_with_its_kind_and_labels() -> None:
    said = {row[0]: (row[1], row[2]) for row in rows("operations.md", 4) if row[1] in KINDS}
    metrics = Metrics("1")
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", asyncio.run(_exposition(metrics)), re.MULTILINE))
    ours = {name: kind for name, kind in kinds.items() if not name.startswith("process_")}
    assert ours
    for name, kind in ours.items():
        assert name in said, f"docs/operations.md has no row for {name}"
        assert said[name][0] == kind, name
    for family in metrics._families:
        assert said[family.name][1] == ", ".join(family.labels), family.name


KINDS = frozenset({"counter", "gauge", "summary", "histogram"})


async def _exposition(metrics: Metrics) -> str:
    from sidecar.core.fleet import Fleet
    from sidecar.core.quotas.quota import Ledger
    from sidecar.telemetry.live import WATCHED
    from tests.telemetry.test_jwt import Verifier
    from tests.telemetry.test_tokens import Counts

    metrics.watch_fleet(Fleet(lambda: 0.0), lambda: 0.0)
    metrics.watch_ledger(Ledger())
    metrics.watch_jwt(Verifier())
    metrics.watch_counter(Counts())
    for name in WATCHED:
        metrics.watch(name, lambda: 0.0)
    text, _ = await metrics.render()
    return text.decode()


def test_every_field_of_a_request_line_is_explained() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    for field in RequestLine.__struct_fields__:
        assert f"`{field}`" in text, field


def test_every_refusal_is_explained_with_its_status() -> None:
    said = {row[0]: row[1] for row in rows("routing.md", 3) if row[1].isdigit()}
    assert said == {code: str(status) for code, status in STATUS_OF.items()}


def test_every_key_of_a_plan_is_there_with_its_default_and_range() -> None:
    said = {row[0]: row[1:3] for row in rows("routing.md", 4) if len(row[2]) > 1}
    shown: dict[str, list[str]] = {}
    for kind, prefix in ((PlanDocument, ""), (PlanStep, "steps."), (PlanMargins, "margins.")):
        for field in msgspec.structs.fields(kind):
            default = field.default
            match msgspec.inspect.type_info(field.type):
                case msgspec.inspect.FloatType(ge=low, le=high) | msgspec.inspect.IntType(ge=low, le=high):
                    bounds = f"{low:.12g}-{high:.12g}"
                case msgspec.inspect.CustomType():
                    default, bounds = format_seconds(field.default), "1ms-7d"
                case msgspec.inspect.VarTupleType(max_length=most):
                    bounds = f"1-{most}"
                case msgspec.inspect.StructType():
                    continue
                case _:
                    bounds = "a version"
            none = default is msgspec.NODEFAULT
            shown[prefix + field.encode_name] = ["-" if none else f"{default}", bounds]
    assert {key: said.get(key) for key in shown} == shown


def test_every_phase_of_a_canary_and_every_order_is_explained() -> None:
    text = (DOCS / "routing.md").read_text(encoding="utf-8")
    assert set(get_args(Phase)) <= {row[0] for row in rows("routing.md", 2)}
    orders = text.partition("| `sidecar canary ...`")[2].partition("\n\n")[0]
    for order in ORDERS:
        assert re.search(rf"\b{order.replace('_', ' .*--')}\b", orders), order


def test_every_event_of_routes_and_canaries_is_explained() -> None:
    said = {word for row in rows("routing.md", 2) for word in row[0].split(", ")}
    files = ("rollouts.py", "routes.py", "zones.py", "core/zone.py", "core/down.py")
    source = "".join((ROOT / "sidecar" / name).read_text(encoding="utf-8") for name in files)
    told = set(re.findall(r'"((?:rollout|zones?|version|route)_[a-z_]+)"', source))
    told |= {f"rollout_{word}" for word in ("begun", "step", "resumed", *get_args(Phase)) if word != "running"}
    assert len(told) > 15 and told <= said


def test_every_member_of_an_update_is_explained() -> None:
    text = (DOCS / "routing.md").read_text(encoding="utf-8").partition("## Three doors")[2].partition("## Refusals")[0]
    for name in UpdateDocument.__struct_fields__:
        assert f'"{name}"' in text or f"`{name}`" in text, name


def test_every_verb_is_in_the_readme() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for verb in verbs(tree()):
        group, _, action = verb.partition(" ")
        assert any(f"`sidecar {group}" in line and re.search(rf"\b{action}\b", line) for line in lines), verb


def test_a_request_s_way_is_what_the_modules_import() -> None:
    text = (DOCS / "life-of-a-request.md").read_text(encoding="utf-8")
    arrows = [line.split(" -> ") for line in text.splitlines() if re.match(r"[a-z_/]+ +-> [a-z]", line)]
    assert len(arrows) > 10
    imported = {name: _imports(name) for name in {end.strip() for ends in arrows for end in ", ".join(ends).split(",")}}
    for asks, answer in ((asks.strip(), each.strip()) for asks, those in arrows for each in those.split(",")):
        assert answer in imported[asks], f"{asks} does not import {answer}"
        assert asks not in imported[answer], f"{answer} imports {asks} back"


def _imports(module: str) -> set[str]:
    """As paths below `sidecar/`."""
    source = (ROOT / "sidecar" / f"{module}.py").read_text(encoding="utf-8")
    found = re.findall(r"^from sidecar\.([a-z_.]+) import", source, re.M)
    return {each.replace(".", "/") for each in found}


def test_every_flag_of_run_has_its_row_and_its_variable() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said = {flag: row[1] for row in rows("operations.md", 4) for flag in row[0].split(", ") if flag.startswith("--")}
    for action in parser._actions:
        for flag in action.option_strings:
            if flag not in ("-h", "--help"):
                variable = f"SIDECAR_{flag[2:].upper().replace('-', '_')}"
                assert variable in said[flag] or f"...{variable[variable.rindex('_') :]}" in said[flag], flag


def test_every_admin_page_has_its_row() -> None:
    said = {page.split("?")[0] for row in rows("operations.md", 2) for page in re.findall(r"/[a-z][a-z/]*", row[0])}
    served = re.findall(r"""\.add_(?:get|post)\(\s*r?"(/[a-z/]*)""", ADMIN)
    assert len(served) > 20 and {page.rstrip("/") for page in served} <= {page.rstrip("/") for page in said}


ADMIN = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "sidecar" / "admin").glob("*.py")))


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500


def test_every_command_that_is_shown_could_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {line for document in PROSE for line in _commands(document.read_text(encoding="utf-8"))}
    shown |= {line for parser in _parsers(tree()) for line in _commands(f"```\n{parser.epilog or ''}\n```")}
    assert len(shown) > 90
    for line in sorted(shown):
        try:
            tree().parse_args(shlex.split(line, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{line}: {capsys.readouterr().err}")


def _commands(prose: str) -> Iterator[str]:
    """Ours, of its examples, without what the shell would do with them or a word about them."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", prose, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines() if language in ("", "bash") else ():
            for each in re.split(r" && | \| ", re.sub(r"\$\(.*?\)", "x", line.strip().removeprefix("$ "))):
                if re.match(r"sidecar [a-z]", each):
                    yield re.split(r"; | > |   +(?=[^ -])", each)[0]


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._subparsers._actions if parser._subparsers is not None else ():
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def verbs(parser: argparse.ArgumentParser) -> Iterator[str]:
    """`run`, `routes set`: what may be typed."""
    for action in parser._subparsers._actions if parser._subparsers is not None else ():
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from (f"{name} {deeper}".strip() for deeper in (list(verbs(below)) or [""]))


def test_the_documents_of_routing_name_metrics_that_there_are() -> None:
    known = set(re.findall(r"^# TYPE (\S+)", asyncio.run(_exposition(Metrics("1"))), re.MULTILINE))
    named = set()
    for document in DOCS.glob("*.md"):
        words = r"sidecar_(?:route|rollout|version|zone|control|xds)_[a-z_]*[a-z]"
        named |= set(re.findall(words, document.read_text(encoding="utf-8")))
    assert len(named) >= 10 and named <= known


def test_alerts_ask_for_metrics_and_labels_that_there_are() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    said = {row[0]: {label.strip() for label in row[2].split(",")} for row in rows("operations.md", 4)}
    known = set(re.findall(r"^# TYPE (\S+)", asyncio.run(_exposition(Metrics("1"))), re.MULTILINE))
    asked = re.findall(r"(sidecar_[a-z_]*[a-z])(?![a-z_*])(?:\{([^}]*)\})?", text)
    assert len(asked) > 100
    for name, matchers in asked:
        assert name in known, name
        for label in re.findall(r"([a-z_]+)(?:=|!=|=~|!~)\"", matchers):
            assert label in said[name], (name, label)


def test_every_deadline_is_there_with_its_default() -> None:
    said = {row[0]: row[1] for row in rows("life-of-a-request.md", 5)}
    for field, seconds in (
        (name.removesuffix("_s"), getattr(Deadlines(), name)) for name in Deadlines.__struct_fields__
    ):
        shown = f"{seconds / 60:g} m" if seconds >= 60 else f"{seconds:g} s"
        assert said.get(field) == shown, field


def test_every_number_of_the_detector_is_there_with_its_default_and_range() -> None:
    said = {row[0]: row[1:3] for row in rows("breakers.md", 4)}
    for field in msgspec.structs.fields(Adaptive):
        value = getattr(Adaptive(), field.name)
        match value:
            case Seconds():
                shown = [format_seconds(value), "1ms-1h"]
            case bool():
                shown = [str(value).lower(), "-"]
            case float() | int():
                bounds = msgspec.inspect.type_info(field.type)
                assert isinstance(bounds, msgspec.inspect.FloatType | msgspec.inspect.IntType)
                shown = [f"{value:g}", f"{bounds.ge:g}-{bounds.le:g}"]
            case str():
                shown = [value, "-"]
            case _:
                shown = ["all", "-"]
        assert said.get(field.encode_name) == shown, field.encode_name


def test_every_word_for_a_breaker_s_change_is_explained() -> None:
    said = {row[0] for row in rows("operations.md", 3)}
    # From the source: compiled classes keep no docstring.
    source = (ROOT / "sidecar" / "core" / "breaker.py").read_text(encoding="utf-8")
    words = re.findall(r"`(\w+)`", source.partition("bounded set (")[2].partition(")")[0])
    assert len(words) >= 12 and set(words) <= said


def test_every_word_that_the_log_writes_is_explained() -> None:
    said = {row[0] for row in rows("operations.md", 3)}
    source = (ROOT / "sidecar" / "txlog" / "replica.py").read_text(encoding="utf-8")
    bodies = r"""(?:_body\(breaker, |word, said = |self\.observer, )"(\w+)", """
    words = re.findall(bodies, source)
    assert {"waited", "proved", "probe_failed", "lease_expired", "inconclusive"} <= set(words)
    assert set(words) <= said


def test_every_event_of_the_log_is_explained() -> None:
    said = {row[0] for row in rows("txlog.md", 3) if row[0].startswith(("log_", "embedded_"))}
    files = ("logbook.py", "txlog/log.py", "txlog/embedded.py")
    source = "".join((ROOT / "sidecar" / name).read_text(encoding="utf-8") for name in files)
    assert said == set(re.findall(r'"((?:log|embedded)_\w+)"', source))


def test_every_cause_of_the_log_s_being_away_is_explained() -> None:
    said = {word for row in rows("txlog.md", 3) for word in row[0].split(", ")}
    assert WORDS | {"crashed", "closed"} <= said


def test_every_verdict_is_explained() -> None:
    assert {verdict.value for verdict in Verdict} <= {row[0] for row in rows("txlog.md", 3)}


def test_every_field_of_a_record_is_explained() -> None:
    said = {field for row in rows("txlog.md", 3) for field in row[0].split(", ") if row[1] in ("head", "body")}
    assert said == set(Record.__struct_fields__)


def test_the_rights_of_the_log_s_user_are_all_that_the_functions_call() -> None:
    text = (DOCS / "txlog.md").read_text(encoding="utf-8").partition("ACL SETUSER")[2].partition("```")[0]
    source = (ROOT / "sidecar" / "txlog" / "functions.lua").read_text(encoding="utf-8")
    called = set(re.findall(r"[^.]call\('(\w+)'", source))
    client = (ROOT / "sidecar" / "txlog" / "server.py").read_text(encoding="utf-8")
    asked = set(re.findall(r'\(b"([A-Z]+)"', client)) - {"SCRIPT", "SENTINEL", "BLOCK"}
    assert len(called) > 10 and len(asked) > 5
    assert called | asked <= {name.upper() for name in re.findall(r"\+(\w+)", text)}


def test_the_log_s_document_names_metrics_that_there_are() -> None:
    text = asyncio.run(_exposition(Metrics("1")))
    named = set(re.findall(r"sidecar_(?:log|breaker)_\w+", (DOCS / "txlog.md").read_text(encoding="utf-8")))
    assert len(named) >= 8 and named <= set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("document", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_policy_shown_loads_without_a_warning(document: Path) -> None:
    for number, block in enumerate(
        re.findall(r"```yaml\n(apiVersion:.*?)```", document.read_text(encoding="utf-8"), re.S)
    ):
        snapshot = load([(f"{document.name}#{number}", block.encode())], 1)
        if "services:" in block:
            assert snapshot.warnings == ()


def test_every_decision_is_short_and_has_its_three_parts() -> None:
    numbers = []
    for path in sorted((DOCS / "adr").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        numbers.append(int(path.name[:4]))
        assert text.startswith(f"# {path.name[:4]}: "), path
        assert re.findall(r"^## (\w+)$", text, re.M) == ["Context", "Decision", "Consequences"], path
        assert len(text.splitlines()) <= 50, path
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_changelog_has_the_version_that_is_built() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_step_and_phase_of_a_model_update_is_explained() -> None:
    said = {row[0] for row in rows("hot-update.md", 3)}
    assert set(DEADLINES) <= said
    phases = {row[0] for row in rows("hot-update.md", 2)}
    assert {*get_args(UpdatePhase), "interrupted"} <= phases
