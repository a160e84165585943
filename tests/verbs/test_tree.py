import argparse
from collections.abc import Iterator
from typing import get_args

import pytest

from sidecar.verbs.declare import Does
from sidecar.verbs.tree import tree


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """It, and those of all that may follow."""
    yield parser
    for action in parser._subparsers._actions if parser._subparsers is not None else ():
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


ALL = list(parsers(tree()))
VERBS = [each for each in ALL if each._subparsers is None]


def test_there_are_those_that_there_were() -> None:
    assert [each.prog.removeprefix("sidecar ") for each in VERBS] == [
        "run",
        "demo",
        "xds",
        "validate",
        "simulate",
        "inject",
        "webhook",
        "status",
        "drain",
        "admission",
        "quota show",
        "quota list",
        "breakers list",
        "breakers open",
        "breakers close",
        "breakers reset",
        "breakers hold",
        "log tail",
        "log show",
        "log replay",
        "routes list",
        "routes set",
        "canary status",
        "canary promote",
        "canary abort",
        "canary hold",
        "canary resume",
        "model load",
        "model unload",
        "model status",
        "version",
    ]


def test_help_names_every_verb_with_examples() -> None:
    text = tree().format_help()
    for each in VERBS:
        assert f"\n    {each.prog.split()[1]}" in text
    assert "sidecar run --upstream http://127.0.0.1:8000" in text


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.prog)
def test_every_verb_explains_itself_and_has_who_answers_it(verb: argparse.ArgumentParser) -> None:
    text = verb.format_help()
    assert f"usage: {verb.prog}" in text
    assert verb.get_default("verb") in get_args(Does)
    if verb.prog != "sidecar version":
        assert f"\n\nexamples:\n  {verb.prog}" in text


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: parser.prog)
def test_no_flag_may_be_abbreviated(parser: argparse.ArgumentParser) -> None:
    """One that is unique today would be another's tomorrow."""
    assert not parser.allow_abbrev


def test_what_asks_a_sidecar_takes_an_address_and_json() -> None:
    asks = [each for each in VERBS if each.get_default("query") is not None]
    assert len(asks) == 23
    for each in asks:
        assert {"--admin", "--json"} <= set(each._option_string_actions), each.prog
        assert "the sidecar's admin address" in each.format_help()
