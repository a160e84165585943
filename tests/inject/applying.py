"""RFC 6902 as it is written, for tests of who makes patches."""

from copy import deepcopy
from typing import Any


def applied(value: Any, operations: list[dict[str, Any]]) -> Any:
    """`value` after add, remove and replace. KeyError or IndexError for a place that there is not."""
    tree = deepcopy(value)
    for each in operations:
        steps = [step.replace("~1", "/").replace("~0", "~") for step in each["path"].split("/")[1:]]
        if not steps:
            tree = each["value"]
            continue
        parent = tree
        for step in steps[:-1]:
            parent = parent[int(step)] if isinstance(parent, list) else parent[step]
        last = steps[-1]
        match each["op"], parent:
            case "add", list():
                assert 0 <= int(last) <= len(parent)
                parent.insert(int(last), each["value"])
            case "add", dict():
                parent[last] = each["value"]
            case "remove", list():
                del parent[int(last)]
            case "remove", dict():
                del parent[last]
            case "replace", list():
                parent[int(last)] = each["value"]
            case "replace", dict():
                assert last in parent
                parent[last] = each["value"]
            case other:
                raise AssertionError(other)
    return tree
