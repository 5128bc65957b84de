"""Working folders: gone after their work, or swept once their process is."""

import subprocess
import sys
from pathlib import Path

from ratchet.activities.hosting.scratch import sweep_folders, working_folder

HOLD = """
import sys, time
from pathlib import Path
from ratchet.activities.hosting.scratch import working_folder
with working_folder(Path(sys.argv[1]), "step-3") as folder:
    (folder / "weights").write_bytes(b"half")
    print(folder.name, flush=True)
    time.sleep(600)
"""


def test_folder_of_a_killed_process_is_swept_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    names = [str(h.stdout.readline().decode()).strip() for h in holders if h.stdout]
    foreign = tmp_path / f"00000000-{holders[0].pid}-1-step-9-x"
    foreign.mkdir()
    (tmp_path / "cache").mkdir()
    assert not sweep_folders(tmp_path)
    holders[0].kill()
    holders[0].wait()
    assert (tmp_path / names[0] / "weights").exists()
    assert sweep_folders(tmp_path) == [names[0]]
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {names[1], foreign.name, "cache"}
    holders[1].kill()
    holders[1].wait()


def test_folder_is_gone_after_its_work(tmp_path: Path) -> None:
    with working_folder(tmp_path, "a") as folder:
        assert folder.is_dir() and not sweep_folders(tmp_path)
    assert not list(tmp_path.iterdir())
