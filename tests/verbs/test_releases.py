import pytest

from sidecar.verbs.tree import tree


@pytest.mark.parametrize(
    ("line", "does", "query"),
    [
        ("routes list", "release", "list"),
        ("routes set chat v2 --weight 0.1 --by ann", "release", "set"),
        ("canary status chat --watch", "release", "status"),
        ("canary promote --full --by ann", "release", "promote"),
        ("canary abort chat --by ann", "release", "abort"),
        ("model load llama --timeout drain=1h --timeout load=5m --no-wait --by ann", "models", "load"),
        ("model unload llama --sleep --by ann", "models", "unload"),
        ("model status", "models", "status"),
    ],
)
def test_who_answers_and_what_is_asked(line: str, does: str, query: str) -> None:
    arguments = tree().parse_args(line.split())
    assert (arguments.verb, arguments.query) == (does, query)
    assert arguments.admin is None and arguments.json is False
    if "--by" in line:
        assert arguments.by == "ann"


def test_what_may_be_repeated_is_a_list() -> None:
    line = "routes set chat v2 --endpoint http://a --endpoint http://b --model m --compatible 0a --signature a=b"
    arguments = tree().parse_args(line.split())
    assert arguments.endpoint == ["http://a", "http://b"]
    assert (arguments.model, arguments.compatible, arguments.signature) == (["m"], ["0a"], ["a=b"])
    # Of another line nothing is left.
    assert tree().parse_args(["routes", "set", "chat", "v2"]).endpoint == []


@pytest.mark.parametrize("line", ["canary abort --full", "model load", "model load m --old gone", "routes set chat"])
def test_what_means_nothing_is_refused(line: str) -> None:
    with pytest.raises(SystemExit) as raised:
        tree().parse_args(line.split())
    assert raised.value.code == 2
