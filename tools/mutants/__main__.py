"""Does a test fail when the code is wrong? One small fault at a time, and the tests that reach it.

    python tools/mutants                              # all of it; goes on where it was
    python tools/mutants --only linear.py --sample 40
    python tools/mutants --near                       # first, quickly: by the test file of each source file alone
    python tools/mutants --again                      # also those that survived without a reason

torch is imported once; faults are tried in forks. Which tests reach a line is measured first. A fault that no test
notices has to stand in survivors.toml with the reason; tests/MUTANTS.md is the table.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import random
import signal
import sys
import time

import hypothesis
import torch
from batch import Outcome
from faults import Mutant, mutants
from fork import forked, waited_for
from outcomes import Verdicts, explained, report, write_table
from reach import Plan, collected, measured
from trial import Keep, can_run_again, try_in_place, try_on_import
from where import FIRST, PACKAGE, ROOT, SECONDS, near_tests, source_files, test_files


def main() -> None:
    """Try the faults that were not tried yet, and say what came of it."""
    args = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _warm_up()
    sources = {file: (PACKAGE / file).read_text() for file in source_files(args.only)}
    everything = [m for file, source in sources.items() for m in mutants(file, source)]
    # In random order: whenever a run is stopped, what was tried is a sample.
    chosen = random.Random(0).sample(everything, args.sample or len(everything))
    verdicts = Verdicts(everything)
    reasons = explained()
    again = {m for m in chosen if args.again and verdicts.survived(m) and (m.file, m.key) not in reasons}
    todo = [m for m in chosen if (m in again or m not in verdicts) and not args.table]
    # Those with a reason come last: they take longest, because all of their tests pass.
    todo.sort(key=lambda m: ((m.file, m.key) in reasons, m not in again, not m.file.startswith(FIRST)))
    print(f"{len(chosen)} faults in {len(sources)} files, {len(todo)} to try", flush=True)
    if todo:
        files = test_files() if not args.near else sorted({t for file in sources for t in near_tests(file)})
        tests, imported = collected(files)
        plan = Plan(args.seconds, measured(tests, not args.known), imported)
        here = [m for m in todo if not plan.runs_on_import(m) or can_run_again(m, sources[m.file])]
        quick = args.near or args.known or args.seconds < SECONDS
        keep = _kept(verdicts, len(here), quick)
        # In a fork: what is tried later needs a process that has not imported the package.
        if waited_for(forked(lambda: try_in_place(here, sources, plan, args.jobs, keep, files), None)):
            sys.exit("stopped; the next run goes on here")
        tried, verdicts = verdicts, Verdicts(everything)
        later = [m for m in todo if plan.runs_on_import(m) and verdicts.letters[m] == tried.letters[m]]
        if not args.near:
            try_on_import(later, sources, plan, args.jobs, _kept(verdicts, len(later), quick))
    if args.only == [""]:
        write_table(everything, verdicts)
    sys.exit(report(chosen, verdicts))


def _kept(verdicts: Verdicts, count: int, quick: bool) -> Keep:
    """A function that keeps an outcome and says how far it is."""
    begun, done = time.monotonic(), itertools.count(1)

    def keep(mutant: Mutant, outcome: Outcome) -> None:
        verdicts.add(mutant, outcome, quick)
        if outcome["outcome"] == "survived":
            print(f"survived  {mutant.file}:{mutant.line}  {mutant.key}", flush=True)
        if (n := next(done)) % 100 == 0:
            print(f"{n} of {count}, {time.monotonic() - begun:.0f} s", flush=True)

    return keep


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[""], help="files whose path contains one of these")
    parser.add_argument("--sample", type=int, default=0, help="so many faults; else all")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at once")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="what the tests of one fault take together")
    parser.add_argument("--near", action="store_true", help="quick: only the test files beside")
    parser.add_argument("--known", action="store_true", help="leave out tests whose reach was not measured yet")
    parser.add_argument("--again", action="store_true", help="try those again that survived without a reason")
    parser.add_argument("--table", action="store_true", help="try nothing; write the table of what was tried")
    return parser.parse_args()


def _warm_up() -> None:
    """Import what takes long and is not ours. Nothing is computed here: threads would not survive the fork."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    for name in ("numpy", "captum.attr", "matplotlib", "PIL.Image", "torch._dynamo"):
        importlib.import_module(name)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # pytest collects garbage as it ends: half a second if it had to look at all of torch


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the next run goes on here")
