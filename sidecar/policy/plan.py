"""A canary's plan as an operator writes it: one YAML or JSON document, read as strictly as a policy.

```yaml
baseline: v1
steps:
  - {weight: 0.05, min: 2m, min_samples: 500}
  - {weight: 0.25, min: 10m, min_samples: 2000}
false_alarm: 0.01
margins: {first_token: 1.2}
min_ready: 0.5
```

Only what one number says alone is judged here; what a plan means for the table it is meant for (steps that rise, a
baseline that has a weight) is judged where the rollout begins, whoever asks for it.
"""

from typing import Annotated

from msgspec import Meta, field

from sidecar.policy.document import documents
from sidecar.policy.errors import Faults, PolicyError, PolicyErrors, TooManyFaults
from sidecar.policy.read import Reader
from sidecar.policy.schema import Name, Ratio, Span, Strict

MAX_STEPS = 20


class PlanStep(Strict, frozen=True, kw_only=True):
    """The canary has `weight` of all traffic for at least `min` and `min_samples` answers."""

    weight: Annotated[float, Meta(ge=0.0001, le=1)]
    min_s: Span = field(name="min", default=Span(60))
    min_samples: Annotated[int, Meta(ge=1, le=10_000_000)] = 500


class PlanMargins(Strict, frozen=True, kw_only=True):
    """How much worse than its baseline a canary may be and still pass (docs/canary.md)."""

    success: Ratio = 0.005
    first_token: Annotated[float, Meta(ge=1, le=100)] = 1.10
    token_gap: Annotated[float, Meta(ge=1, le=100)] = 1.10
    errors: Ratio = 0.005
    length: Annotated[float, Meta(ge=1, le=100)] = 1.25
    finish: Ratio = 0.05


class PlanDocument(Strict, frozen=True, kw_only=True):
    """How a canary is led to its full weight.

    `false_alarm`: how likely one as good as its baseline is taken back, over the whole rollout. `min_ready`: a rollback
    sends its share only to versions of whose endpoints at least this part may serve; 0: to any.
    """

    baseline: Name
    steps: Annotated[tuple[PlanStep, ...], Meta(max_length=MAX_STEPS)]
    false_alarm: Annotated[float, Meta(ge=1e-6, le=0.5)] = 0.01
    margins: PlanMargins = PlanMargins()
    min_ready: Ratio = 0.5


def read_plan(file: str, data: bytes) -> PlanDocument:
    """The plan in a file's bytes; JSON where `file` ends in `.json`. PolicyErrors with every fault otherwise."""
    faults = Faults()
    plan: PlanDocument | None = None
    try:
        trees = documents(file, data, faults)
        if trees:
            read = Reader(file, faults).struct(trees[0], PlanDocument)
            plan = read if isinstance(read, PlanDocument) else None
        if not faults.errors and (plan is None or len(trees) > 1):
            faults.add(PolicyError(file, 0, "$", f"a plan is one document, and here are {len(trees)}"))
        elif not faults.errors and plan is not None and not plan.steps:
            faults.add(PolicyError(file, 0, "$.steps", "a plan has at least one step"))
    except TooManyFaults:
        pass
    if plan is None or faults.errors:
        raise PolicyErrors(faults.errors)
    return plan
