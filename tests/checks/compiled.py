"""Builds `build/compiled`: what is in this folder, with the request path compiled beside its sources (docs/adr/0007).

    python -m tests.checks.compiled           what changed is copied, and compiled if it must be: up to a minute
    python -m tests.checks.compiled --again   everything anew

`make compile` runs it. The sources' own folder never gets a library: there, plain Python runs. The tree has an
interpreter of its own, `build/compiled/.venv/bin/python`, which finds the compiled package from any folder and all else
in the environment that built it; `cd build/compiled` and that environment's interpreter will do as well.
"""

import argparse
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = Path("build") / "compiled"
COPIED = (".ci", "bench", "deploy", "docs", "loadtest", "policies", "proto", "sidecar", "soak", "tests")
"""With the files beside them: all that the tests read."""
STAMP, LOG = ".built", "build.log"
LIMIT_S = 900.0
BEAT_S = 15.0
"""How often a long build says that it is at work."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--again", action="store_true", help="everything anew")
    args = parser.parse_args(argv)
    tree = ROOT / TREE
    if args.again:
        shutil.rmtree(tree, ignore_errors=True)
    try:
        build(ROOT, tree)
    except RuntimeError as exc:
        print(f"compiled: {exc}", file=sys.stderr)
        return 1
    return 0


def build(root: Path, tree: Path) -> None:
    """Brings the tree up to date. Raises RuntimeError if it does not compile, or what it says is not compiled."""
    begun = time.monotonic()
    copy(root, tree)
    interpreter(tree)
    changed = stale(tree)
    if changed:
        compile_in(tree)
    if plain := [name for name, path in origins(tree).items() if path.suffix == ".py"]:
        raise RuntimeError(f"not compiled: {', '.join(plain)}; --again builds everything anew")
    how = f"compiled in {time.monotonic() - begun:.0f} s" if changed else "up to date"
    _tell(f"{len(modules(tree))} modules in {tree.relative_to(root)} {how}")


def copy(root: Path, tree: Path) -> None:
    """Makes `tree` what `root` is: what is the same keeps its time, what is gone goes, what was built stays."""
    wanted = set()
    for source in _sources(root):
        name = source.relative_to(root)
        wanted.add(name)
        target = tree / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for path in _sources(tree):
        if path.relative_to(tree) not in wanted and path.name not in (STAMP, LOG) and path.suffix != ".so":
            path.unlink()


def _sources(root: Path) -> Iterator[Path]:
    yield from (path for path in root.iterdir() if path.is_file())
    for folder in COPIED:
        for path in (root / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                yield path


def interpreter(tree: Path) -> Path:
    """The tree's own interpreter, made if it is not there: its sidecar is the tree's, all else is ours."""
    python = tree / ".venv" / "bin" / "python"
    if not python.exists():
        venv.create(tree / ".venv", symlinks=True, with_pip=False)
    # Paths, not `site` folders: what an editable installation of the sources put into ours is not read.
    paths = [str(tree), *(each for each in sys.path if Path(each).name in ("site-packages", "dist-packages"))]
    (site,) = (tree / ".venv").glob("lib/python3*/site-packages")
    (site / "compiled.pth").write_text("\n".join(paths) + "\n")
    return python


def stale(tree: Path) -> bool:
    """Whether anything that the compiled code depends on is other than when it was compiled."""
    stamp = tree / STAMP
    return not stamp.exists() or stamp.read_text().split() != _digests(tree)


def _digests(tree: Path) -> list[str]:
    """Of what is compiled and how, and of what it is compiled from. Types count wherever they are, so all of ours do;
    other packages only by when one was last installed."""
    installed = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    how = hashlib.sha256(f"{sys.version} {installed}".encode())
    how.update((tree / "setup.py").read_bytes())
    of_what = hashlib.sha256((tree / "pyproject.toml").read_bytes())
    for path in sorted((tree / "sidecar").rglob("*.py")):
        of_what.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return [how.hexdigest(), of_what.hexdigest()]


def compile_in(tree: Path) -> None:
    """Compiles. Raises RuntimeError with the end of what the compilers said."""
    stamp, log = tree / STAMP, tree / LOG
    digests = _digests(tree)
    if not stamp.exists() or stamp.read_text().split()[0] != digests[0]:
        # Other modules may have been compiled than are to be: no library of then may be found.
        shutil.rmtree(tree / "build", ignore_errors=True)
        for library in [*tree.glob("*.so"), *(tree / "sidecar").rglob("*.so")]:
            library.unlink()
    stamp.unlink(missing_ok=True)
    _tell(f"compiling {len(modules(tree))} modules: about a minute; what the compilers say is in {log}")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    with log.open("wb") as out:
        running = subprocess.Popen(
            command, cwd=tree, env={**os.environ, "SIDECAR_COMPILE": "1"}, stdout=out, stderr=subprocess.STDOUT
        )
        code = _wait(running)
    if code:
        said = log.read_text(errors="replace")[-3000:].strip()
        raise RuntimeError(f"compiling ended with {code}; the end of {log}:\n{said}")
    stamp.write_text("\n".join(digests) + "\n")


def _wait(running: subprocess.Popen[bytes]) -> int:
    begun = time.monotonic()
    while True:
        try:
            return running.wait(BEAT_S)
        except subprocess.TimeoutExpired:
            spent_s = time.monotonic() - begun
            _tell(f"compiling for {spent_s:.0f} s")
            if spent_s > LIMIT_S:
                running.kill()


def modules(tree: Path) -> list[str]:
    """The names of the modules that setup.py compiles."""
    paths: list[str] = runpy.run_path(str(tree / "setup.py"))["COMPILED"]
    return [path.removesuffix(".py").replace("/", ".") for path in paths]


def origins(tree: Path) -> dict[str, Path]:
    """Where the tree's interpreter finds them; imports nothing of ours but packages."""
    code = "import sys, importlib.util as u; [print(u.find_spec(name).origin) for name in sys.argv[1:]]"
    names = modules(tree)
    command = [str(interpreter(tree)), "-P", "-c", code, *names]
    found = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=60)
    if found.returncode:
        raise RuntimeError(f"{command[0]} does not find the package: {found.stderr.strip()}")
    return dict(zip(names, map(Path, found.stdout.split("\n")), strict=False))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
