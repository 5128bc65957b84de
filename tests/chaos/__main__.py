"""`python -m tests.chaos`: faults on the real stack, and proof that nothing was lost.

    python -m tests.chaos --quick                every role once, some 5 minutes
    python -m tests.chaos --soak 1h --faults 150 randomly spaced faults
    python -m tests.chaos --soak 9m --faults 0   none: what the others are compared with

The last line of output is one JSON object; progress goes to standard error. Exit status: 0 if all
verdicts are good and every planned fault was witnessed, else 1; 130 after Ctrl-C. No process,
mount or file is left behind but the logs: after violations, or with --keep.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from ratchet.configs.home import home_folder
from tests.chaos import disk, faults
from tests.chaos.scenario import Plan, session
from tests.chaos.schedule import every_kind, quick, soak

QUICK_SPACING_S = 10.0
QUICK_CLEAN_STEPS = 5
SOAK_CLEAN_STEPS = 60
DEFAULT_EVERY_S = 100.0
UNITS = {"s": 1, "m": 60, "h": 3600}
INSIDE = "RATCHET_CHAOS_INSIDE"
"""Set in the mount namespace that the suite makes for itself where it may not mount."""


def duration(text: str) -> float:
    """Seconds of '90s', '10m' or '1h'; raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise ValueError(f"{text!r}: a duration is a number with s, m or h, e.g. 1h")
    return float(found[1]) * UNITS[found[2] or "s"]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every role once (the default)")
    parser.add_argument("--soak", type=duration, help="how long, e.g. 1h")
    parser.add_argument("--faults", type=int, help="how many, over the whole soak")
    parser.add_argument("--every", type=duration, help="or: their mean distance, e.g. 100s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="copy logs and evidence here")
    parser.add_argument("--only", default="", help="of a quick run, only faults with this in name")
    parser.add_argument("set", nargs="*", help="config overrides, key=value")
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace, folder: Path) -> Plan:
    """What is to be done, of what is possible on this machine."""
    probe = disk.mount(folder / "probe", 64)
    possible = faults.possible(probe, every_kind())
    probe.unmount()
    left_out = [spec.name for spec in every_kind() if spec not in possible]
    possible = [spec for spec in possible if options.only in spec.name]
    if options.soak:
        count = options.faults
        if count is None:
            count = max(round(options.soak / (options.every or DEFAULT_EVERY_S)), 1)
        found = soak(options.seed, options.soak, count, possible)
        return Plan(found, SOAK_CLEAN_STEPS, options.soak, 40_000, left_out)
    found = quick(options.seed, options.every or QUICK_SPACING_S, possible)
    if not found:
        raise SystemExit(f"chaos: no fault that is possible here has {options.only!r} in its name")
    return Plan(found, QUICK_CLEAN_STEPS, 0.0, 6_000, left_out)


def say(text: str) -> None:
    """Tells progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def run(options: argparse.Namespace, folder: Path) -> int:
    """One session; prints its figures and returns the exit status."""
    plan = planned(options, folder)
    say(f"{len(plan.faults)} faults, seed {options.seed}")
    if plan.left_out:
        say(f"left out, since this machine cannot do them: {', '.join(plan.left_out)}")
    work = asyncio.ensure_future(session(folder, plan, options.set, say))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    try:
        result = await work
    except asyncio.CancelledError:
        say("interrupted")
        return 130
    for verdict, about in result["verdicts"].items():
        say(
            f"{'good' if about['good'] else 'BAD '} {verdict} ({about['checked']}) {about['first']}"
        )
    about = {"seed": options.seed, "soak_s": options.soak, "left_out": plan.left_out}
    print(json.dumps({**about, **result}), flush=True)
    return 0 if result["good"] else 1


def enter_namespace() -> None:
    """Goes on in a mount namespace of our own, where one may not mount but make such a thing."""
    if os.geteuid() == 0 or INSIDE in os.environ or shutil.which("unshare") is None:
        return
    os.environ[INSIDE] = "1"
    again = ["unshare", "-rm", sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    # Refused, unshare ends with 1 before it starts anything; `true` tells that apart.
    if os.spawnlp(os.P_WAIT, "unshare", "unshare", "-rm", "true") == 0:
        os.execvp("unshare", again)


def main() -> int:
    """Entry point."""
    options = parse(sys.argv[1:])
    enter_namespace()
    folder = Path(tempfile.mkdtemp(prefix="ratchet-chaos-"))
    logs, status = folder / "home" / "logs", 1
    try:
        status = asyncio.run(run(options, folder))
    finally:
        kept = options.keep or (home_folder() / "chaos" if status == 1 else None)
        if kept and logs.exists():
            shutil.copytree(logs, kept, dirs_exist_ok=True)
            say(f"logs and evidence: {kept}")
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The SDK's native runtime can crash while the interpreter is torn down (sdk-python #300).
    os._exit(status)
