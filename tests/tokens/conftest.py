"""A small tokenizer, trained here: byte-level BPE as most models have it, so that everything can be encoded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Theirs
from tokenizers import decoders, models, pre_tokenizers, trainers

from sidecar.tokens.tokenizer import Tokenizer, read

DOCS = Path(__file__).parents[2] / "docs"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def train(vocabulary: int, texts: Iterator[str]) -> Theirs:
    tokenizer = Theirs(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=ALPHABET, show_progress=False),
    )
    return tokenizer


def docs() -> Iterator[str]:
    for name in ("policy.md", "engines.md"):
        yield (DOCS / name).read_text(encoding="utf-8")
    yield "汉字和标点\uff0c没有空格的文字\u3002" * 50


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tokenizer.json"
    train(1200, docs()).save(str(path))
    return path


@pytest.fixture(scope="session")
def theirs(tiny_path: Path) -> Theirs:
    return Theirs.from_file(str(tiny_path))


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Tokenizer:
    return read(str(tiny_path))
