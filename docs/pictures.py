"""Takes the pictures in docs/images of a run that the local stack has: `make pictures RUN=…`.

What they show is what that run did; nothing is made up for them.
"""

import asyncio
import sys
from pathlib import Path

from ratchet import Ratchet
from tests.e2e.browsing import DESKTOP, PHONE, browsing, reading

FOLDER = Path(__file__).parent / "images"
PAGES = {
    "runs": ("#/runs", "runs"),
    "run": ("#/runs/{run}", "all"),
    "timeline": ("#/runs/{run}/timeline", "timeline"),
    "rollouts": ("#/runs/{run}/rollouts", "rollouts"),
    "events": ("#/runs/{run}/events", "events"),
    "config": ("#/runs/{run}/config", "config"),
    "model": ("#/runs/{run}/model", "model"),
    "launch": ("#/launch?from={run}", "launch"),
}
LOOKS = {"light": (DESKTOP, "light"), "dark": (DESKTOP, "dark"), "phone": (PHONE, "light")}


async def take(api: str, run: str) -> None:
    """Writes a picture of each page in each look."""
    FOLDER.mkdir(exist_ok=True)
    async with browsing() as browser:
        for look, (viewport, scheme) in LOOKS.items():
            for name, (where, ready) in PAGES.items():
                async with reading(
                    browser, api, viewport=viewport, scheme=scheme, instruments=True
                ) as reader:
                    await reader.open(where.format(run=run), f'="{ready}"')
                    await reader.settled()
                    await reader.page.screenshot(path=FOLDER / f"{name}-{look}.png")


def main(argv: list[str]) -> int:
    """Pictures of the named run, else of the newest that succeeded; returns the exit status."""
    with Ratchet() as client:
        runs = [client.runs.retrieve(argv[0])] if argv else client.runs.list(status="succeeded")
        run = next(iter(runs), None)
        if run is None:
            print("no run has succeeded yet: `make demo`, or name one by RUN=…", file=sys.stderr)
            return 1
        print(f"pictures of {run.id}")
        asyncio.run(take(client.address, run.id))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
