"""Traffic and engines around a rollout, answer by answer, on a virtual clock.

The engines are those of the breaker's experiment (`sidecar.simulate.profile`): a decode step grows with the batch, a
prompt is read at a pace that the batch slows down. What an engine's batch is, is drawn and not played: it follows the
load of its version with a noise that lasts for seconds. So the answers of an engine are slow together, as real ones
are, at a hundredth of the cost of playing each token.

1. Sessions are sticky: who is on the canary stays there as its share grows. They differ in how long their prompts and
   answers are, so the arms are never quite alike.
2. Nobody's fault: answers that cannot be judged (a client that left, a bad request), stragglers, an error in a
   thousand, an engine that dies (its streams break together, then connects fail until its breaker opens, then it is
   gone for a minute), caches that are cold after sessions moved.
3. A fault is in the canary from its first answer on. `harmed` counts the answers that were worse for it.
"""

from collections.abc import Iterator
from math import exp, pi, sin
from random import Random
from statistics import NormalDist

from bench.rollouts.kinds import Fault, World
from sidecar.kernel.outcome import DOCTRINE, Ending
from sidecar.simulate.profile import CHAT

DAY_S = 600.0
SURGE_S = 60.0
OUT_S = 60.0
"""An engine that died is gone for so long."""
OPENS_S = 3.0
"""Until its breaker opens."""
NAN = float("nan")
NORMAL = [NormalDist().inv_cdf((number + 0.5) / 65536) for number in range(65536)]
"""A normal number is drawn by drawing one of these: a tenth of the cost."""
TICK_S = 2
"""Batches are drawn anew every so often."""


Answer = tuple[bool, int, Ending, float, float, int, str, int]
"""Of the canary, bytes of the request, ending, first token s, gap s, tokens, finish reason, session."""


class Engine:
    """One engine: its batch comes and goes around what the load makes of it."""

    __slots__ = ("base", "batch", "noise", "out_until", "speed", "wander")

    def __init__(self, chance: Random, speeds: float) -> None:
        self.speed = exp(speeds * chance.gauss(0.0, 1.0))
        self.wander = 0.0
        self.noise = chance.gauss(0.0, 1.0)
        self.batch = 1.0
        self.out_until = 0.0


