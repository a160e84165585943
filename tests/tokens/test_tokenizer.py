"""Reading a tokenizer's file, and counting by it as the library does."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Theirs

from sidecar.tokens.tokenizer import MAX_FILE_BYTES, Tokenizer, file_of, marks_of, read

TEXTS = ["", "a", " words and more words", "汉字", "\U0001f600\u0301", "\x00", "a\r\n\r\nb", "  def f():\n\t\tpass"]


@pytest.mark.parametrize("text", TEXTS)
def test_counts_are_the_librarys(tiny: Tokenizer, theirs: Theirs, text: str) -> None:
    assert tiny.count(text) == len(theirs.encode(text).ids)


def test_a_folder_is_the_tokenizer_in_it(tiny_path: Path) -> None:
    assert file_of(str(tiny_path.parent)) == tiny_path == file_of(str(tiny_path))
    assert read(str(tiny_path.parent)).marks == read(str(tiny_path)).marks == marks_of(str(tiny_path))


def test_texts_are_neither_cut_nor_filled_up_as_a_file_may_ask(theirs: Theirs, tmp_path: Path) -> None:
    asks = Theirs.from_str(theirs.to_str())
    asks.enable_truncation(4)
    asks.enable_padding(length=8)
    asks.save(str(tmp_path / "tokenizer.json"))
    assert read(str(tmp_path)).count("a few more words than four") > 8
    assert read(str(tmp_path)).count("a") == 1


def test_marks_change_with_the_file(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tiny_path.read_bytes())
    before = marks_of(str(tmp_path))
    file.write_bytes(tiny_path.read_bytes() + b"\n")
    assert marks_of(str(tmp_path)) != before


def test_a_file_that_is_missing_raises_what_the_system_says(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        read(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\x00\xff", json.dumps({"model": {"type": "BPE"}}).encode(), b"[" * 9999]
)
def test_what_is_no_tokenizer_says_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer that"):
        read(str(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(OSError, match="not a file"):
        read(str(tmp_path))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="exceeds"):
        read(str(tmp_path))
