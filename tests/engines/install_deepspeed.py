"""Makes the DeepSpeed environment: DeepSpeed for CPU with the front ends of DeepSpeed-MII, and two models.

Why a script and not `pip install deepspeed-mii`, the obvious way:

1. DeepSpeed comes as source that asks the installed torch what to build: torch goes in first, with setuptools old
   enough for its setup.py, and it is built without isolation and without its operators (none of them is for a CPU).
2. MII's front ends need packages that MII does not name: pydantic-settings, uvicorn, requests.
3. It has an environment of its own, as every engine has: its pins must never decide the sidecar's.

Two models, for two purposes: the tiny one of make_tiny_model.py, whose streams last as long as a test wants, in this
environment; and SmolLM2, which really answers, in the folder that the engines share (make_smollm2.py).

Run it with any Python >= 3.11. A second run finds the stamp of the first and returns at once. Needs about 2 GB of disk
and two minutes; `DEEPSPEED_VENV` names another place than `.venv-deepspeed` in the repository root.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # As a script it must find the package, and not its own folder: a launcher there is called as DeepSpeed itself.
    sys.path[0] = str(REPOSITORY)

from tests.engines import make_smollm2  # noqa: E402 (the line above decides where it is found)

DEEPSPEED_VERSION = "0.19.8"  # this and the next: what the adapter's wire was captured from
MII_VERSION = "0.3.3"  # the last release
TORCH_VERSION = "2.13.0"
TRANSFORMERS_VERSION = "5.19.0"
UNNAMED = ("pydantic-settings", "requests", "uvicorn")

MODEL_SCRIPT = Path(__file__).resolve().parent / "make_tiny_model.py"
STAMP = f"deepspeed=={DEEPSPEED_VERSION} deepspeed-mii=={MII_VERSION} torch=={TORCH_VERSION} layout=1\n"


def venv_dir() -> Path:
    """The environment: `DEEPSPEED_VENV`, empty or unset meaning `.venv-deepspeed` in the repository root."""
    return Path(os.environ.get("DEEPSPEED_VENV") or REPOSITORY / ".venv-deepspeed").absolute()


def tiny_dir() -> Path:
    """The tiny model's Hugging Face folder, kept in the environment that made it."""
    return venv_dir() / "tiny-llama"


def main() -> None:
    """Installs what is missing and says each step with its seconds; any failing step ends the script with its code."""
    venv = venv_dir()
    python = venv / "bin" / "python"
    stamp = venv / "sidecar-stamp.txt"
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == STAMP):
        _install(venv)
        _run("make the tiny model", python, "-P", MODEL_SCRIPT, tiny_dir())
        stamp.write_text(STAMP, encoding="utf-8")
    make_smollm2.ensure(python)
    print(f"DeepSpeed {DEEPSPEED_VERSION} with MII {MII_VERSION} is ready in {venv}", flush=True)


def _install(venv: Path) -> None:
    pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet")
    if not (venv / "bin" / "python").exists():
        _run(f"make {venv}", sys.executable, "-m", "venv", venv)
    (venv / ".gitignore").write_text("*\n", encoding="utf-8")
    _run("update pip", *pip, "--upgrade", "pip", "wheel")
    _run(f"install torch {TORCH_VERSION}", *pip, "setuptools<81", f"torch=={TORCH_VERSION}")
    os.environ["DS_BUILD_OPS"] = "0"
    _run(f"build DeepSpeed {DEEPSPEED_VERSION}", *pip, "--no-build-isolation", f"deepspeed=={DEEPSPEED_VERSION}")
    mii = (f"deepspeed-mii=={MII_VERSION}", f"transformers=={TRANSFORMERS_VERSION}", f"torch=={TORCH_VERSION}")
    _run(f"install MII {MII_VERSION}", *pip, *mii, *UNNAMED)


def _run(what: str, *command: str | Path) -> None:
    print(f"-> {what} ...", flush=True)
    started = time.monotonic()
    code = subprocess.run([str(part) for part in command], check=False).returncode
    if code:
        sys.exit(f"FAILED ({code}): {what}")
    print(f"   {what}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
