"""Metric families on plain numbers, and their text for Prometheus.

Why not prometheus-client's own Counter and Histogram: each of their increments takes a lock and walks the buckets, and
a request touches a dozen series; and their exposition takes about 18 us a sample, in which streams stand still. The
numbers here are written and read by the loop alone. The text is yielded in pieces of a few microseconds, so that
whoever renders can let streams go on in between; a scrape may then see a request half counted, which the next mends.

Callers keep the child they need (`child(labels)`) and increment its attributes; nothing is looked up by label twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar

Labels = tuple[str, ...]
Kind = Literal["counter", "gauge", "summary", "histogram"]


class Cell:
    """One counter. Add to `n`."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Tally:
    """One summary: `count` observations that add up to `total`."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Take one value in."""
        self.count += 1
        self.total += value


class Buckets:
    """One histogram over shared, ascending upper bounds; the last of `counts` is what lies above all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Take one value in; a bound belongs to its own bucket, as `le` says."""
        # bisect_left by hand: compiled, it compares numbers where the library's compares objects.
        bounds = self.bounds
        low, high = 0, len(bounds)
        while low < high:
            middle = (low + high) >> 1
            if bounds[middle] < value:
                low = middle + 1
            else:
                high = middle
        self.counts[low] += 1
        self.total += value


Child = TypeVar("Child", Cell, Tally, Buckets)


class Family(Generic[Child]):
    """A metric with labels. `new` makes a child; what never observed anything has no text, counters at 0 have."""

    kind: Kind

    def __init__(self, name: str, text: str, labels: Labels, new: Callable[[], Child]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.children: dict[Labels, Child] = {}
        self._new: Callable[[], Child] = new

    def child(self, labels: Labels) -> Child:
        """The child of these label values, made at its first use."""
        child = self.children.get(labels)
        if child is None:
            child = self.children[labels] = self._new()
        return child

    def retain(self, keep: Callable[[Labels], bool]) -> None:
        """Forget the children that `keep` refuses."""
        self.children = {labels: child for labels, child in self.children.items() if keep(labels)}

    def pieces(self) -> Iterator[str]:
        """The family's text; may be suspended between pieces while children come and go."""
        yield header(self.name, self.text, self.kind)
        for labels, child in list(self.children.items()):
            yield self.sample(label_text(self.labels, labels), child)

    def sample(self, labels: str, child: Child) -> str:
        """One child's lines."""
        raise NotImplementedError


class Counters(Family[Cell]):
    """A counter family. `name` ends in `_total`."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        super().__init__(name, text, labels, Cell)

    def sample(self, labels: str, child: Cell) -> str:
        return f"{self.name}{{{labels}}} {child.n}\n"


class Summaries(Family[Tally]):
    """A summary family without quantiles: two series per child, where a histogram has a score."""

    kind = "summary"

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        super().__init__(name, text, labels, Tally)

    def sample(self, labels: str, child: Tally) -> str:
        if not child.count:
            return ""
        return f"{self.name}_count{{{labels}}} {child.count}\n{self.name}_sum{{{labels}}} {child.total!r}\n"


class Histograms(Family[Buckets]):
    """A histogram family; all children share ascending `bounds`."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> None:
        shared = tuple(bounds)
        super().__init__(name, text, labels, lambda: Buckets(shared))
        self._le = [*(repr(float(bound)) for bound in shared), "+Inf"]

    def sample(self, labels: str, child: Buckets) -> str:
        below = 0
        lines = []
        start = f"{self.name}_bucket{{{labels}{',' if labels else ''}le="
        for le, count in zip(self._le, child.counts, strict=True):
            below += count
            lines.append(f'{start}"{le}"}} {below}\n')
        if not below:
            return ""
        lines.append(f"{self.name}_count{{{labels}}} {below}\n{self.name}_sum{{{labels}}} {child.total!r}\n")
        return "".join(lines)


def header(name: str, text: str, kind: Kind) -> str:
    """The lines that open a family. `text` is one line."""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def label_text(names: Iterable[str], values: Iterable[str]) -> str:
    """`name="value",...`, escaped as the text format wants it."""
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)])


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value
