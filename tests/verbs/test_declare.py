import argparse

import pytest

from sidecar.verbs.declare import Verbs, add, add_by, add_json, add_query, group


@pytest.fixture
def top() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="sidecar", allow_abbrev=False)


@pytest.fixture
def verbs(top: argparse.ArgumentParser) -> Verbs:
    return top.add_subparsers()


def test_help_ends_with_what_is_to_be_said_and_then_examples(verbs: Verbs) -> None:
    both = add(verbs, "go", "run", "go on", "sidecar go", "sidecar go -x", more="There is more.\n")
    assert both.format_help().endswith("\n\nThere is more.\n\nexamples:\n  sidecar go\n  sidecar go -x\n")
    assert "\nGo on.\n" in both.format_help()


@pytest.mark.parametrize(("examples", "more"), [((), ""), ((), "More."), (("sidecar go",), "")])
def test_what_is_not_there_leaves_no_gap(verbs: Verbs, examples: tuple[str, ...], more: str) -> None:
    text = add(verbs, "go", "run", "go on", *examples, more=more).format_help()
    assert "\n\n\n" not in text and ("examples:" in text) is bool(examples) and ("More." in text) is bool(more)


def test_a_query_s_name_is_what_is_asked_where_nothing_else_is(top: argparse.ArgumentParser, verbs: Verbs) -> None:
    actions = group(verbs, "lights", "lights of the house")
    add_query(actions, "list", "ask", "every light")
    order = add_query(actions, "dim", "ask", "make it darker", query="order")
    add_by(order, "orders it")
    told = top.parse_args(["lights", "list", "--admin", "a:1", "--json"])
    assert (told.verb, told.query, told.admin, told.json) == ("ask", "list", "a:1", True)
    told = top.parse_args(["lights", "dim", "--by", "ann"])
    assert (told.query, told.by, told.json) == ("order", "ann", False)
    assert "who orders it (default: the login name)" in order.format_help()


def test_a_group_alone_is_not_enough(top: argparse.ArgumentParser, verbs: Verbs) -> None:
    add(group(verbs, "lights", "lights of the house"), "list", "ask", "every light")
    with pytest.raises(SystemExit) as raised:
        top.parse_args(["lights"])
    assert raised.value.code == 2


def test_json_may_say_what_it_prints(verbs: Verbs) -> None:
    parser = add(verbs, "go", "run", "go on")
    add_json(parser, "print a JSON object a line")
    assert "print a JSON object a line" in parser.format_help()
