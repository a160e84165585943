"""Metric families on plain numbers, exported through prometheus-client's collector interface.

Why not the library's own Counter and Histogram: each of their increments takes a lock and walks the buckets, and a
request touches about a dozen series; together that cost more than all else we do for a request. The numbers here are
written by the loop alone, so no lock is needed; the scrape (another thread) reads single numbers and copies of dicts,
and may see a request half counted, which the next scrape mends. Formats and negotiation stay the library's.

Callers keep the child they need (`child(labels)`) and increment its attributes; nothing is looked up by label twice.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric

Labels = tuple[str, ...]


class Cell:
    """One counter. Add to `n`."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n: float = 0


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

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Take one value in; a bound belongs to its own bucket, as `le` says."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Counters:
    """A counter family. `name` ends in `_total`."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.name = name.removesuffix("_total")
        self.text = text
        self.labels = labels
        self.children: dict[Labels, Cell] = {}

    def child(self, labels: Labels) -> Cell:
        """The counter of these label values, made at its first use."""
        cell = self.children.get(labels)
        if cell is None:
            cell = self.children[labels] = Cell()
        return cell

    def retain(self, keep: Callable[[Labels], bool]) -> None:
        """Forget the children that `keep` refuses."""
        self.children = {labels: cell for labels, cell in self.children.items() if keep(labels)}

    def collect(self) -> Iterable[Metric]:
        """Scrape."""
        metric = Metric(self.name, self.text, "counter")
        for labels, cell in self.children.copy().items():
            metric.add_sample(self.name + "_total", dict(zip(self.labels, labels, strict=True)), cell.n)
        return (metric,)

    def describe(self) -> Iterable[Metric]:
        """Registration: the name, without a scrape."""
        return (Metric(self.name, self.text, "counter"),)


class Summaries:
    """A summary family without quantiles: two series per child, where a histogram has a score."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.children: dict[Labels, Tally] = {}

    def child(self, labels: Labels) -> Tally:
        """The summary of these label values, made at its first use."""
        tally = self.children.get(labels)
        if tally is None:
            tally = self.children[labels] = Tally()
        return tally

    def retain(self, keep: Callable[[Labels], bool]) -> None:
        """Forget the children that `keep` refuses."""
        self.children = {labels: tally for labels, tally in self.children.items() if keep(labels)}

    def collect(self) -> Iterable[Metric]:
        """Scrape; children that never observed anything are left out."""
        metric = Metric(self.name, self.text, "summary")
        for labels, tally in self.children.copy().items():
            if tally.count:
                named = dict(zip(self.labels, labels, strict=True))
                metric.add_sample(self.name + "_count", named, tally.count)
                metric.add_sample(self.name + "_sum", named, tally.total)
        return (metric,)

    def describe(self) -> Iterable[Metric]:
        """Registration: the name, without a scrape."""
        return (Metric(self.name, self.text, "summary"),)


class Histograms:
    """A histogram family; all children share ascending `bounds`."""

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.bounds = tuple(bounds)
        self.children: dict[Labels, Buckets] = {}
        self._le = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]

    def child(self, labels: Labels) -> Buckets:
        """The histogram of these label values, made at its first use."""
        buckets = self.children.get(labels)
        if buckets is None:
            buckets = self.children[labels] = Buckets(self.bounds)
        return buckets

    def retain(self, keep: Callable[[Labels], bool]) -> None:
        """Forget the children that `keep` refuses."""
        self.children = {labels: buckets for labels, buckets in self.children.items() if keep(labels)}

    def collect(self) -> Iterable[Metric]:
        """Scrape; children that never observed anything are left out."""
        metric = Metric(self.name, self.text, "histogram")
        for labels, buckets in self.children.copy().items():
            counts = buckets.counts.copy()
            if not any(counts):
                continue
            named = dict(zip(self.labels, labels, strict=True))
            below = 0
            for le, count in zip(self._le, counts, strict=True):
                below += count
                metric.add_sample(self.name + "_bucket", {**named, "le": le}, below)
            metric.add_sample(self.name + "_count", named, below)
            metric.add_sample(self.name + "_sum", named, buckets.total)
        return (metric,)

    def describe(self) -> Iterable[Metric]:
        """Registration: the name, without a scrape."""
        return (Metric(self.name, self.text, "histogram"),)
