"""The kinds of rollouts: good canaries and bad ones in an ordinary world, good ones in worlds that are not."""

from bench.rollouts.kinds import Fault, World
from bench.rollouts.play import ALONE, FEW, HURRY, MINUTE, Scenario

_ROUGH = World(wander=0.1, surges=True, deaths=1.0)

SCENARIOS = {
    each.name: each
    for each in (
        Scenario("same", "as good as its baseline"),
        Scenario("slow20", "first tokens 20 % slower", Fault(slow=1.2)),
        Scenario("broken2", "2 % more in-stream errors", Fault(broken=0.02)),
        Scenario("cut", "answers cut after 64 tokens", Fault(cut_at=64)),
        Scenario(
            "long", "first tokens 3x slower, on prompts past 2,048 tokens alone", Fault(slow=3.0, least_prompt=2048)
        ),
        Scenario("slow2x", "first tokens 2x slower", Fault(slow=2.0)),
        Scenario("errors5", "5 % more errors, before or in the stream", Fault(broken=0.025, failed=0.025)),
        Scenario("gap30", "tokens 30 % slower", Fault(gap=1.3)),
        Scenario("same/surges", "surges: load x2 to x2.6 for a minute in five", world=World(surges=True)),
        Scenario("same/wander", "each engine's speed wanders by 10 % within a minute", world=World(wander=0.1)),
        Scenario("same/deaths", "each engine dies three times an hour", world=World(deaths=3.0)),
        Scenario("same/cold", "caches cold after each step: x6, decaying in 30 s", world=World(cold=6.0)),
        Scenario("same/sessions", "100 sessions, that differ by half", world=World(sessions=100, differ=0.5)),
        Scenario("same/machines", "machines differ by 8 %", world=World(speeds=0.08)),
        Scenario("same/alone", "one canary engine beside nine", world=World(engines=10, alone=True), plan=ALONE),
        Scenario(
            "same/alone8",
            "the same, and machines differ by 8 %",
            world=World(engines=10, alone=True, speeds=0.08),
            plan=ALONE,
        ),
        Scenario("same/few", "1 to 5 requests/s, from 1 % on", world=World(rate=(1.0, 5.0)), plan=FEW),
        Scenario("same/minute", "10 to 20 requests/s, steps of a minute", world=World(rate=(10.0, 20.0)), plan=MINUTE),
        Scenario("same/hurry", "the same, steps of half a minute", world=World(rate=(10.0, 20.0)), plan=HURRY),
        Scenario("same/rough", "surges, wandering engines and a death an hour, together", world=_ROUGH),
        Scenario("slow2x/rough", "first tokens 2x slower, in that world", Fault(slow=2.0), _ROUGH),
        Scenario("errors5/rough", "5 % more errors, in that world", Fault(broken=0.025, failed=0.025), _ROUGH),
    )
}
