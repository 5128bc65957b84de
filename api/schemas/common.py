"""What schemas share: pages of lists, and examples for the OpenAPI page.

Invariant: every list is paged alike. While `has_more` is true, `next_after` as parameter `after`,
beside the same other parameters, gets the next page. Cursors are opaque, but for what a route says.
"""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")


class ListOf(BaseModel, Generic[Item]):
    """A page of a list; ask again with `next_after` as `after` while `has_more` is true."""

    object: Literal["list"] = "list"
    data: list[Item] = Field(description="The items of the page.")
    has_more: bool = Field(description="Whether items follow those of the page.", examples=[False])
    next_after: str | None = Field(
        default=None,
        description="Cursor: `after` of the next page; null after the last.",
        examples=[None],
    )


def examples(*items: dict[str, Any]) -> ConfigDict:
    """The config of a model with examples."""
    return ConfigDict(json_schema_extra={"examples": list(items)})
