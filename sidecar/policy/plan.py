"""A canary's plan as an operator writes it: one YAML or JSON document, read as strictly as a policy.

```yaml
baseline: v1
steps:
  - {weight: 0.05, min: 5m, min_samples: 600}
  - {weight: 0.2, min: 10m, min_samples: 2000}
false_alarm: 0.01
margins: {first_token: 1.2}
min_ready: 0.5
```

Only what one number says alone is judged here; what a plan means for the table it is meant for (steps that rise, a
baseline that has a weight) is judged where the rollout begins, whoever asks for it.
"""

from sidecar.policy.document import documents
from sidecar.policy.errors import Faults, PolicyError, PolicyErrors, TooManyFaults
from sidecar.policy.read import Reader
from sidecar.policy.schema import PlanDocument


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
