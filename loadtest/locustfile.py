"""The users and what they do. Also for locust alone: `locust -f loadtest/locustfile.py --host http://127.0.0.1:9400`."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from gevent import GreenletExit
from locust import User, task

from loadtest.scenario import Crowd, Plan
from loadtest.sse_client import Ask, Client, Ended, Pace, Stream, Target, report
from loadtest.stage import Stage
from loadtest.tally import CHAT, SLOW, Tally

MAX_RETRY_AFTER_S = 5.0
"""A longer one would take a user out of a run that lasts half a minute."""


class StreamUser(User):
    """What both kinds share. `drive.py` fills the class attributes before a run; alone, the defaults hold."""

    abstract = True
    plan: ClassVar[Plan] = Plan()
    tally: ClassVar[Tally] = Tally()
    ask: ClassVar[Ask] = Ask(tokens=0)
    stage: ClassVar[Stage | None] = None
    chance: ClassVar[random.Random] = random.Random(1)  # the same users in every run
    numbers: ClassVar[Iterator[int]] = itertools.count(1)
    crowd: Crowd | None = None

    def on_start(self) -> None:
        """Begin as somebody new."""
        target = self.stage.target if self.stage is not None else Target.of(str(self.host))
        self._client = Client(target, self.plan.patience_s)
        self._session = ""
        self._left = 0

    def on_stop(self) -> None:
        """Leave no connection."""
        self._client.close()

    def wait_time(self) -> float:
        """Think."""
        return self.chance.uniform(*(self.crowd or self.plan).think_s)

    def session(self) -> str:
        """This user's session, a new one when the old has had its requests."""
        if self._left == 0:
            self._left = self.chance.randint(*self.plan.session_requests)
            self._session = f"load-{next(self.numbers)}"
        self._left -= 1
        return self._session

    def run_stream(self, kind: str, tokens: int, pace: Pace | None = None) -> Stream:
        """One stream, recorded and reported."""
        session = self.session()
        headers = self.ask.headers + (self.crowd.headers if self.crowd is not None else ())
        ask = Ask(tokens, self.ask.model, session, headers, self.ask.checked)
        phase = self.tally.begin()
        began_s = time.perf_counter()
        try:
            stream = self._client.stream(ask, pace)
        except GreenletExit:
            # When users become fewer, locust kills those that wait; one may have begun its next stream by then.
            self.tally.end(kind, phase, session, Stream(began_s, Ended.LEFT, gaps_s=[]))
            raise
        self.tally.end(kind, phase, session, stream)
        report(self.environment.events.request.fire, stream, kind)
        return stream


class ChatUser(StreamUser):
    """Somebody who chats: a stream, a thought, the next; waits as long as a refusal asks for."""

    joined: ClassVar[Counter[str]] = Counter()

    def on_start(self) -> None:
        """Join the crowd that lacks most of its part."""
        super().on_start()
        if self.plan.crowds:
            self.crowd = min(self.plan.crowds, key=lambda crowd: (self.joined[crowd.kind] + 1) / crowd.parts)
            self.joined[self.crowd.kind] += 1

    def on_stop(self) -> None:
        """Leave the crowd, too."""
        if self.crowd is not None:
            self.joined[self.crowd.kind] -= 1
        super().on_stop()

    @task
    def chat(self) -> None:
        """One stream; none any more once the run is over, so that those under way can end."""
        if self.stage is not None and self.stage.over:
            return
        kind = self.crowd.kind if self.crowd is not None else CHAT
        stream = self.run_stream(kind, self.chance.randint(*(self.crowd or self.plan).tokens))
        if stream.ended is Ended.REFUSED:
            time.sleep(min(stream.retry_after_s or 1.0, MAX_RETRY_AFTER_S))


class SlowReader(StreamUser):
    """Somebody behind a thin line: reads a long answer far slower than it is written, from the phase `slow` on."""

    fixed_count = 0
    weight = 0

    @task
    def read_slowly(self) -> None:
        """One long stream, left when the run ends."""
        stage = self.stage
        if stage is None or stage.over or stage.tally.phase != "slow":
            return
        self.run_stream(SLOW, self.plan.slow_tokens, Pace(over=lambda: stage.over))
