"""A checkpoint's files: what is read is what was written, and the same state is the same bytes."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ratchet.activities.training.ranks import Ranks
from ratchet.activities.training.shards import (
    OPTIMIZER_FOLDER,
    _sort_metadata,
    load_state,
    save_state,
)


def test_the_same_metadata_in_any_order_is_the_same_bytes(tmp_path: Path) -> None:
    about = {"format": "pt", "a": "1", "größe": "Δ", "z": "2"}
    found = set[bytes]()
    for number in range(8):
        file = tmp_path / str(number)
        save_file({"weight": torch.arange(6.0).view(2, 3)}, file, metadata=about)
        _sort_metadata(file)
        found.add(file.read_bytes())
        assert torch.equal(load_file(file)["weight"], torch.arange(6.0).view(2, 3))
    assert len(found) == 1


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = {"exp_avg/a": torch.arange(6.0).view(2, 3), "step/a": torch.tensor(7.0)}
    for name in ("one", "other"):
        save_state(state, tmp_path / name, Ranks())
    files = sorted((tmp_path / "one" / OPTIMIZER_FOLDER).iterdir())
    assert files
    for file in files:
        other = tmp_path / "other" / OPTIMIZER_FOLDER / file.name
        assert file.read_bytes() == other.read_bytes()

    def like(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.zeros(size, dtype=dtype) if name.startswith("exp_avg/") else None

    read = load_state(tmp_path / "one", like, Ranks())
    assert list(read) == ["exp_avg/a"] and torch.equal(read["exp_avg/a"], state["exp_avg/a"])
