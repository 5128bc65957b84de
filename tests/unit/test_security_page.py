"""The table of docs/security.md names tests that are there."""

import re

from tests import ROOT


def test_every_threat_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "security.md").read_text().partition("| asset |")[2]
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    assert len(rows) >= 14
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4 and all(cells), row
        named = re.findall(r"`([\w./-]+\.py)::(\w+)`", cells[3])
        assert named, f"names no test: {row}"
        for place, name in named:
            file = ROOT / (place if place.startswith("tests/") else f"tests/unit/{place}")
            assert file.is_file(), place
            assert re.search(rf"^(async )?def {name}\(", file.read_text(), re.M), (place, name)
