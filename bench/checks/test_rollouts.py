"""Simulated rollouts: that the world is what it is said to be, and what the tables say of rows."""

from pathlib import Path

import pytest

from bench.rollouts import report, rows
from bench.rollouts.__main__ import main
from bench.rollouts.kinds import Fault, World
from bench.rollouts.play import Played, play
from bench.rollouts.scenarios import SCENARIOS
from bench.rollouts.world import Traffic
from sidecar.kernel.outcome import Ending


def row(scenario: str, seed: int = 1, end: str = "promoted", step: int = 2, **changes: float) -> Played:
    said = {"took_s": 100.0, "samples": 400, "harmed": 10, "unclear": 0} | changes
    return Played(scenario, seed, end, step, **said)  # type: ignore[arg-type]


def test_a_canary_has_its_share_and_sessions_stay() -> None:
    traffic = Traffic(World(), Fault(), 3)
    for share in (0.05, 0.3):
        traffic.turn(share)
        answers = [answer for _ in range(400) for answer in traffic.second()]
        assert sum(answer[0] for answer in answers) / len(answers) == pytest.approx(share, abs=0.02)
        assert all(traffic.sessions[answer[7]][0] < share for answer in answers if answer[0] and answer[7] >= 0)


def test_nothing_is_harmed_without_a_fault_and_faults_are_in_the_canary_alone() -> None:
    for fault in (Fault(), Fault(failed=0.5), Fault(cut_at=10), Fault(slow=3.0, least_prompt=2048)):
        traffic = Traffic(World(), fault, 5)
        traffic.turn(0.5)
        answers = [answer for _ in range(200) for answer in traffic.second()]
        canary = [answer for answer in answers if answer[0]]
        assert (traffic.harmed > 0) == (fault != Fault())
        errors = sum(answer[2] is Ending.SERVER_ERROR for answer in answers)
        assert sum(answer[2] is Ending.SERVER_ERROR for answer in canary) == pytest.approx(
            0.5 * len(canary) if fault.failed else 0, abs=0.1 * len(canary)
        )
        assert errors <= len(canary)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_kind_plays(name: str) -> None:
    traffic = Traffic(SCENARIOS[name].world, SCENARIOS[name].fault, 1)
    traffic.turn(0.1)
    assert sum(1 for _ in range(60) for _ in traffic.second()) > 20


def test_the_same_seed_gives_the_same_rollout() -> None:
    assert play(SCENARIOS["cut"], 2) == play(SCENARIOS["cut"], 2)


def test_a_gate_over_fifty() -> None:
    """Two good ones and 48 bad ones: as many faults of the judge as would show in them."""
    played = [play(SCENARIOS["same"], seed) for seed in range(2)]
    played += [play(SCENARIOS[name], seed) for name in ("slow2x", "errors5") for seed in range(16)]
    played += [play(SCENARIOS["cut"], seed) for seed in range(16)]
    assert report.broken(played) == []
    assert [each.end for each in played] == ["promoted"] * 2 + ["failed"] * 48


def test_the_gate_says_what_is_wrong() -> None:
    assert report.broken([row("same")] * 50) == []
    assert "taken back" in report.broken([row("same", end="failed")] * 5)[0]
    assert "caught" in report.broken([row("slow2x")] * 5)[0]


def test_the_tables_count(tmp_path: Path) -> None:
    found = [row("same", seed) for seed in range(200)]
    found += [row("slow2x", seed, "failed", 0, took_s=150.0, samples=400 if seed else 900) for seed in range(100)]
    found += [row("errors5", seed, "failed", 0, took_s=500.0, samples=300 if seed > 1 else 700) for seed in range(100)]
    aims = report.parts(found)["aims"]
    assert "0.00 % | met" in aims and "98.00 % | MISSED" in aims and aims.count("met") == 2
    summary = {each["scenario"]: each for each in report.summary(found)}
    assert summary["slow2x"]["failed_within_its_samples"] == 100
    document = tmp_path / "canary.md"
    document.write_text((Path(__file__).parents[2] / "docs" / "canary.md").read_text())
    for _ in range(2):
        report.write(found, document)
    assert document.read_text().count("| first tokens 2x slower |") == 1
    document.write_text("nothing")
    with pytest.raises(ValueError, match="no place"):
        report.write(found, document)


def test_rows_are_kept_and_what_is_missing_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--scenarios", "cut", "--jobs", "1", "--out", str(tmp_path)]
    assert main([*arguments, "-n", "1"]) == 0
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes() + b'{"broken')
    assert main([*arguments, "-n", "2", "--resume"]) == 0
    assert [each.seed for each in rows.read(path)] == [rows.EVALUATION, rows.EVALUATION + 1]
    assert "answers cut after 64 tokens | 2 |" in capsys.readouterr().out


def test_seeds_for_tuning_and_for_evaluation_are_apart() -> None:
    assert rows.EVALUATION not in rows.TUNING and max(rows.TUNING) < rows.EVALUATION
