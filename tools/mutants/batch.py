"""Many faults in one fork, one after the other: ten times quicker than a fork for each.

What a fault leaves behind must not decide about the next one. So a fault is killed if a test fails with it and passes
once it is taken out. If the test then fails too, the fault is the first of a new fork; there, nothing was left behind.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faults import Mutant
from fork import FAILED, forked
from reach import Plan, forget

MEMORY = 6 * 2**30  # bytes: a changed size may ask for more than there is
SIZE = 40  # faults in one fork
SILENT = 3600.0  # seconds without a word, of one that waits for ever
Outcome = dict[str, Any]  # {"outcome": "killed" or "survived", "by": test, "seconds": 1.2}, of the processor
UNREACHED: Outcome = {"outcome": "survived", "by": "no test reaches it", "seconds": 0.0}
Put = Callable[[Mutant], Callable[[], None]]  # puts a fault into the code; gives what takes it out


def tried_in_batches(
    todo: Sequence[Mutant], plan: Plan, jobs: int, put: Put, items: Mapping[str, Any]
) -> Iterator[tuple[Mutant, Outcome]]:
    """Each fault with its outcome, `jobs` forks at a time."""
    waiting = [m for m in todo if plan.tests_for(m)]
    yield from ((m, UNREACHED) for m in todo if not plan.tests_for(m))
    running: list[Batch] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                first, *rest = waiting[:SIZE]
                # Faults of one function follow each other: the test that killed one is the first to try the next.
                some = [first, *sorted(rest, key=lambda m: (m.file, m.owner))]
                del waiting[:SIZE]
                running.append(Batch.begun(some, plan, put, items))
            ready, _, _ = select.select([batch.answers for batch in running], [], [], 10.0)
            for batch in list(running):
                if batch.answers in ready or batch.is_silent():
                    for mutant, outcome in batch.outcomes():
                        plan.killed(mutant, outcome["by"])
                        yield mutant, outcome
                    if batch.ended:
                        running.remove(batch)
                        waiting[:0] = batch.left
    finally:  # interrupted: no fork goes on alone
        for batch in running:
            os.kill(batch.pid, signal.SIGKILL)


@dataclass
class Batch:
    """A fork that tries some faults, seen from outside."""

    pid: int
    answers: int  # where it writes
    left: list[Mutant]  # not tried yet; the first is being tried
    heard: float = field(default_factory=time.monotonic)
    text: bytes = b""
    fresh: bool = True  # the first fault is being tried
    ended: bool = False

    @classmethod
    def begun(cls, some: Sequence[Mutant], plan: Plan, put: Put, items: Mapping[str, Any]) -> Batch:
        read, write = os.pipe()
        pid = forked(lambda: _work(some, plan, put, items, write))
        os.close(write)
        return cls(pid, read, list(some))

    def is_silent(self) -> bool:
        return time.monotonic() - self.heard > SILENT

    def outcomes(self) -> Iterator[tuple[Mutant, Outcome]]:
        """What it has written since; if it has ended, why."""
        if self.is_silent():
            os.kill(self.pid, signal.SIGKILL)
        self.heard, more = time.monotonic(), os.read(self.answers, 65536)
        *lines, self.text = (self.text + more).split(b"\n")
        for line in lines:
            self.fresh = False
            yield self.left.pop(0), json.loads(line)
        if more:
            return
        self.ended = True
        os.close(self.answers)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code == FAILED:
            sys.exit(f"this fault could not be tried: {self.left[0].file}:{self.left[0].line}  {self.left[0].key}")
        if code < 0 and self.fresh:  # one that is not the first may have died of what an earlier one left behind
            yield self.left.pop(0), {"outcome": "killed", "by": f"signal {-code}", "seconds": 0.0}


def _work(some: Sequence[Mutant], plan: Plan, put: Put, items: Mapping[str, Any], answers: int) -> int:
    """The fork: a line for each fault. It ends early if it cannot go on with clean hands."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    failures = Failures()
    next(iter(items.values())).config.pluginmanager.register(failures)

    def fails(test: str) -> bool:
        # Of the processor: a busy machine kills no fault. The signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, 3 + 5 * plan.seconds([test]))
        return failures.of(items[test])

    for n, mutant in enumerate(some):
        begun, tests = time.process_time(), plan.tests_for(mutant)
        forget()
        take_out = put(mutant)
        by = next(filter(fails, tests), "")
        take_out()
        forget()
        clean = not (by and fails(by))
        if not clean and n:
            return 0
        plan.killed(mutant, by)
        outcome = {"outcome": "killed" if by else "survived", "by": by, "seconds": time.process_time() - begun}
        os.write(answers, json.dumps(outcome | {"seconds": round(outcome["seconds"], 2)}).encode() + b"\n")
        if not clean:
            return 0
    return 0


class Failures:
    """A pytest plugin that says whether a test fails."""

    def __init__(self) -> None:
        self.seen = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seen |= report.failed

    def of(self, item: Any) -> bool:
        self.seen = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.seen
