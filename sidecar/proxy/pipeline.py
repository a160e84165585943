"""What all requests on their way share: the policy in force, the fleet, and the ports to the world."""

from collections.abc import Callable

from sidecar.core.fleet import Fleet
from sidecar.core.quotas.answer_lengths import AnswerLengths
from sidecar.core.quotas.quota import Ledger
from sidecar.policy.store import PolicyStore
from sidecar.proxy.door import Doors
from sidecar.proxy.ports import (
    Connector,
    NoCounter,
    NoTemplates,
    Recorder,
    Templates,
    TokenCounter,
    Verifier,
)
from sidecar.proxy.watchdog import Timers, Watchdog


class Pipeline:
    """What every exchange shares. `now_wall` gives seconds since the epoch, `new_id` a fresh request id."""

    def __init__(
        self,
        store: PolicyStore,
        fleet: Fleet,
        connector: Connector,
        recorder: Recorder,
        timers: Timers,
        *,
        now_wall: Callable[[], float],
        new_id: Callable[[], bytes],
        on_crash: Callable[[BaseException], None],
        templates: Templates | None = None,
        salt_key: bytes = b"",
        ledger: Ledger | None = None,
        counter: TokenCounter | None = None,
    ) -> None:
        self.ledger = ledger or Ledger()
        self.answers = AnswerLengths()
        self.counter = counter or NoCounter()
        self.verifier: Verifier | None = None
        """Checks tokens; None where the policy leaves that to the mesh."""
        self.templates = templates or NoTemplates()
        self.salt_key = salt_key
        self.store = store
        self.fleet = fleet
        self.connector = connector
        self.recorder = recorder
        self.clock = timers.time
        self.watchdog = Watchdog(timers)
        self.doors = Doors(timers, on_crash)
        self.now_wall = now_wall
        self.new_id = new_id
        self.on_crash = on_crash
        self.draining = False
        self.live = 0
        self._idle_client_s = 60.0
        self._body_limit = 0
        self.policy_changed()

    def policy_changed(self) -> None:
        """Work out anew what connections need before a request's service is known."""
        policies = [service.policy for service in self.fleet.services.values()]
        self._idle_client_s = max((float(policy.deadlines.idle_client_s) for policy in policies), default=60.0)
        self._body_limit = max((policy.limits.body_bytes for policy in policies), default=1 << 20)
        self.doors.policy_changed(self.fleet.services)

    def idle_client_s(self) -> float:
        """How long a client may be silent, in seconds."""
        return self._idle_client_s

    def body_limit(self) -> int:
        """The largest inference body that any service takes, in bytes."""
        return self._body_limit
