"""Which container is the engine, what it speaks, at which port, and whether it listens on loopback.

1. The annotation says which container; else what its command and its image's name say; of several the one with a GPU.
   Where nothing says it: the only one with a GPU, else the only one with port 8000. Nobody guesses between two.
2. An image's tag says nothing: Triton's images have vLLM in theirs.
3. A command line can be read and lengthened where it is given in words and the engine is the program that runs. That
   of a shell, of a user's script, or of the image itself cannot: the engine's address stays, and that is told.
4. An address that the user wrote stays. One of loopback is what is wanted; another one is told.
5. What a command line names by a variable is looked up in the container's own. A port that is said and cannot be read
   is asked for: one that is guessed wrong is a sidecar that finds nobody.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, get_args

import msgspec

from sidecar.inject.names import BIND, ENGINE, ENGINE_CONTAINER, ENGINE_PORT, LOOPBACK, NAME
from sidecar.inject.shapes import Container

Kind = Literal["vllm", "triton", "deepspeed"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)

DEFAULT_PORT: Final = 8000
"""Of vLLM, of Triton's HTTP front and of MII's own servers alike."""

GRPC_PORT: Final = 8001
METRICS_PORT: Final = 8002
MESH: Final = frozenset({"istio-init", "istio-validation", "istio-proxy", "linkerd-init", "linkerd-proxy"})

Address = Literal["loopback", "bind", "open"]
"""It listens there already; it is to be told so; or it stays where it is."""

_IMAGES: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("triton", re.compile(r"triton")),
    ("vllm", re.compile(r"vllm")),
    ("deepspeed", re.compile(r"deepspeed|(?<![a-z])mii(?![a-z])")),
)
_WORDS: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("triton", re.compile(r"(?<![\w./-])(?:[\w./-]*/)?tritonserver(?![\w.-])|openai_frontend")),
    ("deepspeed", re.compile(r"(?<![\w./-])(?:mii\.(?:entrypoints|serve)[\w.]*|(?:[\w./-]*/)?deepspeed(?![\w./-]))")),
    ("vllm", re.compile(r"(?<![\w./-])(?:(?:[\w./-]*/)?vllm(?![\w./-])|vllm\.entrypoints[\w.]*)")),
)
_FRONT: Final = "openai_frontend"
_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_GPU: Final = re.compile(r"(?:^|[./])(?:gpu|mig-|tpu|neuron|gaudi)")
_LOOPBACK: Final = re.compile(r"127\.[0-9.]+|localhost|::1|\[::1\]")
_VARIABLE: Final = re.compile(r"(?<!\$)\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
"""What Kubernetes puts a variable's value for, in words of `command` and `args`."""
_SHELL_VARIABLE: Final = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)(?::?-([^{}$]*))?\}|([A-Za-z_][A-Za-z0-9_]*))")
_ELSEWHERE: Final[dict[str, str]] = {
    "--uds": "listens at a unix socket, which no other container sees",
    "--ssl-keyfile": "speaks TLS, which nobody needs within a pod, and the sidecar speaks HTTP with it",
}
"""Flags of vLLM with which the sidecar never reaches it."""


class Engine(msgspec.Struct, frozen=True):
    """A pod's engine. `container`: its place among them. `more`: what its command line needs to listen on loopback.
    `closed`: the ports that only the pod itself reaches afterwards. `why`: what to tell where it stays open."""

    container: int
    name: str
    kind: Kind
    port: int
    address: Address
    more: tuple[str, ...] = ()
    closed: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


