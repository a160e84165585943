import pytest

from sidecar.policy.errors import (
    MAX_ERRORS,
    Faults,
    PolicyError,
    PolicyErrors,
    Step,
    TooManyFaults,
    Within,
    path_of,
    quote,
)


def test_an_error_reads_as_compilers_write_them() -> None:
    assert str(PolicyError("a.yaml", 7, "$.services[0].name", "missing")) == "a.yaml:7: $.services[0].name: missing"
    assert str(PolicyError("a.yaml", 0, "$", "cannot be read")) == "a.yaml: $: cannot be read"


def test_all_errors_are_in_the_text_one_a_line() -> None:
    errors = PolicyErrors([PolicyError("a", 1, "$", "x"), PolicyError("b", 2, "$.k", "y")])
    assert str(errors) == "a:1: $: x\nb:2: $.k: y"


@pytest.mark.parametrize(
    ("steps", "path"),
    [((), "$"), (("a", 0, "b"), "$.a[0].b"), (("split", "v1.0"), '$.split."v1.0"'), (("a\nb",), r'$."a\nb"')],
)
def test_a_path_is_one_line_and_says_where_a_key_ends(steps: tuple[Step, ...], path: str) -> None:
    assert path_of(steps) == path


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("v1", "v1"),
        ("", '""'),
        ("a b", '"a b"'),
        ('"', r'"\""'),
        ("\x1b[2J", r'"\u001b[2J"'),
        ("x" * 99, "x" * 57 + "..."),
    ],
)
def test_text_of_a_file_is_shown_short_and_harmless(text: str, quoted: str) -> None:
    assert quote(text).strip('"') == quoted.strip('"')
    assert quote(text).isprintable()


def test_no_more_faults_are_collected_than_anybody_reads() -> None:
    faults = Faults()
    with pytest.raises(TooManyFaults):
        for line in range(2 * MAX_ERRORS):
            faults.add(PolicyError("a", line, "$", "x"))
    assert len(faults.errors) == MAX_ERRORS


def test_errors_of_what_is_within_something_are_told_as_its_own() -> None:
    faults = Faults()
    inner = Within(Within(faults, "$.items[3]"), "$.a")
    inner.add(PolicyError("f", 7, "$.b", "missing"))
    inner.add(PolicyError("f", 7, "$", "missing"))
    assert [error.path for error in faults.errors] == ["$.items[3].a.b", "$.items[3].a"]
    with pytest.raises(TooManyFaults):
        for _ in range(MAX_ERRORS):
            inner.add(PolicyError("f", 7, "$", "missing"))
