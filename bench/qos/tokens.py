"""What it costs to count a prompt's tokens, how near an estimate is, and how long the loop is kept from its work.

    python -m bench.qos.tokens                    all of it, some five minutes of two cores
    python -m bench.qos.tokens cache errors       parts: decode, gil, cache, spot, errors, between, lag, threads, cuts
    python -m bench.qos.tokens --quick            fewer prompts, shorter rounds; half a minute
    python -m bench.qos.tokens --realtime lag     on a machine that is not quiet: its threads before all others (root)
    python -m bench.qos.tokens --json

| part    | what                                                                                                  |
|---------|-------------------------------------------------------------------------------------------------------|
| decode  | what reading a body takes: the call and its prompt; these, a fingerprint and a class by modality; and   |
|         | the same where each decodes it for itself                                                             |
| gil     | each way to call the library with 128 KB: how long it takes and how long it holds the interpreter      |
| cache   | a conversation of 32,000 tokens with two new messages: finding what is known of it, and the whole count; |
|         | how far that is off where its end is not counted, with ends as long as these may be                     |
| spot    | prompts of some sizes: counted where the loop is, by a thread from asking to the answer, and estimated  |
| errors  | estimates of prompts that nothing was learnt from, by script and size; the time of one of 128 KB       |
| between | the same where the other tokenizer's exact count is all that is known, times what one has of the other's |
|         | tokens in the median of that script: how much of an error no look at a text takes away                |
| lag     | how late a timer of the loop is while prompts of 1 MB are counted; beside rounds in which nothing is,   |
|         | and rounds in which another thread takes as much of a core without the interpreter                    |
| threads | prompts of 16 KB: tokens a second by one thread and by two                                            |
| cuts    | what the sum of a text's pieces has more than the text as a whole                                     |
"""

import argparse
import asyncio
import gc
import hashlib
import itertools
import json
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.qos import texts
from sidecar.core.classes import modality_of
from sidecar.policy.schema import Service
from sidecar.proxy.ports import Counted
from sidecar.tokens.counter import Counter
from sidecar.tokens.estimate import Estimator
from sidecar.tokens.texts import pieces_of
from sidecar.tokens.tokenizer import Tokenizer, read
from sidecar.tokens.work import GUESSED_RATIO, Beside, Work
from sidecar.wire.call import Api, read_call
from sidecar.wire.prompt import prompt_of

Figures = dict[str, Any]
MEGABYTE = 1_000_000
BANDS = (100, 400, 2000, 8192, 32_768, 1 << 30)
TEMPLATE = 12
"""Tokens that the engine of the estimates' part adds to each prompt: it reports them, too."""


