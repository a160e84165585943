"""How a verb is declared. What several verbs have, flags and all, is said here and nowhere else."""

import argparse
from typing import Literal, TypeAlias

Does: TypeAlias = Literal[
    "run",
    "demo",
    "xds",
    "validate",
    "simulate",
    "inject",
    "webhook",
    "ask",
    "quota",
    "release",
    "models",
    "log",
    "replay",
    "version",
]
"""Who answers a verb: `sidecar.cli` has a function for each."""

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def group(verbs: Verbs, name: str, words: str) -> Verbs:
    """A verb that is followed by another one, as in `routes list`."""
    parser = verbs.add_parser(name, help=words, allow_abbrev=False)
    return parser.add_subparsers(title="actions", metavar="ACTION", required=True)


def add(verbs: Verbs, name: str, does: Does, words: str, *examples: str, more: str = "") -> argparse.ArgumentParser:
    """A verb. `more`: what the help has to say before its examples; may be empty."""
    shown = "\n".join(("examples:", *(f"  {example}" for example in examples))) if examples else ""
    parser = verbs.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        epilog="\n\n".join(filter(None, (more.rstrip(), shown))) or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(verb=does)
    return parser


def add_query(
    verbs: Verbs,
    name: str,
    does: Does,
    words: str,
    *examples: str,
    query: str = "",
    json: str = "print JSON",
    more: str = "",
) -> argparse.ArgumentParser:
    """A verb that asks a running sidecar. `query`: what is asked, where its name does not say it."""
    parser = add(verbs, name, does, words, *examples, more=more)
    parser.set_defaults(query=query or name)
    parser.add_argument("--admin", metavar="HOST:PORT", help="the sidecar's admin address, or unix:///path")
    add_json(parser, json)
    return parser


def add_json(parser: argparse.ArgumentParser, words: str = "print JSON") -> None:
    """`--json`, of what prints something."""
    parser.add_argument("--json", action="store_true", help=words)


def add_by(parser: argparse._ActionsContainer, does: Literal["orders it", "asks"]) -> None:
    """`--by`, of what changes something."""
    parser.add_argument("--by", metavar="NAME", help=f"who {does} (default: the login name)")
