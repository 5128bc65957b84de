"""Behind a company's proxy: what is on this machine is reached without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

DEAD = "http://127.0.0.1:9"
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@pytest.mark.timeout(900)
def test_the_demo_steps_under_a_dead_proxy(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
    kept.pop("NO_PROXY", None), kept.pop("no_proxy", None)
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "ratchet.worker.demo"),
            *("configs/examples/reverse_text.toml", "max_steps=2", "train.batch_size=16"),
            *("train.group_size=4", "eval.env.0.num_examples=4"),
        ],
        cwd=ROOT,
        env={**kept, **dict.fromkeys(NAMES, DEAD), "RATCHET_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
