"""What the image promises, as far as it can be read off its Dockerfile."""

import re

import pytest

from sidecar.settings import DEFAULT_ADMIN, DEFAULT_CONTROL, DEFAULT_LISTEN
from tests.checks.drift import ROOT

TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)
BUILD, LAST = re.split(r"^FROM ", TEXT, flags=re.M)[1:]


def test_last_stage_installs_nothing() -> None:
    assert not re.search(r"apt|pip|gcc", LAST.replace("ensurepip", ""))
    assert all("compileall" in run for run in re.findall(r"^RUN .*", LAST, re.M))
    assert "COPY --from=build" in LAST


def test_what_it_runs_is_compiled_and_all_else_is_known_by_its_hash() -> None:
    assert re.search(r"^RUN SIDECAR_COMPILE=1 \S+pip wheel --no-build-isolation .*--wheel-dir /wheels \.", BUILD, re.M)
    installs = re.findall(r"pip(?: --python \S+)? install ([^&\\\n]+)", BUILD)
    assert len(installs) == 3 and sum("--require-hashes" in each for each in installs) == 2
    assert [each for each in installs if "--require-hashes" not in each] == [
        "--no-index --no-deps --no-compile /wheels/*.whl "
    ]


def test_both_stages_have_the_same_python() -> None:
    assert re.findall(r"^ARG \w+=python:(\d+\.\d+)-", TEXT, re.M) == ["3.11", "3.11"]


def test_user_is_a_number_and_not_root_nor_istios() -> None:
    (user, group) = re.findall(r"^USER (\d+):(\d+)$", LAST, re.M)[0]
    assert 1000 < int(user) != 1337
    assert 1000 < int(group) != 1337


@pytest.mark.parametrize(
    ("variable", "default"),
    [("SIDECAR_LISTEN", DEFAULT_LISTEN), ("SIDECAR_ADMIN", DEFAULT_ADMIN), ("SIDECAR_CONTROL", DEFAULT_CONTROL)],
)
def test_it_listens_on_every_interface_at_the_usual_ports(variable: str, default: str) -> None:
    port = default.rpartition(":")[2]
    assert f"{variable}=:{port}" in LAST
    assert re.search(rf"^EXPOSE .*\b{port}\b", LAST, re.M)


def test_it_stops_by_draining_and_its_health_is_liveness() -> None:
    assert "\nSTOPSIGNAL SIGTERM\n" in LAST
    assert 'CMD ["sidecar", "status", "--live"]' in LAST.partition("HEALTHCHECK")[2]


def test_only_what_is_built_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = {line[1:] for line in lines if line[0] == "!"}
    copied = set(" ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", BUILD, re.M)).split())
    assert lines[0] == "*"
    assert sent == copied
    assert all((ROOT / name).exists() for name in sent)