class Unclear(Exception):
    """Which one it is cannot be told; in words that say what to write. `absent`: nothing looks like an engine."""

    def __init__(self, message: str, *, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


def find(containers: Sequence[Container], said: dict[str, str]) -> Engine:
    """The engine among a pod's containers, of which `said`, the pod's annotations, may say more. Unclear otherwise."""
    place = _place(containers, said)
    container = containers[place]
    kind = _said_kind(said) or _kind(container) or _kind_by_ports(container)
    if kind is None:
        raise Unclear(f'container "{container.name}" may be any engine: annotate the pod with {ENGINE}: {_or(KINDS)}')
    return _described(place, container, kind, said)


def _place(containers: Sequence[Container], said: dict[str, str]) -> int:
    named = said.get(ENGINE_CONTAINER)
    if named is not None:
        for index, each in enumerate(containers):
            if each.name == named:
                return index
        raise Unclear(f'no container has the name "{named}", which {ENGINE_CONTAINER} says')
    theirs = [index for index, each in enumerate(containers) if each.name not in MESH and each.name != NAME]
    wanted = _said_kind(said)
    known = [(index, _kind(containers[index])) for index in theirs]
    found = [index for index, kind in known if kind is not None]
    if wanted is not None:
        found = [index for index, kind in known if kind == wanted] or found or theirs
    if not found:
        found = [index for index in theirs if _has_gpu(containers[index])]
    if not found:
        found = [index for index in theirs if _says(containers[index], DEFAULT_PORT)]
    if len(found) > 1:
        found = [index for index in found if _has_gpu(containers[index])] or found
    if len(found) == 1:
        return found[0]
    names = _or([f'"{containers[index].name}"' for index in found or theirs])
    if found:
        raise Unclear(f"the engine may be container {names}: annotate the pod with {ENGINE_CONTAINER}: NAME")
    raise Unclear(
        f"no container looks like an engine, by image, command, GPU or port: annotate the pod with {ENGINE_CONTAINER}:"
        f" {names.replace(chr(34), '')} and {ENGINE}: {_or(KINDS)}",
        absent=True,
    )


def _said_kind(said: dict[str, str]) -> Kind | None:
    match said.get(ENGINE):
        case None:
            return None
        case "vllm" | "triton" | "deepspeed" as kind:
            return kind
        case other:
            raise Unclear(f'{ENGINE} is "{other}", not {_or(KINDS)}')


def _kind(container: Container) -> Kind | None:
    """By its command line, which is what runs, else by its image's name."""
    line = " ".join((*(container.command or ()), *(container.args or ())))
    path, _, name = (container.image or "").lower().partition("@")[0].rpartition("/")
    # The name first: triton/vllm is vLLM.
    for table, text in ((_WORDS, line), (_IMAGES, name.partition(":")[0]), (_IMAGES, path)):
        for kind, pattern in table:
            if pattern.search(text):
                return kind
    return None


def _kind_by_ports(container: Container) -> Kind | None:
    if not _says(container, DEFAULT_PORT):
        return None
    return "triton" if _says(container, GRPC_PORT) and _says(container, METRICS_PORT) else "vllm"


def _says(container: Container, port: int) -> bool:
    return any(each.container_port == port for each in container.ports or ())


def _has_gpu(container: Container) -> bool:
    needs = container.resources
    if needs is None:
        return False
    return bool(needs.claims) or any(_GPU.search(name) for name in (*(needs.limits or ()), *(needs.requests or ())))


def _described(place: int, container: Container, kind: Kind, said: dict[str, str]) -> Engine:
    readable = _readable(container, kind)
    line = _said_line(container, shell=not readable)
    for flag, words in _ELSEWHERE.items():
        if kind == "vllm" and (_value(line, flag) if readable else _anywhere(line, flag)) is not None:
            raise Unclear(f'engine "{container.name}" {words}: take {flag} away')
    front = kind == "triton" and _FRONT in " ".join(line)
    port_flag = "--port" if kind != "triton" else "--openai-port" if front else "--http-port"
    port = _port(container, line, port_flag, said, readable, 9000 if front else DEFAULT_PORT)
    host_flag = "--http-address" if kind == "triton" and not front else "--host"
    found = Engine(place, container.name, kind, port, "open")
    bind = said.get(BIND)
    if bind not in (None, "loopback", "leave"):
        raise Unclear(f'{BIND} is "{bind}", not loopback or leave')
    if bind == "leave":
        return found
    host = _value(line, host_flag) if readable else _anywhere(line, host_flag)
    if host is not None and _LOOPBACK.fullmatch(host):
        return msgspec.structs.replace(found, address="loopback", closed=frozenset({port}))
    if host is not None:
        note = f"listens at {host}, so the port {port} is reached without the sidecar: {host_flag} {LOOPBACK} closes it"
        return msgspec.structs.replace(found, notes=(note,))
    if not readable:
        note = (
            f"has a command line that cannot be lengthened (a shell, a script, or the image's own): add"
            f" {host_flag} {LOOPBACK} to it, else the port {port} is reached without the sidecar"
        )
        return msgspec.structs.replace(found, notes=(note,))
    if kind == "triton" and not front:
        return _triton(found, container, line)
    return msgspec.structs.replace(found, address="bind", more=(host_flag, LOOPBACK), closed=frozenset({port}))


def _triton(found: Engine, container: Container, line: list[str]) -> Engine:
    """Its HTTP and gRPC servers are told apart. Metrics go where HTTP goes if nobody says otherwise, and must not."""
    more = [f"--http-address={LOOPBACK}"]
    closed = {found.port}
    notes = []
    grpc = int(_number(_value(line, "--grpc-port")) or GRPC_PORT)
    probes = (container.startup_probe, container.liveness_probe, container.readiness_probe)
    if any(each is not None and each.grpc is not None for each in probes):
        notes.append(f"is probed by gRPC, which only kubelet can do: port {grpc} is reached without the sidecar")
    elif _value(line, "--grpc-address") is None:
        more.append(f"--grpc-address={LOOPBACK}")
        closed.add(grpc)
        if _says(container, grpc):
            notes.append(f"is closed at port {grpc}: the sidecar speaks HTTP with Triton; {BIND}: leave keeps it open")
    if _value(line, "--metrics-address") is None:
        more.append("--metrics-address=0.0.0.0")
    return msgspec.structs.replace(
        found, address="bind", more=tuple(more), closed=frozenset(closed), notes=tuple(notes)
    )


def _readable(container: Container, kind: Kind) -> bool:
    """Whether more words at the end of the command line would be the engine's."""
    command, args = container.command or [], container.args or []
    line = [*command, *args]
    if not line or any(_base(words[0]) in _SHELLS for words in (command, args) if words):
        return False
    # The program itself, or what Python or a wrapper (tini --) is told to run.
    told = [word for before, word in pairwise(("--", *line)) if before in ("--", "-m") or word.endswith(".py")]
    if any(_is_server(word, kind) for word in told):
        return True
    # The entrypoint of vLLM's image is vLLM itself: its arguments are flags and a model.
    image = not command and kind == "vllm" and _kind(container) == "vllm"
    return image and not _base(line[0]).startswith("python")


def _is_server(word: str, kind: Kind) -> bool:
    match kind:
        case "vllm":
            return _base(word) == "vllm" or word.startswith("vllm.entrypoints.")
        case "triton":
            return _base(word) == "tritonserver" or _FRONT in word
        case "deepspeed":
            return word.startswith("mii.entrypoints.")


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _port(container: Container, line: list[str], flag: str, said: dict[str, str], readable: bool, default: int) -> int:
    if (text := said.get(ENGINE_PORT)) is not None:
        port = _number(text)
        if port is None or not 1 <= port <= 65535:
            raise Unclear(f'{ENGINE_PORT} is "{text}", not a port')
        return port
    word = _value(line, flag) if readable else _anywhere(line, flag)
    port = _number(word)
    if port is not None:
        return port
    declared = [each.container_port for each in container.ports or () if each.protocol in (None, "TCP")]
    if word is not None and len(declared) != 1:
        raise Unclear(f'{flag} of container "{container.name}" is "{word}": annotate the pod with {ENGINE_PORT}: PORT')
    # A file of settings may say another port than the default, and a script may.
    if word is None and ((readable and _value(line, "--config") is None) or default in declared or len(declared) != 1):
        return default
    return declared[0]


def _said_line(container: Container, *, shell: bool) -> list[str]:
    """The command line, with the values of the container's own variables. `shell`: as one writes them, too."""
    there = {each.name: each.value for each in container.env or () if each.value is not None}
    line = [_VARIABLE.sub(lambda found: there.get(found[1], found[0]), word) for word in _words_of(container)]
    if not shell:
        return line
    return [_SHELL_VARIABLE.sub(lambda found: _of_shell(found, there), word) for word in line]


def _of_shell(found: re.Match[str], there: dict[str, str]) -> str:
    name = found[1] or found[3]
    return there.get(name) or found[2] or found[0]


def _words_of(container: Container) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 5 else None


def _value(line: Sequence[str], flag: str) -> str | None:
    """What a command line says of a flag, in one word or two; the last one counts."""
    found = None
    for index, word in enumerate(line):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else (line[index + 1] if index + 1 < len(line) else "")
    return found


def _anywhere(line: Sequence[str], flag: str) -> str | None:
    """The same of a script."""
    found = re.findall(rf"(?<![\w-]){flag}[=\s]+[\"']?([^\s\"'\\;&|]+)", " ".join(line))
    return found[-1] if found else None


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
