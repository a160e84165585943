"""Makes the Triton environment: the real `tritonserver` for CPU, and what its Python backend needs to run a model.

Why a script and not a container, the obvious way: an engine test runs where the others run, and NVIDIA ships the same
server inside a PyPI package for those who want none.

1. `nvidia-pytriton` carries the server, its libraries, the Python backend and a stub for each Python; the stub of this
   Python is copied to where the backend looks for it.
2. The stub is linked to libpython, which the loader does not find in a Python of one's own: a link to it lies in
   `lib/triton`, for LD_LIBRARY_PATH.
3. The stub takes its packages from the first `python3` on PATH, and dies of the first string if NumPy is 2 or newer
   (Triton 24.10): the environment has both right, and every model uses it.
4. It has an environment of its own, as every engine has: its pins must never decide the sidecar's.

Run it with Python 3.11, 3.12 or 3.13. A second run finds the stamp of the first and returns at once. Needs about 2 GB
of disk and two minutes; `TRITON_VENV` names another place than `.venv-triton` in the repository root.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # As a script it must find the package, and not its own folder: a launcher there is called as Triton itself.
    sys.path[0] = str(REPOSITORY)

from tests.engines import make_smollm2  # noqa: E402 (the line above decides where it is found)

PYTRITON_VERSION = "0.7.0"  # carries Triton 2.51.0 (24.10), whose wire the adapter was measured against
TORCH_VERSION = "2.13.0"  # of SmolLM2 alone: the toy model needs NumPy and no more
TRANSFORMERS_VERSION = "5.19.0"
STAMP = f"nvidia-pytriton=={PYTRITON_VERSION} torch=={TORCH_VERSION} layout=1\n"


def venv_dir() -> Path:
    """The environment: `TRITON_VENV`, empty or unset meaning `.venv-triton` in the repository root."""
    return Path(os.environ.get("TRITON_VENV") or REPOSITORY / ".venv-triton").absolute()


def server_dir() -> Path:
    """Where the package keeps the server: `bin` and `backends`. A place without one where it is not installed."""
    found = sorted(venv_dir().glob("lib/python3.*/site-packages/pytriton/tritonserver"))
    return found[0] if found else venv_dir() / "tritonserver"


def libraries() -> list[Path]:
    """The folders that LD_LIBRARY_PATH must name."""
    return [venv_dir() / "lib" / "triton", server_dir().parents[1] / "nvidia_pytriton.libs"]


def main() -> None:
    """Installs what is missing and says each step with its seconds; any failing step ends the script with its code."""
    venv = venv_dir()
    stamp = venv / "sidecar-stamp.txt"
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == STAMP):
        _install(venv)
        _place_stub()
        stamp.write_text(STAMP, encoding="utf-8")
    make_smollm2.ensure(venv / "bin" / "python")
    print(f"Triton (nvidia-pytriton {PYTRITON_VERSION}) is ready in {venv}", flush=True)


def _install(venv: Path) -> None:
    pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet")
    if not (venv / "bin" / "python").exists():
        _run(f"make {venv}", sys.executable, "-m", "venv", venv)
    (venv / ".gitignore").write_text("*\n", encoding="utf-8")
    _run("update pip", *pip, "--upgrade", "pip", "wheel")
    _run(f"install nvidia-pytriton {PYTRITON_VERSION}", *pip, f"nvidia-pytriton=={PYTRITON_VERSION}", "numpy<2")
    model = (f"torch=={TORCH_VERSION}", f"transformers=={TRANSFORMERS_VERSION}", "numpy<2")
    _run(f"install torch {TORCH_VERSION} and transformers {TRANSFORMERS_VERSION}", *pip, *model)


def _place_stub() -> None:
    """The stub and libpython of the Python that runs this, which is the one that made the environment."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server_dir() / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        sys.exit(f"FAILED: Triton has no stub for Python {version}")
    shutil.copy2(stub, server_dir() / "backends" / "python")
    name = f"libpython{version}.so.1.0"
    places = [Path(str(sysconfig.get_config_var(key))) / name for key in ("LIBDIR", "LIBPL")]
    found = next((place for place in places if place.is_file()), None)
    folder = venv_dir() / "lib" / "triton"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    if found is not None:  # where there is none, the system's loader may still know one
        (folder / name).symlink_to(found)


def _run(what: str, *command: str | Path) -> None:
    print(f"-> {what} ...", flush=True)
    started = time.monotonic()
    code = subprocess.run([str(part) for part in command], check=False).returncode
    if code:
        sys.exit(f"FAILED ({code}): {what}")
    print(f"   {what}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
