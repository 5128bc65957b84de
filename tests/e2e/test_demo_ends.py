"""A demo that is asked to end, as by a time limit of CI, leaves neither its run nor its stack."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.e2e.driving import processes_of

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_sigterm_cancels_the_run_and_takes_the_stack_down(tmp_path: Path) -> None:
    config = "configs/examples/reverse_text.toml"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "ratchet.worker.demo", config],
        cwd=ROOT,
        env={**kept, "RATCHET_HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    try:
        assert demo.stderr is not None
        for line in demo.stderr:
            said.append(line)
            if "status: " in line and "queued" not in line:
                break
        assert processes_of(tmp_path, "-m ratchet.worker --roles"), said
        # As from `timeout` and `make`, which both pass it on.
        demo.send_signal(signal.SIGTERM)
        demo.send_signal(signal.SIGTERM)
        _, rest = demo.communicate(timeout=240)
    finally:
        demo.kill()
    assert demo.returncode == 143, [*said, rest]
    assert "cancelling reverse-text-" in rest and "could not be cancelled" not in rest
    assert processes_of(tmp_path) == []