def us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def spread(times: Sequence[float]) -> Figures:
    """Of times in seconds, in microseconds."""
    ordered = sorted(times)
    at = len(ordered) - 1
    return {
        "p50_us": us(ordered[at // 2]),
        "p99_us": us(ordered[at * 99 // 100]),
        "max_us": us(ordered[at]),
        "count": len(ordered),
    }


def timed(call: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found


def chat(*contents: str, ascii_only: bool = False) -> bytes:
    messages = [{"role": "user" if at % 2 else "system", "content": text} for at, text in enumerate(contents, 1)]
    return json.dumps(messages, ensure_ascii=ascii_only).encode()


class Waiter:
    def __init__(self) -> None:
        self.over = asyncio.Event()

    def woken(self) -> None:
        self.over.set()


async def started(path: Path, threads: int = 1) -> Counter:
    """A counter whose tokenizer is read."""
    counter = Counter(asyncio.get_running_loop(), time.perf_counter, lambda *_, **__: None, salt=1, threads=threads)
    over = asyncio.Event()
    counter.use([Service(name="s", tokenizer=str(path))], over.set)
    await over.wait()
    if why := counter.why_not("s"):
        raise SystemExit(why)
    return counter


async def count(counter: Counter, prompt: bytes, time_s: float = 60.0) -> Counted:
    waiter = Waiter()
    counted = counter.count("s", "m", prompt, time_s, waiter)
    if counted is None:
        await waiter.over.wait()
        counted = counter.count("s", "m", prompt, time_s, waiter)
    assert counted is not None
    return counted


# --- decode -----------------------------------------------------------------------------------------------------------


def decode(_: Path, quick: bool) -> Figures:
    figures: Figures = {}
    for size in (1000, 16_000, 128_000, 1_000_000):
        said = "\n".join(texts.halves("english")[0])[:size]
        step = min(2000, size // 3)
        messages = [{"role": "user", "content": said[at : at + step]} for at in range(0, size - 200, step)]
        body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 100}).encode()
        times = max(50, (20_000_000 if quick else 100_000_000) // size // 10)
        for name, whole in (("once", True), ("each for itself", False)):
            for what, more in (("call, prompt", False), ("fingerprint and modality, too", True)):
                calls = timed(lambda body=body, whole=whole, more=more: decoded(body, whole, more), min(times, 2000))
                figures.setdefault(f"{len(body)} B", {})[f"{what}, {name}_us"] = us(sorted(calls)[len(calls) // 2])
    return figures


def decoded(body: bytes, whole: bool, more: bool) -> None:
    call = read_call(Api.CHAT, body)
    decoded_body = call.whole if whole else None
    prompt_of(body, decoded_body)
    if more:
        prompt_of(body, decoded_body)
        modality_of(b"/v1/chat/completions", call.model, body, decoded_body)


# --- gil --------------------------------------------------------------------------------------------------------------


def gil(path: Path, quick: bool) -> Figures:
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models

    theirs = Theirs.from_file(str(path))
    data = path.read_bytes()
    model = json.loads(data)["model"]
    merges = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in model["merges"]]
    pickled = pickle.dumps(theirs)
    text = "\n".join(texts.halves("code")[0])[: 128 * 1024]
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: theirs.encode(text, add_special_tokens=False),
        "encode_batch": lambda: theirs.encode_batch([text], add_special_tokens=False),
        "encode_batch_fast": lambda: theirs.encode_batch_fast([text], add_special_tokens=False),
        "encode_batch_fast, 32 KB": lambda: theirs.encode_batch_fast([text[:32_768]], add_special_tokens=False),
        "reading the file": lambda: Theirs.from_buffer(data),
        "reading it by its path": lambda: Theirs.from_file(str(path)),
        "reading what was pickled": lambda: pickle.loads(pickled),
        "making it of ready lists": lambda: models.BPE(model["vocab"], merges),
    }
    return {name: held(call, 3 if quick else 15) for name, call in calls.items()}


def held(call: Callable[[], object], times: int) -> Figures:
    """How long a call takes, and the longest that another thread could not run meanwhile: the least of several.

    The least, since a busy machine adds to both and takes nothing away.
    """
    took, longest = [], []
    for _ in range(times):
        gaps: list[float] = []
        over = threading.Event()

        def probe(gaps: list[float] = gaps, over: threading.Event = over) -> None:
            while not over.is_set():
                begun = time.perf_counter()
                time.sleep(0.0002)
                gaps.append(time.perf_counter() - begun - 0.0002)

        thread = threading.Thread(target=probe)
        thread.start()
        time.sleep(0.01)
        gaps.clear()
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
        time.sleep(0.001)
        over.set()
        thread.join()
        longest.append(max(gaps))
    return {"took_ms": round(min(took) * 1e3, 1), "held_ms": round(min(longest) * 1e3, 2)}


# --- cache ------------------------------------------------------------------------------------------------------------


async def cache(path: Path, quick: bool) -> Figures:
    counter = await started(path)
    blocks, _ = texts.halves("english")
    prose = " ".join("\n".join(blocks).split())
    said, at = ["You are a helpful assistant."], 0
    while len(chat(*said)) < 128 * 1024 - 3000:
        said += [prose[at : at + 300], prose[at + 300 : at + 2500]]
        at += 2500
    begun = await count(counter, chat(*said))
    file = counter._files[str(path)]
    rounds = 200 if quick else 2000
    found, whole = [], []
    for number in range(rounds):
        new = f"{number}: and what does it cost to change that later on, if we find that it was wrong after all?"
        prompt = chat(*said, prose[at : at + 40], new)
        copy = bytes(bytearray(prompt))
        found += timed(lambda prompt=copy: counter.prefixes.find(prompt, file.salt), 1)
        before = time.perf_counter()
        counted = counter.count("s", "m", prompt, 0.0, Waiter())
        whole.append(time.perf_counter() - before)
        assert counted is not None and counted.how == "cached"
    exact = await count(await started(path), prompt)
    counter.close()
    known = counter.prefixes.find(prompt, file.salt)
    assert known is not None
    off: Figures = {}
    chance = random.Random(5)
    for script in texts.SCRIPTS:
        least, most = 60, int(known.end * GUESSED_RATIO) - 60
        ratios = []
        for text in texts.cuts(texts.halves(script)[1], 50 if quick else 500, chance, least, most):
            longer = chat(*said, text)
            guessed, whole_work = (Work(longer, file.salt, known, file.tokenizers, Beside()) for _ in range(2))
            if not guessed.guess():
                continue  # its escapes make it longer than it may be
            for _ in whole_work.run(0):
                pass
            ratios.append((0, abs(guessed.tokens / whole_work.tokens - 1)))
        off[script] = error(ratios)
    return {
        "prompt_bytes": len(prompt),
        "tokens": begun.tokens,
        "find": spread(found),
        "count with two new messages": spread(whole),
        "counted, and anew": f"{counted.tokens}, {exact.tokens}",
        "off where its end is not counted": off,
    }


# --- spot -------------------------------------------------------------------------------------------------------------

SIZES = (250, 500, 1000, 2000, 4000, 8000, 16_000)


async def spot(path: Path, quick: bool) -> Figures:
    counter = await started(path)
    tokenizer, estimator, chance = read(str(path)), Estimator(), random.Random(6)
    figures: Figures = {}
    for script in texts.SCRIPTS:
        for size in SIZES:
            rows: dict[str, list[float]] = {"on the spot": [], "by a thread": [], "estimated": []}
            for text in texts.cuts(texts.halves(script)[1], 30 if quick else 200, chance, size, size + 1):
                prompt = chat(text)
                work = Work(prompt, 1, None, (tokenizer,), Beside())
                rows["on the spot"] += timed(lambda work=work: sum(work.run(0)), 1)
                rows["estimated"] += timed(lambda prompt=prompt: estimator.estimate(prompt), 1)
                file = counter._files[str(path)]
                file.least_s_per_byte = 1.0  # it is never counted on the spot
                begun = time.perf_counter()
                await count(counter, prompt)
                rows["by a thread"].append(time.perf_counter() - begun)
            figures[f"{script}, {size} B"] = {
                f"{name}_us": us(sorted(times)[len(times) // 2]) for name, times in rows.items()
            }
    counter.close()
    return figures


# --- errors -----------------------------------------------------------------------------------------------------------


def errors(path: Path, quick: bool) -> Figures:
    tokenizer = read(str(path))
    chance = random.Random(8)
    learn: list[tuple[bytes, int]] = []
    held_out: dict[str, list[tuple[bytes, int]]] = {}
    each = 100 if quick else 1000
    for script in texts.SCRIPTS:
        known, unknown = texts.halves(script)
        learn += [asked(tokenizer, text, at) for at, text in enumerate(texts.cuts(known, each, chance))]
        held_out[script] = [asked(tokenizer, text, at) for at, text in enumerate(texts.cuts(unknown, each, chance))]
    chance.shuffle(learn)
    estimator = Estimator()
    figures: Figures = {"learnt_from": len(learn), "before": judged(estimator, held_out)}
    stages = (20, 100, 300)
    for number, (prompt, tokens) in enumerate(learn, 1):
        estimator.learn(prompt, tokens)
        if number in stages:
            figures[f"after {number}"] = judged(estimator, held_out)
    figures["after all"] = judged(estimator, held_out, bands=True)
    figures["time of 128 KB"] = {}
    for script in texts.SCRIPTS:
        prompt = chat("\n".join(texts.halves(script)[1])[: 128 * 1024])[: 128 * 1024]
        figures["time of 128 KB"][script] = spread(timed(lambda prompt=prompt: estimator.estimate(prompt), 2000))
    prompt, tokens = held_out["english"][0]
    figures["time of learning"] = spread(timed(lambda: estimator.learn(prompt, tokens), 300))
    return figures


def asked(tokenizer: Tokenizer, text: str, number: int) -> tuple[bytes, int]:
    """A prompt, every eighth escaped as Python's json does, and what its engine reports."""
    return chat(text, ascii_only=number % 8 == 0), tokenizer.count(text) + TEMPLATE


def judged(estimator: Estimator, held_out: dict[str, list[tuple[bytes, int]]], *, bands: bool = False) -> Figures:
    found: Figures = {}
    for script, prompts in held_out.items():
        ratios = [(len(prompt), abs(estimator.estimate(prompt) / tokens - 1)) for prompt, tokens in prompts]
        found[script] = banded(ratios) if bands else {"all": error(ratios)}
    return found


def between(path: Path, quick: bool) -> Figures:
    tokenizer = read(str(path))
    others = {name: read(str(other)) for name, other in texts.tokenizers().items() if other != path}
    figures: Figures = {}
    for name, other in others.items():
        for script in texts.SCRIPTS:
            chance = random.Random(8)
            cuts = texts.cuts(texts.halves(script)[1], 100 if quick else 1000, chance)
            counts = [(len(chat(text)), tokenizer.count(text), other.count(text)) for text in cuts]
            usual = sorted(tokens / others for _, tokens, others in counts)[len(counts) // 2]
            ratios = [
                (size, abs((others * usual + TEMPLATE) / (tokens + TEMPLATE) - 1)) for size, tokens, others in counts
            ]
            figures[f"{script}, by {name}"] = banded(ratios)
    return figures


def banded(ratios: list[tuple[int, float]]) -> Figures:
    """Errors of all prompts, and by their size."""
    found = {"all": error(ratios)}
    for least, most in itertools.pairwise(BANDS):
        found[f">= {least} B"] = error([ratio for ratio in ratios if least <= ratio[0] < most])
    return found


def error(ratios: list[tuple[int, float]]) -> Figures:
    ordered = sorted(ratio for _, ratio in ratios)
    at = len(ordered) - 1
    return {
        "median_ratio": round(ordered[at // 2], 4),
        "p99_ratio": round(ordered[at * 99 // 100], 4),
        "prompts": len(ordered),
    }


# --- lag --------------------------------------------------------------------------------------------------------------

HARD = {
    "code": lambda: "\n".join(texts.halves("code")[0])[:MEGABYTE],
    "chinese": lambda: "".join(texts.halves("chinese")[0])[: MEGABYTE // 3],
    "one letter": lambda: "a" * MEGABYTE,
    "emoji": lambda: "\U0001f600" * (MEGABYTE // 4),
    "combining marks": lambda: "e" + "\u0301" * (MEGABYTE // 2),
    "chinese, no stops": lambda: "没有空格的文字" * (MEGABYTE // 21),
    "spaces": lambda: " " * MEGABYTE,
    "quotes": lambda: '"' * 245_000,
    "4,000 messages": lambda: "",
}
EVERY_S = 0.001


async def lag(path: Path, quick: bool) -> Figures:
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)  # as a sidecar does
    counter = await started(path)
    prompts = {name: chat(make()) for name, make in HARD.items()}
    prompts["4,000 messages"] = chat(*["a few words that were said " * 8] * 3900)
    kinds: dict[str, list[list[float]]] = {"idle": [], "burning": []}
    kinds |= {name: [] for name in prompts}
    seconds = 0.5 if quick else 1.0
    rounds = 2 if quick else 5
    for number in range(rounds):
        kinds["idle"].append(await late(loop, seconds))
        burner = Burner()
        kinds["burning"].append(await late(loop, seconds))
        burner.stop()
        for name, prompt in prompts.items():
            busy = asyncio.create_task(counting(counter, prompt, number))
            kinds[name].append(await late(loop, seconds))
            busy.cancel()
            await asyncio.wait([busy])
            if not busy.cancelled():
                busy.result()
            while counter.pending_bytes:
                await asyncio.sleep(0.01)
    counter.close()
    return {name: worst(times) for name, times in kinds.items()}


def worst(rounds: list[list[float]]) -> Figures:
    """What the machine does to one round it does not do to most: the largest of each, and the median of those."""
    largest = sorted(max(each) for each in rounds)
    return {
        **spread([each for times in rounds for each in times]),
        "max_of_round_us": us(largest[len(largest) // 2]),
        "rounds": len(rounds),
    }


async def counting(counter: Counter, prompt: bytes, number: int) -> None:
    """One prompt after another, each as if it were new.

    With pauses of an eighth: a realtime thread that always runs is stopped by the kernel for 50 ms a second.
    """
    while True:
        counter.prefixes.clear()
        begun = time.perf_counter()
        counted = await count(counter, prompt)
        assert counted.how == "exact", (counted.how, number)
        await asyncio.sleep((time.perf_counter() - begun) / 8)


async def late(loop: asyncio.AbstractEventLoop, seconds: float) -> list[float]:
    """How late a timer is, again and again. The loop's clock counts whole milliseconds, hence our own."""
    found: list[float] = []
    over = loop.create_future()
    ends = time.perf_counter() + seconds
    due = time.perf_counter() + EVERY_S

    def fire() -> None:
        nonlocal due
        now = time.perf_counter()
        found.append(max(0.0, now - due))
        if now >= ends:
            over.set_result(None)
            return
        due = now + EVERY_S
        loop.call_later(EVERY_S, fire)

    loop.call_later(EVERY_S, fire)
    await over
    return found


class Burner:
    """A thread that takes as much of a core as counting does, and never holds the interpreter for long."""

    def __init__(self) -> None:
        self._over = False
        self._thread = threading.Thread(target=self._burn)
        self._thread.start()

    def _burn(self) -> None:
        data = bytes(8 << 20)
        while not self._over:
            hashlib.blake2b(data).digest()
            time.sleep(0.001)

    def stop(self) -> None:
        self._over = True
        self._thread.join()


# --- threads, cuts ----------------------------------------------------------------------------------------------------


async def threads(path: Path, quick: bool) -> Figures:
    figures: Figures = {}
    chance = random.Random(3)
    for script in texts.SCRIPTS:
        prompts = [
            chat(text) for text in texts.cuts(texts.halves(script)[1], 60 if quick else 300, chance, 16_000, 16_400)
        ]
        for number in (1, 2):
            counter = await started(path, number)
            begun = time.perf_counter()
            alone = []
            counted = []
            if number == 1:
                for prompt in prompts[:60]:
                    before = time.perf_counter()
                    await count(counter, prompt)
                    alone.append(time.perf_counter() - before)
                counter.prefixes.clear()
                begun = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                counted = [tasks.create_task(count(counter, prompt)) for prompt in prompts]
            took = time.perf_counter() - begun
            tokens = sum(each.result().tokens for each in counted)
            figures[f"{script}, {number} thread{'s' * (number > 1)}"] = {
                "tokens_per_s": round(tokens / took),
                "mb_per_s": round(sum(map(len, prompts)) / took / 1e6, 2),
                **({"one alone": spread(alone)} if alone else {}),
            }
            counter.close()
            await asyncio.to_thread(counter.join, 10.0)
    return figures


def cuts(path: Path, quick: bool) -> Figures:
    from tokenizers import Tokenizer as Theirs

    theirs = Theirs.from_file(str(path))
    tokenizer = read(str(path))
    figures: Figures = {}
    english = "\n".join(texts.halves("english")[0])[:MEGABYTE]
    for name, text in {"english": english, **{name: make() for name, make in HARD.items()}}.items():
        if not text:
            continue
        raw = json.dumps(text, ensure_ascii=False).encode()
        whole = len(theirs.encode_batch_fast([text], add_special_tokens=False)[0])
        pieces = [tokenizer.count(piece) for piece in pieces_of(raw)]
        work = Work(chat(text), 1, None, (tokenizer,), Beside())
        for _ in work.run(0):
            pass
        figures[name] = {"whole": whole, "pieces": len(pieces), "more": work.tokens - whole}
    return figures


PARTS: dict[str, Callable[[Path, bool], Any]] = {
    "decode": decode,
    "gil": gil,
    "cache": cache,
    "spot": spot,
    "errors": errors,
    "between": between,
    "lag": lag,
    "threads": threads,
    "cuts": cuts,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--realtime", action="store_true")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    figures: Figures = {}
    for tokenizer, path in texts.tokenizers().items():
        for part in args.parts or PARTS:
            found = PARTS[part](path, args.quick)
            if asyncio.iscoroutine(found):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    found = runner.run(found)
            figures.setdefault(tokenizer, {})[part] = found
            if not args.json:
                show(f"{tokenizer}, {part}", found)
    if args.json:
        print(json.dumps(figures, indent=1))
    return 0


def show(title: str, figures: Figures, depth: int = 0) -> None:
    print(f"{'  ' * depth}{title}", flush=True)
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            show(name, value, depth + 1)
        elif isinstance(value, dict):
            print(
                f"{'  ' * (depth + 1)}{name:26} " + "  ".join(f"{key} {each}" for key, each in value.items()),
                flush=True,
            )
        else:
            print(f"{'  ' * (depth + 1)}{name:26} {value}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
