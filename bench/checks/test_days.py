"""The days are made as the public traces are known to be, in their columns, and no breaker opens in a piece of one."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev

import pytest

from bench.breaker_ab import days
from bench.breaker_ab.days import (
    BURSTGPT_HOURS,
    CODE_CUT,
    CODE_HOURS,
    CODE_PROMPT,
    CONVERSATION,
    CONVERSATION_HOURS,
    DAY_HOURS,
    HOUR_S,
    SHAPES,
    Day,
    Demand,
    Drift,
    Gaps,
    Mixture,
    TooBusyError,
    Trip,
    at_hour,
    azure,
    burstgpt,
    code_tokens,
    main,
    of_quantiles,
    play,
    said,
    write,
)
from sidecar.simulate.trace import Row, Trace

NINE, TEN = 9 * HOUR_S, 10 * HOUR_S


@pytest.mark.parametrize("name", SHAPES)
def test_the_simulator_reads_what_is_written_and_a_seed_is_the_same_bytes(name: str, tmp_path: Path) -> None:
    shape, paths = SHAPES[name], [tmp_path / each for each in ("one.csv", "again.csv", "other.csv")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        write(path, shape, seed, 2.0, 9, NINE, NINE + 300)
    one, again, other = (path.read_bytes() for path in paths)
    assert one == again != other

    made = [*shape.rows(1, 18.0, NINE, NINE + 300)]
    trace = Trace(paths[0], shape.form)  # judges every line
    read = [*trace.rows()]
    answered = [row for row in made if row.output_tokens]
    assert trace.extent.left_out == len(made) - len(answered)
    assert [(row.prompt_tokens, row.output_tokens, row.session) for row in read] == [
        (row.prompt_tokens, row.output_tokens, row.session) for row in answered
    ]
    begin = answered[0].at
    assert [row.at - trace.extent.begin for row in read] == pytest.approx(
        [row.at - begin for row in answered], abs=1e-5
    )


def test_columns_are_the_originals() -> None:
    row, chance = Row(3723.25, 374, 44), Random(1)
    assert SHAPES["azure"].head == "TIMESTAMP,ContextTokens,GeneratedTokens"
    assert SHAPES["azure"].line(row, chance) == "2023-11-16 01:02:03.2500000,374,44\n"
    talk = Row(86_399.0, 906, 446, "1722ac82-0a46-4bf0-aa08-89794e7a2b3f")
    at, session, _, model, *tokens, log_type = SHAPES["burstgpt"].line(talk, chance).rstrip().split(",")
    assert (at, session, tokens) == ("19526399.0", talk.session, ["906", "446", "1352"])
    assert model in ("ChatGPT", "GPT-4")
    assert log_type == "Conversation log"
    assert SHAPES["burstgpt"].line(Row(0.0, 5, 0), chance).endswith(",5,0,5,API log\n")


@pytest.mark.parametrize(
    ("hours", "least", "most"),
    [(CONVERSATION_HOURS, 3.0, 3.6), (CODE_HOURS, 30.0, 38.0), (BURSTGPT_HOURS, 8.0, 11.0)],
    ids=["conversation", "code", "burstgpt"],
)
def test_a_day_has_its_rhythm_and_no_jump(hours: Sequence[float], least: float, most: float) -> None:
    assert len(hours) == DAY_HOURS
    assert least <= max(hours) / min(hours) <= most
    rates = [at_hour(hours, second) for second in range(0, DAY_HOURS * HOUR_S, 60)]
    assert fmean(rates) == pytest.approx(1.0, abs=0.001)
    assert max(abs(one - two) for one, two in pairwise([*rates, rates[0]])) < 0.02


def test_azure_prompts_and_answers_have_the_papers_medians() -> None:
    chance = Random(7)
    mixture = Mixture(chance, CONVERSATION, 0.0, 600.0)  # without the drift, which takes hours to level out
    talked = [mixture.draw() for _ in range(20_000)]
    assert median(prompt for prompt, _ in talked) == pytest.approx(1020, rel=0.1)
    assert median(output for _, output in talked) == pytest.approx(129, rel=0.25)
    assert fmean(prompt for prompt, _ in talked) == pytest.approx(1155, rel=0.15)
    assert fmean(output for _, output in talked) == pytest.approx(211, rel=0.15)

    code = [code_tokens(chance) for _ in range(20_000)]
    assert median(prompt for prompt, _ in code) == pytest.approx(1500, rel=0.1)
    assert fmean(prompt for prompt, _ in code) == pytest.approx(2048, rel=0.15)
    assert median(output for _, output in code) == pytest.approx(13, abs=1)
    assert fmean(output for _, output in code) == pytest.approx(28, rel=0.15)
    assert of_quantiles(CODE_PROMPT, 0.0) == 14
    assert of_quantiles(CODE_PROMPT, 1.0) == CODE_CUT + 1


def test_azure_code_comes_in_runs_on_tenths_of_a_second() -> None:
    rows = [row for row in azure(3, 18.0, TEN, TEN + 1200) if row.prompt_tokens == CODE_CUT]
    late = [row.at * 10 % 1 for row in rows]
    assert max(late) <= 0.51
    assert median(late) < 0.05
    seconds = [0] * 1200
    for row in rows:
        seconds[int(row.at) - TEN] += 1
    tens = [sum(seconds[at : at + 10]) for at in range(0, 1200, 10)]
    assert pstdev(tens) ** 2 > 2 * fmean(tens)


def test_burstgpt_has_the_shares_and_means_that_are_known() -> None:
    rows = [*burstgpt(1, 18.0, 0, 6 * HOUR_S)]
    assert all(row.at == int(row.at) for row in rows)
    talk = [row for row in rows if row.session]
    assert len(talk) / len(rows) == pytest.approx(0.044, abs=0.012)
    assert sum(not row.output_tokens for row in rows) / len(rows) == pytest.approx(0.0726, abs=0.005)
    assert fmean(row.prompt_tokens for row in rows) == pytest.approx(621, rel=0.35)
    assert fmean(row.output_tokens for row in rows if row.output_tokens) == pytest.approx(126, rel=0.25)
    sessions = {row.session for row in talk}
    assert 2.0 < len(talk) / len(sessions) < 5.0


def test_gaps_have_the_variation_asked_for() -> None:
    for variation in (1.0, 3.0):
        gaps = Gaps(Random(5), variation)
        moments = [at for second in range(4000) for at in gaps.within(second, 10.0)]
        assert moments == sorted(moments)
        between = [two - one for one, two in pairwise(moments)]
        assert fmean(between) == pytest.approx(0.1, rel=0.1)
        assert pstdev(between) / fmean(between) == pytest.approx(variation, rel=0.1)


def test_no_rate_has_no_arrivals() -> None:
    assert [*Gaps(Random(5)).within(0, 0.0)] == []


def test_drift_is_one_in_the_mean() -> None:
    drift = Drift(Random(5), 0.3, 20.0)
    levels = [drift.next() for _ in range(50_000)]
    assert fmean(levels) == pytest.approx(1.0, abs=0.03)
    assert min(levels) > 0


def test_demand_counts_the_part_of_an_hour_that_was_played() -> None:
    whole, half = Demand(1, 0, HOUR_S), Demand(1, HOUR_S // 2, HOUR_S)
    for demand in (whole, half):
        demand.add(Row(2000.0, 1000, 100))
        demand.add(Row(2000.0, 1000, 0))
    assert half.busiest == pytest.approx(2 * whole.busiest)
    assert whole.busiest == pytest.approx((100 * days.CHAT.step_s(96) + 0.25) / (3600 * 96))


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_opens_in_a_morning_and_twice_is_the_same(name: str, tmp_path: Path) -> None:
    first, second = (play(name, 1, begin_hour=9.0, hours=0.05, out=tmp_path) for _ in range(2))
    assert first.quiet
    assert first.requests > 1000
    assert first.goodput is not None
    assert first.goodput > 0.995
    for field in Day.__struct_fields__:
        if field != "cpu_s":
            assert getattr(first, field) == getattr(second, field)


def test_more_than_the_pods_can_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TooBusyError, match="lower --rate"):
        play("azure", 1, begin_hour=10.0, hours=0.02, rate=12.0, out=tmp_path)
    assert main(["--shape", "azure", "--begin", "10", "--hours", "0.02", "--rate", "12", "--out", str(tmp_path)]) == 2
    assert "lower --rate" in capsys.readouterr().err


def test_a_trip_is_told_with_its_evidence_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = play("azure", 1, begin_hour=3.0, hours=0.01, out=tmp_path)
    tripped = days.msgspec.structs.replace(quiet, trips=(Trip(61.5, 4, "slow", "location 21.3 of 20"),))
    session = days.msgspec.structs.replace(quiet, others_tripped={"session": 2})
    assert quiet.quiet
    assert not tripped.quiet
    assert not session.quiet
    assert [*said([tripped])][1] == "  61.5 s, pod 4, slow: location 21.3 of 20"
    assert "0 false trips, 2 of a session;" in next(iter(said([session])))
    for day, code in ((quiet, 0), (tripped, 1), (session, 1)):
        monkeypatch.setattr(days, "play", lambda *args, day=day, **kwargs: day)
        assert main(["--shape", "azure"]) == code
    assert main(["--json"]) == 1
    assert capsys.readouterr().out.count('"shape": "azure"') == 2
