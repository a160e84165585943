"""The image without a builder: the Dockerfile's own steps, run into a folder, and what they make, started as by a pod.

1. Steps and settings are read from the Dockerfile, so that nothing is tried but what an image is made by. A path of the
   image is one under the folder; an environment of Python may be anywhere, so what runs there is the same.
2. A container's view is made of namespaces (`cage.py`), which root alone may make.
3. The step that needs the base image (its standard library as byte code) is left out: the interpreter is the machine's.
4. What the lock files install is kept, as a builder keeps a layer: until they change, or the steps before.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
"""For a start, or an answer: generous, since it is spent only where a test fails."""


class Instruction(NamedTuple):
    """One of a Dockerfile: its word, and all that follows as one line."""

    word: str
    text: str

    @property
    def command(self) -> list[str] | None:
        """The exec form; None for the shell's."""
        start = self.text.find("[")
        if start < 0 or (start and self.word != "HEALTHCHECK"):
            return None
        command: list[str] = json.loads(self.text[start:])
        return command


def stages(dockerfile: str) -> list[list[Instruction]]:
    """The instructions by stage; what stands before the first FROM is the first list."""
    lines = (line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[list[Instruction]] = [[]]
    for line in filter(None, map(str.strip, whole.splitlines())):
        word, _, text = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append(Instruction(word, text.strip()))
    return found


def environment(stage: Sequence[Instruction]) -> dict[str, str]:
    """What a stage's ENV says."""
    pairs = (pair for each in stage if each.word == "ENV" for pair in shlex.split(each.text))
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


class Image:
    """What the Dockerfile makes, in `folder`."""

    def __init__(self, folder: Path, *, compiled: bool) -> None:
        self.folder = folder
        self.prefix = folder / "opt" / "sidecar"
        self._compiled = compiled
        _, self._build, self._final = stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))

    def build(self) -> None:
        """Runs the first stage's steps. Raises CalledProcessError where one fails; what it said is on our stderr."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR_", "PYTHON"))}
        settings = {**clean, "PATH": f"{Path(sys.executable).parent}:{clean['PATH']}", "SOURCE_DATE_EPOCH": "315532800"}
        source, opt = self.folder / "src", self.folder / "opt"
        for old in (source, opt, self.folder / "wheels"):
            shutil.rmtree(old, ignore_errors=True)
        source.mkdir(parents=True)
        layer = hashlib.sha256(f"{sys.version} {sys.executable} {self.folder}".encode())
        for word, text in self._build:
            if word == "COPY":
                *names, target = text.split()
                for name in names:
                    layer.update(self._copy(name, source / target))
            if word == "RUN":
                step = re.sub(r"(?<![\w*.])/(?=(opt|wheels)\b)", f"{self.folder}/", text)
                step = step.replace("SIDECAR_COMPILE=1", f"SIDECAR_COMPILE={int(self._compiled)}")
                layer.update(step.encode())
                kept = self.folder / "layers" / layer.hexdigest()
                if kept.exists():
                    shutil.copytree(kept, opt, symlinks=True)
                    continue
                opt.mkdir(exist_ok=True)
                subprocess.run(["sh", "-euc", step], cwd=source, env=settings, stdout=subprocess.DEVNULL, check=True)
                if "--require-hashes" in step:
                    shutil.rmtree(kept.parent, ignore_errors=True)
                    shutil.copytree(opt, kept, symlinks=True)

    def _copy(self, name: str, target: Path) -> bytes:
        """COPY; a digest of what was copied, which is of interest for files alone."""
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so"))
            return name.encode()
        shutil.copy2(ROOT / name, target)
        return hashlib.sha256((ROOT / name).read_bytes()).digest()

    def command(self, word: str) -> list[str]:
        """The image's ENTRYPOINT, CMD or HEALTHCHECK."""
        (found,) = (each.command for each in self._final if each.word == word)
        assert found is not None
        return found

    @property
    def user(self) -> str:
        """UID:GID."""
        (found,) = (each.text for each in self._final if each.word == "USER")
        return found

    def environment(self, **settings: str) -> dict[str, str]:
        """What a process in the container has, with `settings` as the pod's."""
        inside = environment(self._final)
        inside["PATH"] = f"{self.prefix}/bin:/usr/bin:/bin"
        return inside | settings

    @contextlib.contextmanager
    def engine(self, **script: object) -> Iterator[str]:
        """The address of a simulated engine, which is in the image as well: `sidecar demo` has it."""
        command = [str(self.prefix / "bin" / "python"), "-m", "sidecar.demo.engine", "--port", "0", "--script"]
        command.append(json.dumps(script))
        with subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                yield running.stdout.readline().split()[3]
            finally:
                running.kill()

    @contextlib.contextmanager
    def started(self, *arguments: str, **settings: str) -> Iterator["Container"]:
        """ENTRYPOINT with `arguments` in a container's view; killed at the end if it is still there."""
        uid, gid = self.user.split(":")
        cage = [sys.executable, "-S", str(Path(__file__).with_name("cage.py")), uid, gid]
        shut = ["unshare", "--mount", "--propagation", "private"]
        assert os.geteuid() == 0, "a namespace of mounts is root's to make: run these tests as root"
        command = [*shut, *cage, *self.command("ENTRYPOINT"), *arguments]
        log = self.folder / "log"
        with log.open("wb") as out:
            begun = time.monotonic()
            process = subprocess.Popen(
                command, cwd="/", env=self.environment(**settings), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            yield Container(self, process, begun, log, settings)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


class Container:
    """A started image. Its PID is the sidecar's own: what is before it became it."""

    def __init__(
        self, image: Image, process: subprocess.Popen[bytes], begun: float, log: Path, settings: dict[str, str]
    ) -> None:
        self._image = image
        self.settings = settings
        self.process = process
        self.begun = begun
        self.log = log

    def answers(self, url: str, body: bytes | None = None) -> bytes:
        """The body of the first 200; `took_s` is how long that took since the command began."""
        while True:
            try:
                headers = {"content-type": "application/json"}
                with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=LIMIT_S) as answer:
                    said: bytes = answer.read()
                    self.took_s = time.monotonic() - self._became[0]
                    return said
            except (urllib.error.URLError, ConnectionError) as exc:
                assert self.process.poll() is None, f"it ended: {self.log.read_text()}"
                assert time.monotonic() - self.begun < LIMIT_S, f"{exc}: {self.log.read_text()}"
                time.sleep(0.002)

    def runs(self, *command: str) -> str:
        """What a command says that is run in the container, as `kubectl exec` does. CalledProcessError if it fails."""
        uid, gid = self._image.user.split(":")
        enter = ["nsenter", "--target", str(self.process.pid), "--mount"]
        enter += ["--setuid", uid, "--setgid", gid]
        done = subprocess.run(
            [*enter, *command],
            env=self._image.environment(**self.settings),
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT_S,
        )
        said: str = done.stdout
        return said

    @property
    def files(self) -> list[str]:
        """What it wrote: all that is in `/tmp` and `/run`, which were empty but for the way to what `cage.py` kept."""
        found = self.runs("find", "/tmp", "/run", "-xdev", "-mindepth", "1").split()
        kept = (str(self._image.prefix), sys.base_prefix)
        return sorted(each for each in found if not any(f"{folder}/".startswith(f"{each}/") for folder in kept))

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    @property
    def cpu_s(self) -> float:
        """Processor time since the command began; what neighbours on the machine do costs it little."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") - self._became[1]

    @property
    def _became(self) -> tuple[float, float]:
        """What `cage.py` says: when, and after how much processor time."""
        at_s, spent_s = self.log.read_text().partition("\n")[0].split()
        return float(at_s), float(spent_s)

    @property
    def status(self) -> dict[str, str]:
        """What the kernel says of it."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
