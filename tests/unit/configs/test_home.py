"""The home of a machine is its owner's alone."""

from pathlib import Path

from ratchet.configs.home import private_file, private_folder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_others_get_nothing(tmp_path: Path) -> None:
    assert mode(private_folder(tmp_path / "a" / "home")) == 0o700
    for before, after in ((0o755, 0o750), (0o2770, 0o2770), (0o777, 0o770), (0o1777, 0o1777)):
        folder = tmp_path / oct(before)
        folder.mkdir()
        folder.chmod(before)
        assert mode(private_folder(folder)) == after


def test_a_secret_is_its_owners_from_the_first(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o666)
    assert mode(private_file(path, "new")) == 0o600 and path.read_text() == "new"
