"""What CONTRIBUTING.md says of the tree: its table names files and folders that are there, and
`tests/unit` mirrors the rooms.
"""

import re

from tests import ROOT


def test_every_place_of_the_table_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = text.partition("| to add or change |")[2].splitlines()[2:]
    assert len(rows) > 30
    for row in rows:
        places = re.findall(r"`([\w./-]+/[\w./-]*)`", row)
        assert places, f"names no place: {row}"
        assert not [place for place in places if not (ROOT / place).exists()], row


def test_each_folder_of_unit_tests_has_the_path_of_what_it_tests() -> None:
    unit = ROOT / "tests" / "unit"
    folders = [file.parent.relative_to(unit) for file in unit.glob("*/**/test_*.py")]
    assert len(set(folders)) > 20
    # The programs among the tests have tests, too.
    roots = (ROOT, ROOT / "tests")
    assert not [f for f in set(folders) if not any((root / f).is_dir() for root in roots)]
