"""Takes the pictures in docs/images of runs that the local stack has: `make pictures RUN=… SICK=…`.

RUN is a run of the demo's config, SICK one with `trainer.optim.lr=0.02`. The pictures show what
these runs did; nothing is made up.
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
    "rollouts": ("#/runs/{run}/rollouts?r=train:40:0", "rollouts"),
    "events": ("#/runs/{run}/events", "events"),
    "config": ("#/runs/{run}/config", "config"),
    "model": ("#/runs/{run}/model", "model"),
    "launch": ("#/launch?from={run}", "launch"),
    "sick": ("#/runs/{sick}", "all"),
}
LOOKS = {"light": (DESKTOP, "light"), "dark": (DESKTOP, "dark"), "phone": (PHONE, "light")}


async def take(api: str, **runs: str) -> None:
    """Writes a picture of each page in each look."""
    FOLDER.mkdir(exist_ok=True)
    async with browsing() as browser:
        for look, (viewport, scheme) in LOOKS.items():
            for name, (where, ready) in PAGES.items():
                async with reading(
                    browser, api, viewport=viewport, scheme=scheme, instruments=True
                ) as reader:
                    await reader.open(where.format(**runs), f'="{ready}"')
                    await reader.settled()
                    await reader.page.screenshot(path=FOLDER / f"{name}-{look}.png")


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 without the ids of both runs."""
    if len(argv) != 2:
        print("say which runs: `make pictures RUN=… SICK=…`", file=sys.stderr)
        return 2
    with Ratchet() as client:
        run, sick = (client.runs.retrieve(name).id for name in argv)
        asyncio.run(take(client.address, run=run, sick=sick))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
