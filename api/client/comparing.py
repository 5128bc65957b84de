"""How one eval compares with another, for a terminal."""

from typing import Any

from pydantic import BaseModel
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ratchet.api.client.printing import STYLES, clean, number, pairs_table, within
from ratchet.api.schemas.evals import EvalComparison

MOST_DIFFERING = 10
"""Examples that a comparison of evals names."""


def comparison_table(item: EvalComparison, address: str) -> Table:
    """One eval against another: the difference, wins and losses, and the examples that differ most,
    with where the rollouts of each are read.
    """
    difference = item.difference
    rows: list[tuple[str, RenderableType | None]] = [
        ("eval", clean(f"{item.env} by {item.metric}")),
        *(
            (
                name,
                clean(
                    f"{within(_plain(side.score))}  {side.model} ({side.run_id}, step {side.step})"
                ),
            )
            for name, side in (("this", item.this), ("other", item.other))
            if side is not None
        ),
        ("problem", Text(clean(item.problem), STYLES["error"]) if item.problem else None),
    ]
    if difference is not None:
        text = f"{within(_plain(difference))}, paired over {item.examples} examples"
        rows += [
            ("difference", text),
            ("examples", f"{item.wins} wins, {item.losses} losses, {item.ties} ties"),
        ]
    for place, each in enumerate(item.differ[:MOST_DIFFERING]):
        assert item.this is not None and item.other is not None
        pages = [
            f"{address}/dashboard/#/runs/{side.run_id}/rollouts?kind=eval&r={ids[0]}"
            for side, ids in ((item.this, each.rollouts), (item.other, each.other_rollouts))
        ]
        scores = f"example {each.example}: {number(each.score)}, other {number(each.other_score)}"
        rows.append(("differ" if place == 0 else "", clean("  ".join([scores, *pages]))))
    return pairs_table(rows)


def _plain(value: BaseModel | None) -> dict[str, Any] | None:
    return None if value is None else value.model_dump()
