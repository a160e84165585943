from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.simulate.profile import CHAT
from sidecar.simulate.trace import FORMS, MAX_FAULTS, Extent, Form, Row, Trace, TraceError

JSONL = """{"arrival": 5, "prompt_tokens": 100, "output_tokens": 20, "session": "a", "anything": [1]}

{"arrival": 5.5, "prompt_tokens": 0, "output_tokens": 1}
{"arrival": 7, "prompt_tokens": 3, "output_tokens": 0, "session": null}
{"arrival": 7, "prompt_tokens": 8, "output_tokens": 9, "session": "b"}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118.5,GPT-4,417,0,417,API log
120,GPT-4,417.0,276.0,693,API log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,77,1.5,ChatGPT,472,18,490,Conversation log
"""


def written(path: Path, text: str) -> Path:
    file = path / "trace"
    file.write_text(text)
    return file


GOOD: list[tuple[str, Form, list[Row], Extent]] = [
    (JSONL, "jsonl", [Row(5, 100, 20, "a"), Row(5.5, 0, 1), Row(7, 8, 9, "b")], Extent(3, 1, 5, 7)),
    (BURSTGPT, "burstgpt", [Row(5, 472, 18), Row(45, 1087, 230), Row(120, 417, 276)], Extent(3, 1, 5, 120)),
    (BURSTGPT_SESSIONS, "burstgpt", [Row(5, 472, 18, "77")], Extent(1, 0, 5, 5)),
    (
        AZURE,
        "azure",
        [Row(1700158546.68059, 374, 44), Row(1700158550.995169, 396, 109)],
        Extent(2, 0, 1700158546.68059, 1700158550.995169),
    ),
    (
        AZURE_2024,
        "azure",
        [Row(1715299200.00993, 2162, 5), Row(1715299200.017335, 2399, 6)],
        Extent(2, 0, 1715299200.00993, 1715299200.017335),
    ),
]


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize(("text", "form", "rows", "extent"), GOOD, ids=["jsonl", "burst", "burst2", "azure", "azure24"])
def test_each_form_is_read(tmp_path: Path, text: str, form: Form, rows: list[Row], extent: Extent, ends: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", ends).encode())
    trace = Trace(file, form)
    assert list(trace.rows()) == rows
    assert trace.extent == extent


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LINE = '{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1}\n'
BAD: list[tuple[str, Form, str]] = [
    ("", "jsonl", "holds no request that was answered"),
    ("", "azure", ':1: no column "TIMESTAMP", "ContextTokens", "GeneratedTokens": the columns are '),
    (HEAD, "azure", "holds no request that was answered"),
    ("Time,Tokens\n1,2\n", "azure", 'the columns are "Time", "Tokens"'),
    (BURSTGPT, "azure", ':1: no column "TIMESTAMP", "ContextTokens", "GeneratedTokens"'),
    (HEAD + "yesterday,1,2\n", "azure", ':2: TIMESTAMP: "yesterday" is not a time'),
    (HEAD + "2023-11-16 18:15:46,1\n", "azure", ":2: 2 cells under 3 columns"),
    (HEAD + "2023-11-16 18:15:46,-1,2\n", "azure", ':2: ContextTokens: "-1" is not a number of tokens'),
    (HEAD + "2023-11-16 18:15:46,1,1e3\n", "azure", ':2: GeneratedTokens: "1e3" is not a number of tokens'),
    (HEAD + "2023-11-16 18:15:46,1,999999999\n", "azure", ":2: GeneratedTokens: 999999999 is not from 0 to 100000000"),
    (HEAD + '2023-11-16 18:15:46,"1,2\n', "azure", ":2: "),
    ("Timestamp,Request tokens,Response tokens\nnan,1,1\n", "burstgpt", ":2: nan is not a time"),
    ("Timestamp,Request tokens,Response tokens\n9,1,1\n8,1,1\n", "burstgpt", ":3: goes back in time, from 9 to 8 s"),
    ("Timestamp,Request tokens,Response tokens\n1,1,1\n1700000000000,1,1\n", "burstgpt", ":3: 1.7e+12 is not a time"),
    (
        "Timestamp,Request tokens,Response tokens\n1,1,1\n1700000000,1,1\n",
        "burstgpt",
        ": spans 19676 days: is its time",
    ),
    (LINE + "{\n", "jsonl", ":2: not JSON: "),
    (LINE + "[]\n", "jsonl", ":2: Expected `object`, got `array`"),
    (LINE + '{"arrival": 1, "prompt_tokens": 1}\n', "jsonl", ":2: Object missing required field `output_tokens`"),
    (
        LINE + LINE.replace('"arrival": 1', '"arrival": "1"'),
        "jsonl",
        ":2: Expected `float`, got `str` - at `$.arrival`",
    ),
    (LINE + LINE.replace('"arrival": 1', '"arrival": 0.5'), "jsonl", ":2: goes back in time, from 1 to 0.5 s"),
    (LINE + LINE.replace('"prompt_tokens": 1', '"prompt_tokens": -1'), "jsonl", ":2: prompt_tokens: -1 is not from 0"),
    (LINE + LINE.replace("}", f', "session": "{"x" * 257}"}}'), "jsonl", ":2: session: longer than 256 characters"),
]


@pytest.mark.parametrize(("text", "form", "words"), BAD, ids=[f"{row[1]}-{row[2][:30]}" for row in BAD])
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, form: Form, words: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        Trace(file, form)
    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(str(file))
    assert words in caught.value.faults[0]


def test_all_faults_are_told_together_up_to_a_number(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        Trace(written(tmp_path, LINE + "{\n" + LINE + "[]\n"), "jsonl")
    assert [fault.split(":")[1] for fault in caught.value.faults] == ["2", "4"]
    with pytest.raises(TraceError) as caught:
        Trace(written(tmp_path, "{\n" * 1000), "jsonl")
    assert len(caught.value.faults) == MAX_FAULTS + 1
    assert "more faults" in caught.value.faults[-1]


WORDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens", ",", "\n", '"', "2023-11-16 18:15:46", "0001-01-01", "9", "-")
MORE = ('{"arrival": ', '"prompt_tokens": ', '"output_tokens": ', "}", "1e999", "1" * 30, "NaN", "\ud800", "\0", " ")
PIECES = st.sampled_from((*WORDS, *MORE))


@given(st.lists(PIECES, max_size=40), st.sampled_from(FORMS))
def test_no_text_makes_a_reader_do_anything_but_read_or_refuse(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], form: Form
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed"
    file.write_bytes("".join(pieces).encode("utf-8", "surrogatepass"))
    try:
        trace = Trace(file, form)
    except TraceError as exc:
        assert exc.faults
        return
    assert len(list(trace.rows())) == trace.extent.requests > 0


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        Trace(tmp_path / "none", "jsonl")
    (tmp_path / "bytes").write_bytes(LINE.encode() + b"\xff\n")
    with pytest.raises(TraceError, match="not UTF-8"):
        Trace(tmp_path / "bytes", "jsonl")


def test_a_limit_counts_requests_that_have_an_answer(tmp_path: Path) -> None:
    trace = Trace(written(tmp_path, JSONL), "jsonl", 2)
    assert trace.extent == Extent(2, 0, 5, 5.5)
    assert len(list(trace.rows())) == 2


def test_arrivals_begin_at_zero_come_faster_by_the_scale_and_keep_their_sessions_together(tmp_path: Path) -> None:
    lines = [
        f'{{"arrival": {100 + n}, "prompt_tokens": {n}, "output_tokens": 5, "session": "s{n % 3}"}}' for n in range(60)
    ]
    trace = Trace(written(tmp_path, "\n".join(lines)), "jsonl")
    arrivals = list(trace.arrivals(CHAT, 4, 2.0, 1))
    assert [arrival.at for arrival in arrivals] == [n / 2 for n in range(60)]
    assert [arrival.prompt_tokens for arrival in arrivals] == [max(1, n) for n in range(60)]
    assert len({(arrival.session, arrival.user_pod) for arrival in arrivals}) == 3
    same, other = (list(trace.arrivals(CHAT, 4, 2.0, seed)) for seed in (1, 2))
    assert [arrival.noise for arrival in same] == [arrival.noise for arrival in arrivals]
    assert [arrival.noise for arrival in other] != [arrival.noise for arrival in arrivals]


def test_requests_without_a_session_are_spread_over_all_engines(tmp_path: Path) -> None:
    trace = Trace(written(tmp_path, LINE * 200), "jsonl")
    assert {arrival.user_pod for arrival in trace.arrivals(CHAT, 4, 1.0, 1)} == {0, 1, 2, 3}
