"""`sidecar inject` as it is typed: files, streams, exit codes."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.injection import joined

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: one}
spec:
  containers:
  - name: vllm
    image: vllm/vllm-openai:v1
    args: [--model, m]
"""


def written(folder: Path, text: str = POD, name: str = "pod.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_a_file_goes_out_injected_and_comes_back(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path = written(tmp_path)
    assert main(["inject", "-f", str(path)]) == 0
    once = capsysbinary.readouterr().out
    assert b"name: llm-sidecar\n" in once
    out = tmp_path / "out.yaml"
    out.write_bytes(once)
    assert main(["inject", "--uninject", "-f", str(out), "-o", str(out)]) == 0
    assert out.read_bytes() == path.read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.yaml", "pod.yaml"]


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(POD.encode())))
    assert main(["inject", "-f", "-", "--image", "r/x:2", "--image-pull-policy", "Always", "--drain", "2m"]) == 0
    out = capsysbinary.readouterr().out.decode()
    assert "image: r/x:2" in out and "imagePullPolicy: Always" in out and "value: 120s" in out


def test_several_files_are_one_stream(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    service = "apiVersion: v1\nkind: Service\nmetadata:   {name: s}"
    paths = [written(tmp_path, service, "s.yaml"), written(tmp_path)]
    assert main(["inject", *(f"-f{path}" for path in paths), "--policy", "chat"]) == 0
    out = capsysbinary.readouterr().out.decode()
    assert out.startswith(f"{service}\n---\napiVersion: v1\nkind: Pod\n") and "      name: chat\n" in out


@pytest.mark.parametrize(
    ("texts", "stream"),
    [(("a: 1\n", "b: 2\n"), "a: 1\n---\nb: 2\n"), (("a: 1", "---\nb: 2"), "a: 1\n---\nb: 2"), (("", "a: 1"), "a: 1")],
)
def test_documents_stay_apart(texts: tuple[str, ...], stream: str) -> None:
    assert joined(texts) == stream


@pytest.mark.parametrize("flags", [[], ["--uninject"]], ids=["inject", "uninject"])
@pytest.mark.parametrize(
    "text",
    ["", "\n", "# nothing yet\n", "---\n", "---\n# a\n---\n# b\n", "null\n", "404 page not found\n", "{}\n", "[]\n"],
)
def test_where_no_object_comes_in_nothing_goes_out_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, flags: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    out = tmp_path / "out.yaml"
    path = written(tmp_path, text, "empty.yaml")
    assert main(["inject", *flags, "-f", "-", "-f", str(path), "-o", str(out)]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"sidecar inject: no object in stdin, {path}\n")
    assert not out.exists()


def test_an_empty_file_beside_one_that_is_not_is_nothing_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = written(tmp_path, "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n", "s.yaml")
    assert main(["inject", "-f", str(service), "-f", str(written(tmp_path, "# later\n", "e.yaml"))]) == 0
    assert capsys.readouterr().out.startswith("apiVersion: v1\nkind: Service\n")


def test_what_is_wrong_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f"{POD}  hostNetwork: true\n---\n{POD}  volumes: [{{name: llm-sidecar-run}}]\n")
    out = tmp_path / "out.yaml"
    assert main(["inject", "-f", str(path), "-o", str(out)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and not out.exists()
    warning, problem = said.err.splitlines()
    assert warning.startswith(f"sidecar inject: warning: {path}, document 1 (Pod/one): spec.hostNetwork: ")
    assert problem.startswith(f"sidecar inject: {path}, document 2 (Pod/one): spec.volumes[0]: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inject"], "-f"),
        (["inject", "-f", "-", "-f", "-"], "standard input is there twice"),
        (["inject", "-f", "{folder}"], "Is a directory"),
        (["inject", "-f", "{folder}/none"], "No such file"),
        (["inject", "-f", "{folder}/latin.yaml"], "is not UTF-8: byte 0xe9 at 3"),
        (["inject", "-f", "{folder}/pod.yaml", "--drain", "soon"], "--drain: "),
        (
            ["inject", "-f", "{folder}/pod.yaml", "--drain", "1500ms"],
            "--drain: 1500ms is not a number of whole seconds",
        ),
        (["inject", "-f", "{folder}/pod.yaml", "-o", "{folder}/none/out"], "-o: "),
        (["inject", "-f", "{folder}/pod.yaml", "--image-pull-policy", "Sometimes"], "invalid choice"),
    ],
)
def test_what_means_nothing_is_usage(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    assert main([each.format(folder=tmp_path) for each in arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    assert main(["inject", "-f", str(link), "-o", str(link)]) == 0
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640 and "llm-sidecar" in path.read_text()


def test_it_starts_without_the_relay(tmp_path: Path) -> None:
    path = written(tmp_path)
    script = (
        "import sys; from sidecar.cli import main; code = main(['inject', '-f', sys.argv[1]]);"
        "print(sorted({'aiohttp', 'grpc', 'sidecar.main'} & set(sys.modules)), code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "[] 0\n"
