"""URLs of servers: every form, what is wrong with the others, and that no password is ever shown."""

import pytest

from sidecar.txlog.target import PORT, SENTINEL_PORT, Address, Target, Tls, parse_target

SECRET = "s3cret/@:pass"
QUOTED = "s3cret%2F%40%3Apass"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://cache", Target((Address("cache", PORT),))),
        ("redis://cache:7000/3", Target((Address("cache", 7000),), db=3)),
        ("redis://cache?db=3", Target((Address("cache", PORT),), db=3)),
        ("redis://[::1]:7000", Target((Address("::1", 7000),))),
        ("redis://[fe80::1]/", Target((Address("fe80::1", PORT),))),
        (f"redis://me:{QUOTED}@cache", Target((Address("cache", PORT),), username="me", password=SECRET)),
        (f"redis://:{QUOTED}@cache", Target((Address("cache", PORT),), password=SECRET)),
        ("rediss://cache", Target((Address("cache", PORT),), tls=Tls())),
        (
            "rediss://cache:7000/1?ssl_ca_certs=/ca.pem&ssl_certfile=/me.pem&ssl_keyfile=/me.key&ssl_check_hostname=no",
            Target((Address("cache", 7000),), db=1, tls=Tls("/ca.pem", "/me.pem", "/me.key", check_name=False)),
        ),
        (
            "rediss://cache?ssl_cert_reqs=none",
            Target((Address("cache", PORT),), tls=Tls(check_name=False, verify=False)),
        ),
        ("unix:///run/log.sock", Target((Address(path="/run/log.sock"),))),
        ("unix:///a%20b?db=2", Target((Address(path="/a b"),), db=2)),
        (f"unix://me:{QUOTED}@/s", Target((Address(path="/s"),), username="me", password=SECRET)),
        (
            "redis+sentinel://a,b:7000/main",
            Target((Address("a", SENTINEL_PORT), Address("b", 7000)), master="main"),
        ),
        (
            f"rediss+sentinel://me:{QUOTED}@[::1]/main/2?sentinel_username=you&sentinel_password=other",
            Target(
                (Address("::1", SENTINEL_PORT),),
                db=2,
                tls=Tls(),
                master="main",
                username="me",
                password=SECRET,
                sentinel_username="you",
                sentinel_password="other",
            ),
        ),
    ],
)
def test_a_url_says_where_and_how(url: str, target: Target) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "begins with"),
        ("cache:6379", "begins with"),
        ("http://cache", "begins with"),
        ("redis:/cache", "begins with"),
        ("redis://", "no host"),
        ("redis://:6379", "no host"),
        ("redis://me:{secret}@", "no host"),
        ("redis://me:{secret}@cache:0", "1 to 65535"),
        ("redis://me:{secret}@cache:65536", "1 to 65535"),
        ("redis://me:{secret}@cache:x", "1 to 65535"),
        ("redis://[::1", "IPv6|IP"),
        ("redis://me:{secret}@cache/x", "a database"),
        ("redis://me:{secret}@cache/-1", "a database"),
        ("redis://me:{secret}@cache?password={secret}", "no option password"),
        ("redis://cache?ssl_ca_certs=/x", "no option ssl_ca_certs"),
        ("redis://cache?db=1&db=2", "twice"),
        ("rediss://cache?ssl_check_hostname=maybe", "yes or no"),
        ("rediss://cache?ssl_cert_reqs=optional", "required or none"),
        ("unix://cache/s", "unix:///PATH"),
        ("unix:///", "unix:///PATH"),
        ("redis+sentinel://a,b", "asked for a master"),
        ("redis+sentinel://a,,b/main", "no host"),
        ("redis://cache?sentinel_password={secret}", "no option sentinel_password"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse_target(url.format(secret=QUOTED))
    assert QUOTED not in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://me:{QUOTED}@cache/1", "redis://cache:6379"),
        (f"rediss://me:{QUOTED}@[::1]:7000", "rediss://[::1]:7000"),
        (f"unix://me:{QUOTED}@/s", "unix:///s"),
        (f"redis+sentinel://me:{QUOTED}@a,b/main", "redis+sentinel://a:26379,b:26379/main"),
    ],
)
def test_what_is_shown_has_no_password(url: str, shown: str) -> None:
    target = parse_target(url)
    assert str(target) == repr(target) == shown
    assert target.gives_away(f"unknown command AUTH, with args beginning with: me {SECRET}")
    assert not target.gives_away(shown)


def test_no_password_gives_nothing_away() -> None:
    assert not parse_target("redis://cache").gives_away("anything")


@pytest.mark.parametrize("url", ["redis://u:geheim\u2100x@h", "redis://u:geheim@[h", "redis://u:geheim@[::1"])
def test_what_is_no_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse_target(url)
    assert "geheim" not in str(refused.value)
