"""The table of CONTRIBUTING.md names files and folders that are there."""

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
