import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.settings import Listen, Settings, UsageError, add_arguments, from_arguments, parse_listen


def read(*flags: str, **environ: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(flags), environ)


def test_nothing_given_gives_the_defaults() -> None:
    assert read() == Settings()
    assert read(PATH="/bin", HOME="/root") == Settings()
    assert (str(Settings().listen), str(Settings().admin)) == ("127.0.0.1:9400", "127.0.0.1:9401")


GIVEN: list[tuple[str, str, str, Any]] = [
    ("listen", "0.0.0.0:1", "listen", Listen("0.0.0.0", 1)),
    ("listen", "127.0.0.1:0", "listen", Listen("127.0.0.1", 0)),
    ("listen", ":9400", "listen", Listen("0.0.0.0", 9400)),
    ("listen", "[::1]:8080", "listen", Listen("::1", 8080)),
    ("listen", "localhost:8080", "listen", Listen("localhost", 8080)),
    ("admin", "off", "admin", None),
    ("admin", "127.0.0.1:0", "admin", Listen("127.0.0.1", 0)),
    ("admin", "unix:///run/admin.sock", "admin", Listen("", 0, "/run/admin.sock")),
    ("admin", "unix:/run/admin.sock", "admin", Listen("", 0, "/run/admin.sock")),
    ("upstream", "http://a:8000", "upstreams", ("http://a:8000",)),
    ("policy", "/etc/sidecar", "policy", Path("/etc/sidecar")),
    ("drain", "10m", "drain_s", 600.0),
    ("drain", "0", "drain_s", 0.0),
    ("settle", "0s", "settle_s", 0.0),
    ("settle", "250ms", "settle_s", 0.25),
    ("log-format", "json", "log_format", "json"),
    ("log-level", "debug", "log_level", "debug"),
    ("log-level", "WARN", "log_level", "warning"),
    ("access-log", "errors", "access_log", "errors"),
    ("max-connections", "1", "max_connections", 1),
    ("max-connections", "1000000", "max_connections", 1_000_000),
    ("control", "off", "listen", Settings().listen),
    ("redis", "local", "listen", Settings().listen),
]


@pytest.mark.parametrize(("flag", "text", "field", "value"), GIVEN)
def test_a_flag_and_its_variable_mean_the_same(flag: str, text: str, field: str, value: Any) -> None:
    variable = "SIDECAR_" + flag.upper().replace("-", "_")
    by_flag, by_variable = read(f"--{flag}", text), read(**{variable: text})
    assert by_flag == by_variable == msgspec.structs.replace(Settings(), **{field: value})


def test_every_flag_of_the_contract_exists_and_is_a_variable_too() -> None:
    flags = {flag for flag, *_ in GIVEN} | {"trusted", "tls-cert", "tls-key"}
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    declared = {option.removeprefix("--") for action in parser._actions for option in action.option_strings}
    assert declared == flags
    assert declared >= {"listen", "admin", "control", "upstream", "policy", "redis", "drain", "log-format"}


def test_a_flag_wins_over_its_variable() -> None:
    assert read("--drain", "1s", SIDECAR_DRAIN="2s").drain_s == 1
    assert read("--upstream", "http://a", SIDECAR_UPSTREAM="http://b").upstreams == ("http://a",)
    assert read("--log-level", "error", SIDECAR_LOG_LEVEL="debug", LOG_LEVEL="info").log_level == "error"


def test_an_empty_variable_is_an_absent_one() -> None:
    names = ("LISTEN", "ADMIN", "UPSTREAM", "POLICY", "DRAIN", "LOG_FORMAT", "REDIS", "CONTROL", "TRUSTED", "TLS_CERT")
    assert read(**{f"SIDECAR_{name}": "" for name in names}, LOG_LEVEL="") == Settings()


@pytest.mark.parametrize("text", ["http://a http://b", "http://a,http://b", " http://a ,\n http://b "])
def test_a_variable_may_hold_several_upstreams(text: str) -> None:
    assert read(SIDECAR_UPSTREAM=text).upstreams == ("http://a", "http://b")


