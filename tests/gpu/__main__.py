"""`make gpu`: what engine and trainer of one GPU come to, as one JSON object on standard output.

Ends with status 1 if a gate refused a version, the replay has other bits or time ran out.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from ratchet.activities.runtime.children import reach_own_machine
from tests.gpu.one_gpu import SIZES, Program


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.6b", help="of the random model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=450.0, help="seconds there are for all of it"
    )
    parser.add_argument("--home", type=Path, help="a folder for its files; its `model` is taken")
    options = parser.parse_args()
    reach_own_machine()
    with tempfile.TemporaryDirectory(prefix="ratchet-gpu-") as scratch:
        program = Program(
            SIZES[options.size],
            options.home or Path(scratch),
            steps=options.steps,
            seed=options.seed,
            limit_s=options.limit,
        )
        report = asyncio.run(program.run())
    print(json.dumps(report))
    sys.exit(bool(report["problems"]))


if __name__ == "__main__":
    main()
