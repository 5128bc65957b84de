"""What schemas share: paged lists, and examples for the OpenAPI page.

Invariant: every list is paged alike. While `has_more` is true, the same request with `next_after`
as parameter `after` returns the next page. Cursors are opaque unless a route documents them.
"""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")


class ListOf(BaseModel, Generic[Item]):
    """A page of a list. While `has_more` is true, pass `next_after` as `after` to get the next."""

    object: Literal["list"] = "list"
    data: list[Item] = Field(description="The items of the page.")
    has_more: bool = Field(description="Whether more items follow this page.", examples=[False])
    next_after: str | None = Field(
        default=None,
        description="Cursor: pass it as `after` to get the next page; null on the last page.",
        examples=[None],
    )


def examples(*items: dict[str, Any]) -> ConfigDict:
    """The config of a model with examples."""
    return ConfigDict(json_schema_extra={"examples": list(items)})
