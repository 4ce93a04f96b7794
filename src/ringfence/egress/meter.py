"""What was used: requests, bytes and money, by rule, sandbox and project; and whether there is more to spend.

Counts live in memory and are written to a file of this process's own each second. Whoever starts next adds
the files of processes that have ended to a total. A crash between the two steps counts twice, never not at
all.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.egress.keys import give
from ringfence.egress.policy import Decision
from ringfence.model.policy import Budget

if TYPE_CHECKING:
    from ringfence.egress.door import Door
    from ringfence.egress.policy import Rule

REQUESTS, SENT, RECEIVED, SPEND = range(4)
_FLUSH = 1.0  # seconds
_TELL_AGAIN = 10.0  # seconds between two events about the same limit
Counts = list[float]

_TOTAL = re.compile(rb'"total_tokens"\s*:\s*(\d{1,12})')
_PART = re.compile(
    rb'"(?:input|output|prompt|completion|cache_read_input|cache_creation_input)_tokens"\s*:\s*(\d{1,12})'
)


class OverBudget(Exception):
    """There is no more to spend. ``retry``: seconds until there is, if it comes back."""

    def __init__(self, decision: Decision, retry: float | None) -> None:
        super().__init__(decision.reason)
        self.decision = decision
        self.retry = retry


class Meter:
    """Counts, and refuses. One in a process; ``folder`` may be shared by several."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._own: dict[str, Counts] = {}
        self._others: dict[str, Counts] = {}
        self._elsewhere: dict[str, Counts] = {}  # what others have counted, as the store says
        self._rates: dict[str, tuple[float, float]] = {}  # tokens, at
        self._told: dict[tuple[str, str], float] = {}
        self._name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._lock_file: Any = None
        self._flush: asyncio.TimerHandle | None = None
        self._refreshed = 0.0
        self.emit: Any = None

    def start(self) -> None:
        """Take over what ended processes have counted."""
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._lock_file = open(self._folder / f"{self._name}.lock", "wb")  # noqa: SIM115 - as long as we live
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        # Whoever starts the process may be root, and whoever counts in it is not.
        give(self._folder / f"{self._name}.lock")
        with open(self._folder / "merge", "ab") as lock:
            give(self._folder / "merge")
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = _load(self._folder / "total")
            dead = []
            for path in self._folder.glob("*.lock"):
                if path.stem == self._name:
                    continue
                with open(path, "ab") as other:
                    try:
                        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    dead.append(path)
                    _sum(total, _load(path.with_suffix(".json")))
            if dead:
                _store(self._folder / "total", total)
            for path in dead:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        self._refresh()

    def _refresh(self) -> None:
        """What others have counted."""
        if self._folder is None:
            return
        try:
            others = _load(self._folder / "total")
            for path in self._folder.glob("*.json"):
                if path.stem != self._name:
                    _sum(others, _load(path))
        except OSError:
            return  # what was known holds: less must not be taken for true
        self._others = others
        self._refreshed = time.monotonic()

    def _changed(self) -> None:
        if self._flush is None and self._folder is not None:
            self._flush = asyncio.get_running_loop().call_later(_FLUSH * 0.9, self.flush)

    def flush(self) -> None:
        """Write the counts down."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._folder is not None:
            _store(self._folder / f"{self._name}.json", self._own)
            self._refresh()

    def close(self) -> None:
        """Write the counts down for the last time."""
        if self._lock_file is not None:
            self.flush()
            self._lock_file.close()
            self._lock_file = None

    # -- counting

    def used(self, key: str) -> Counts:
        """Requests, bytes out, bytes in and money of ``sandbox/ID``, ``project/ID`` or ``rule/ID/RULE``."""
        # Some of those that the store knows of count into this folder, too: the larger sum has all of them.
        own, here = self._own.get(key, _NOTHING), self._others.get(key, _NOTHING)
        there = self._elsewhere.get(key, _NOTHING)
        return [mine + max(pair) for mine, *pair in zip(own, here, there, strict=True)]

    def own(self, key: str) -> Counts:
        """What this process has counted."""
        return list(self._own.get(key, _NOTHING))

    def elsewhere(self, key: str, counts: Counts) -> None:
        """What all other processes of a store have counted."""
        self._elsewhere[key] = counts

    def seen(self, key: str) -> Counts:
        """The same, and what others have counted until a second ago."""
        if self._refreshed < time.monotonic() - _FLUSH:
            self._refresh()
        return self.used(key)

    def _get(self, key: str) -> Counts:
        found = self._own.get(key)
        if found is None:
            found = self._own[key] = [0, 0, 0, 0.0]
        return found

    @staticmethod
    def keys(door: Door, rule: Rule | None) -> list[tuple[str, Budget | None]]:
        """What something counts towards, and the budget of each."""
        sandbox = door.spec.sandbox
        found: list[tuple[str, Budget | None]] = [(f"sandbox/{sandbox}", door.network.budget)]
        if door.spec.project:
            found.append((f"project/{door.spec.project}", door.project_budget))
        if rule is not None:
            found.insert(0, (f"rule/{sandbox}/{rule.key}", rule.source.budget))
        return found

    def begin(self, door: Door, rule: Rule) -> None:
        """Count a request.

        Raises:
            OverBudget: it may not be made; nothing was counted.
        """
        keys = self.keys(door, rule)
        if self._refreshed < time.monotonic() - _FLUSH and any(budget is not None for _, budget in keys):
            self._refresh()  # others have counted while nothing passed here
        price = next((budget.price for _, budget in keys if budget is not None and budget.price), 0.0)
        for key, budget in keys:
            if budget is None:
                continue
            used = self.used(key)
            if budget.max_requests is not None and used[REQUESTS] >= budget.max_requests:
                self._over(door, rule, key, budget, "requests", f"{budget.max_requests} requests", None)
            if budget.max_bytes is not None and used[SENT] + used[RECEIVED] >= budget.max_bytes:
                self._over(door, rule, key, budget, "bytes", f"{budget.max_bytes} bytes", None)
            if budget.max_spend is not None and used[SPEND] + price > budget.max_spend:
                self._over(door, rule, key, budget, "spend", f"{budget.max_spend:g} to spend", None)
        for key, budget in keys:
            if budget is not None and budget.rate is not None:
                self._rate(door, rule, key, budget)
        limits = door.spec.limits
        if limits.shared and door.project_budget and not door.engine.shared(door.spec.project).valid:
            reason = "what is left of this project's budget is not known now"
            raise OverBudget(Decision(False, "budget_unknown", rule, reason, "try again"), 1.0)
        if limits.shared and limits.rate is not None:
            retry = door.engine.shared(door.spec.project).request()
            if retry is not None:
                limit = f"{limits.rate:g} requests a second"
                self._over(door, rule, f"project/{door.spec.project}", Budget(), "rate", limit, retry)
        for key, _ in keys:
            counts = self._get(key)
            counts[REQUESTS] += 1
            counts[SPEND] += price
        self._changed()

    def _rate(self, door: Door, rule: Rule, key: str, budget: Budget) -> None:
        assert budget.rate is not None
        now = time.monotonic()
        most = max(1.0, budget.rate)
        level, at = self._rates.get(key, (most, now))
        level = min(most, level + (now - at) * budget.rate)
        if level < 1:
            self._rates[key] = (level, now)
            self._over(
                door,
                rule,
                key,
                budget,
                "rate",
                f"{budget.rate:g} requests a second",
                (1 - level) / budget.rate,
            )
        self._rates[key] = (level - 1, now)

    def add(self, door: Door, rule: Rule | None, sent: int = 0, received: int = 0) -> None:
        """Bytes pass.

        Raises:
            OverBudget: they are more than the budget; they are counted all the same.
        """
        over: tuple[str, Budget] | None = None
        for key, budget in self.keys(door, rule):
            counts = self._get(key)
            counts[SENT] += sent
            counts[RECEIVED] += received
            if budget is not None and budget.max_bytes is not None:
                used = self.used(key)
                if used[SENT] + used[RECEIVED] > budget.max_bytes:
                    over = over or (key, budget)
        self._changed()
        if over is not None:
            self._over(door, rule, *over, "bytes", f"{over[1].max_bytes} bytes", None)

    def spend_tokens(self, door: Door, rule: Rule, tokens: int) -> float:
        """Count what an answer says that it cost; returns it."""
        keys = self.keys(door, rule)
        price = next(
            (budget.token_price for _, budget in keys if budget is not None and budget.token_price), 0.0
        )
        for key, _ in keys:
            self._get(key)[SPEND] += tokens * price
        self._changed()
        return tokens * price

    def counts_tokens(self, door: Door, rule: Rule) -> bool:
        """Whether anybody wants to know how many tokens an answer reports."""
        return any(budget is not None and budget.token_price for _, budget in self.keys(door, rule))

    def _over(
        self,
        door: Door,
        rule: Rule | None,
        key: str,
        budget: Budget,
        what: str,
        limit: str,
        retry: float | None,
    ) -> None:
        scope = key.partition("/")[0]
        reason = f"the budget of this {scope} is used up: {limit}"
        decision = Decision(
            False, f"budget_{what}", rule, reason, "" if retry else "somebody has to raise the budget"
        )
        now = time.monotonic()
        if self.emit is not None and now - self._told.get((key, what), -_TELL_AGAIN) >= _TELL_AGAIN:
            self._told[key, what] = now
            spec = door.spec
            event = {"event": "egress.over_budget", "sandbox": spec.sandbox, "project": spec.project,
                     "task": spec.task, "scope": scope, "limit": what, "reason": reason,
                     "pause": budget.pause and what != "rate"}  # fmt: skip
            self.emit(event)
        raise OverBudget(decision, retry)

    def forget(self, sandbox: str) -> None:
        """A sandbox is no more; its project's counts stay."""
        if any(_about(key, sandbox) for key in self._others) and self._folder is not None:
            # What a process that has ended counted for it.
            with open(self._folder / "merge", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                total = _load(self._folder / "total")
                kept = {key: counts for key, counts in total.items() if not _about(key, sandbox)}
                if len(kept) < len(total):
                    _store(self._folder / "total", kept)
        for counts in (self._own, self._others):
            for key in [key for key in counts if _about(key, sandbox)]:
                del counts[key]
        if self._lock_file is not None:
            self._changed()
        for key in [key for key in self._rates if f"/{sandbox}" in key]:
            del self._rates[key]
        for told in [told for told in self._told if f"/{sandbox}" in told[0]]:
            del self._told[told]


_NOTHING: Counts = [0, 0, 0, 0.0]


def tokens(tail: bytes) -> int:
    """The tokens that the end of an answer reports: the largest total, else the parts' largest, added."""
    totals = [int(found) for found in _TOTAL.findall(tail)]
    if totals:
        return max(totals)
    parts: dict[bytes, int] = {}
    for match in _PART.finditer(tail):
        name = match[0].partition(b":")[0]
        parts[name] = max(parts.get(name, 0), int(match[1]))
    return sum(parts.values())


def _about(key: str, sandbox: str) -> bool:
    return key == f"sandbox/{sandbox}" or key.startswith(f"rule/{sandbox}/")


def _load(path: Path) -> dict[str, Counts]:
    try:
        values = json.loads(path.read_bytes())
        return {
            str(key): [float(one) for one in counts] for key, counts in values.items() if len(counts) == 4
        }
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        return {}


def _store(path: Path, counts: dict[str, Counts]) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(counts))
    give(draft)
    os.replace(draft, path)


def _sum(total: dict[str, Counts], more: dict[str, Counts]) -> None:
    for key, counts in more.items():
        total[key] = [one + other for one, other in zip(total.get(key, _NOTHING), counts, strict=True)]