class Traffic:
    """Answers as they end, second by second; the canary's share is said from outside."""

    def __init__(self, world: World, fault: Fault, seed: int) -> None:
        chance = self.chance = Random(seed)
        low, high = world.rate
        self.world = world
        self.fault = fault
        self.rate = low * (high / low) ** chance.random()
        self.batch = 4.0 + 20.0 * chance.random()
        self.lasts_s = 2.0 + 8.0 * chance.random()
        self.phase = chance.random() * DAY_S
        self.surge_at = 300.0 * chance.random()
        self.now = 0.0
        self.harmed = 0
        self.engines = [Engine(chance, world.speeds) for _ in range(world.engines)]
        self.sessions = [
            (
                chance.random(),
                world.differ * chance.gauss(0.0, 1.0),
                world.differ * chance.gauss(0.0, 1.0),
                chance.random(),
            )
            for _ in range(world.sessions)
        ]
        self.share = 0.0
        self.moved_at = 0.0
        self.moved = 0.0
        self.canaries = 0

    def turn(self, share: float) -> None:
        """The canary has this share now: sessions move, and engines with them."""
        before, self.share = self.share, share
        self.moved_at = self.now
        self.moved = (share - before) / share if share > before else 0.0
        self.canaries = 1 if self.world.alone else max(1, round(share * len(self.engines)))

    def second(self) -> Iterator[Answer]:
        """The answers of the next second."""
        world, chance = self.world, self.chance
        self.now += 1.0
        now = self.now
        load = 1.0 + world.swing * sin(2.0 * pi * (now + self.phase) / DAY_S)
        if world.surges and (now - self.surge_at) % 300.0 < SURGE_S:
            load *= 2.0 + 0.6 * ((now - self.surge_at) // 300.0 % 2.0)
        broke = self._engines(load) if int(now) % TICK_S == 0 or now == self.moved_at + 1.0 else []
        for canary, count in broke:
            for _ in range(count):
                yield canary, 2000, Ending.TRUNCATED, 0.1, NAN, 0, "", -1
        at = chance.expovariate(self.rate * load)
        while at < 1.0:
            at += chance.expovariate(self.rate * load)
            yield from self._answer()

    def _engines(self, load: float) -> list[tuple[bool, int]]:
        """Batches of this second; how many streams broke because an engine died."""
        world, chance = self.world, self.chance
        random = chance.random
        keep = exp(-TICK_S / self.lasts_s)
        fresh = (1.0 - keep * keep) ** 0.5
        slow = exp(-TICK_S / 60.0)
        broke = []
        whole = len(self.engines)
        for number, engine in enumerate(self.engines):
            canary = number < self.canaries
            part, of = (self.share, self.canaries) if canary else (1.0 - self.share, whole - self.canaries)
            usual = self.batch * load * part * whole / of
            engine.noise = keep * engine.noise + fresh * NORMAL[int(random() * 65536)]
            engine.batch = max(1.0, usual + usual**0.5 * engine.noise)
            if world.wander:
                engine.wander = (
                    slow * engine.wander + (1.0 - slow * slow) ** 0.5 * world.wander * NORMAL[int(random() * 65536)]
                )
            if world.deaths and random() < world.deaths * TICK_S / 3600.0 and engine.out_until <= self.now:
                engine.out_until = self.now + OUT_S
                # As many as are under way there (Little): a batch is drawn, and not made of these requests.
                mean = self.rate * load * part / of * CHAT.output_median * 1.28 * CHAT.step_s(int(engine.batch))
                count, left = 0, chance.expovariate(1.0)
                while left < mean:
                    count += 1
                    left += chance.expovariate(1.0)
                broke.append((canary, count))
        return broke

    def _answer(self) -> Iterator[Answer]:
        chance, fault, now = self.chance, self.fault, self.now
        random = chance.random
        who = int(random() * len(self.sessions))
        at, prompts, answers, cut = self.sessions[who]
        canary = at < self.share
        first, last = (0, self.canaries) if canary else (self.canaries, len(self.engines))
        prompts += CHAT.prompt_sigma * NORMAL[int(random() * 65536)]
        answers += CHAT.output_sigma * NORMAL[int(random() * 65536)]
        prompt = min(CHAT.prompt_max, int(CHAT.prompt_median * exp(prompts)))
        size = 200 + 4 * prompt
        for _ in range(3):
            engine = self.engines[first + int(random() * (last - first))]
            if engine.out_until <= now:
                break
            if engine.out_until - OUT_S + OPENS_S > now:
                yield canary, size, Ending.CONNECT_FAILED, NAN, NAN, 0, "", who
        else:
            if not canary:
                return
            # Its breakers are open: the others have its share.
            canary = False
            engine = self.engines[-1 - int(random() * (len(self.engines) - self.canaries))]
        luck = random()
        if luck < 0.01:
            yield canary, size, Ending.CLIENT_ERROR, NAN, NAN, 0, "", who
            return
        batch, speed = engine.batch, engine.speed * exp(engine.wander)
        step_s = CHAT.step_s(int(batch))
        took = speed * (step_s + prompt / CHAT.prefill_tokens_per_ms * (1.0 + batch / CHAT.prefill_batch) / 1000.0)
        if batch > CHAT.slots:
            took += (batch - CHAT.slots) * step_s
        took *= exp(CHAT.noise_sigma * NORMAL[int(random() * 65536)])
        if random() < CHAT.stragglers:
            took *= min(100.0, 2.0 * (1.0 - random()) ** (-1.0 / 1.5))
        gap = speed * step_s * exp(0.05 * NORMAL[int(random() * 65536)])
        tokens = min(CHAT.output_max, 1 + int(CHAT.output_median * exp(answers)))
        finish = (
            "length"
            if tokens >= CHAT.output_max or random() < 0.1 * cut
            else "tool_calls"
            if random() < 0.1
            else "stop"
        )
        ending = Ending.COMPLETE
        harmed = False
        if canary:
            if self.moved and now - self.moved_at < 10.0 * self.world.cold_s and at >= self.share * (1.0 - self.moved):
                took *= 1.0 + (self.world.cold - 1.0) * exp((self.moved_at - now) / self.world.cold_s)
            if fault.slow != 1.0 and prompt >= fault.least_prompt:
                took *= fault.slow
                harmed = True
            if fault.gap != 1.0:
                gap *= fault.gap
                harmed = True
            if fault.cut_at and tokens > fault.cut_at:
                tokens, finish, harmed = fault.cut_at, "length", True
            worse = random()
            if worse < fault.broken:
                ending, harmed = Ending.ERROR_IN_BAND if worse < fault.broken / 2.0 else Ending.TRUNCATED, True
            elif worse < fault.broken + fault.failed:
                ending, harmed = Ending.SERVER_ERROR, True
        if ending is Ending.COMPLETE:
            if luck < 0.03:
                ending, tokens, finish = Ending.CLIENT_LEFT, 0, ""
            elif luck > 1.0 - CHAT.errors:
                ending = Ending.SERVER_ERROR if luck > 1.0 - CHAT.errors / 2.0 else Ending.TRUNCATED
        if ending is Ending.SERVER_ERROR:
            took = NAN
        if ending is not Ending.COMPLETE:
            gap, tokens, finish = gap if took == took else NAN, 0, ""
        self.harmed += harmed
        yield canary, size, ending, took, gap, tokens, finish, who


RESULTS = {ending: DOCTRINE[ending].node for ending in Ending}
