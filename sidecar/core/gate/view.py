"""A gate as operators see it: plain figures of one moment, for the admin pages and the metrics."""

from sidecar.core.gate.turns import Standing


class ClassView:
    """A class as operators see it. `waiting_s`: its oldest request; `usual_s`: the time to a first token that it
    reckons with; `met` and `missed` are of its SLA."""

    __slots__ = (
        "met",
        "missed",
        "name",
        "overloaded",
        "preempted",
        "preemptible",
        "priority",
        "queue_timeout",
        "queued",
        "running",
        "sla_s",
        "turns",
        "usual_s",
        "waiting_s",
        "warning",
    )

    def __init__(self, standing: Standing) -> None:
        qos = standing.qos
        self.name = qos.name
        self.priority = qos.priority
        self.sla_s = qos.sla_s
        self.preemptible = qos.preemptible
        self.queued = standing.queued
        self.running = standing.running
        self.waiting_s = 0.0
        self.turns = standing.turns
        self.overloaded = standing.overloaded
        self.queue_timeout = standing.queue_timeout
        self.preempted = standing.preempted
        self.met = standing.met
        self.missed = standing.missed
        self.warning = False
        self.usual_s = standing.usual.careful_s


class GateView:
    """A gate as operators see it. `tenants`: those that are remembered, once for each class and set of endpoints."""

    __slots__ = ("classes", "mode", "queued", "running", "tenants", "turns")

    def __init__(
        self, mode: str, queued: int, running: int, tenants: int, turns: int, classes: list[ClassView]
    ) -> None:
        self.mode = mode
        self.queued = queued
        self.running = running
        self.tenants = tenants
        self.turns = turns
        self.classes = classes