def test_the_upstream_flag_may_be_repeated_and_keeps_its_order() -> None:
    assert read("--upstream", "http://b", "--upstream", "unix:///a").upstreams == ("http://b", "unix:///a")


def test_well_known_variables_are_read() -> None:
    settings = read(LOG_LEVEL="Warning", POD_NAME="p-0", NODE_NAME="gpu-1", ZONE="az-a", REDIS_URL="redis://nobody")
    assert settings == Settings(log_level="warning", pod_name="p-0", node_name="gpu-1", zone="az-a")
    assert read(LOG_LEVEL="debug", SIDECAR_LOG_LEVEL="error").log_level == "error"


def test_tls_takes_a_certificate_and_its_key() -> None:
    settings = read("--tls-cert", "/c.pem", SIDECAR_TLS_KEY="/k.pem")
    assert (settings.tls_cert, settings.tls_key) == (Path("/c.pem"), Path("/k.pem"))
    for half in (["--tls-cert", "/c.pem"], ["--tls-key", "/k.pem"]):
        with pytest.raises(UsageError, match="go together"):
            read(*half)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("YES", True), ("false", False), ("0", False)]
)
def test_trust_is_given_by_flag_or_variable(text: str, value: bool) -> None:
    assert read(SIDECAR_TRUSTED=text).trusted is value
    assert read("--trusted", SIDECAR_TRUSTED=text).trusted is True


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("listen", "9400", "has no port"),
        ("listen", "127.0.0.1", "has no port"),
        ("listen", "127.0.0.1:", "port that is not"),
        ("listen", "127.0.0.1:http", "port that is not"),
        ("listen", "127.0.0.1:65536", "port that is not"),
        ("listen", "127.0.0.1:-1", "port that is not"),
        ("listen", "::1:80", "host that is not"),
        ("listen", "[::1]", "host that is not|has no port|port that is not"),
        ("listen", "http://a:80", "host that is not"),
        ("listen", "a b:80", "host that is not"),
        ("listen", "off", "has no port"),
        ("listen", "unix:///run/a", "for --admin only"),
        ("admin", "on", "has no port"),
        ("admin", "unix://run/a", "absolute"),
        ("admin", "unix:///" + "a" * 107, "at most 107 bytes"),
        ("control", "127.0.0.1:9402", 'the only value is "off"'),
        ("redis", "redis://127.0.0.1", 'the only value is "local"'),
        ("redis", "embedded", 'the only value is "local"'),
        ("upstream", "127.0.0.1:8000", "is not one of http://"),
        ("upstream", "http://a/v1", "has a path"),
        ("drain", "120", "is not a duration"),
        ("drain", "2h", "1ms.* to .*1h"),
        ("settle", "-1s", "is not a duration"),
        ("log-format", "xml", "is not one of console, json"),
        ("log-level", "loud", "is not one of debug"),
        ("access-log", "some", "is not one of off, errors, all"),
        ("max-connections", "0", "1 to 1000000"),
        ("max-connections", "1000001", "1 to 1000000"),
        ("max-connections", "many", "1 to 1000000"),
        ("max-connections", "9" * 5000, "1 to 1000000"),
    ],
)
def test_what_means_nothing_is_refused_and_names_its_source(flag: str, text: str, words: str) -> None:
    variable = "SIDECAR_" + flag.upper().replace("-", "_")
    with pytest.raises(UsageError, match=words) as by_flag:
        read(f"--{flag}={text}")
    assert str(by_flag.value).startswith(f"--{flag}: ")
    with pytest.raises(UsageError, match=words) as by_variable:
        read(**{variable: text})
    assert str(by_variable.value).startswith(f"{variable}: ")


@pytest.mark.parametrize(("name", "value"), [("SIDECAR_TRUSTED", "maybe"), ("LOG_LEVEL", "loud")])
def test_a_variable_without_a_flag_of_its_kind_is_named_too(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: "):
        read(**{name: value})


@pytest.mark.parametrize("text", ["127.0.0.1:9400", "[::1]:9400", "localhost:0", "unix:///run/a.sock"])
def test_a_place_to_listen_at_reads_back(text: str) -> None:
    assert str(parse_listen(text, "--admin")) == text
