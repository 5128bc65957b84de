"""What schemas share: pages of lists, and examples for the OpenAPI page."""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

Item = TypeVar("Item")


class ListOf(BaseModel, Generic[Item]):
    """A page of a list; ask again with the last item as cursor while `has_more` is true."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool


def examples(*items: dict[str, Any]) -> ConfigDict:
    """The config of a model with examples."""
    return ConfigDict(json_schema_extra={"examples": list(items)})
