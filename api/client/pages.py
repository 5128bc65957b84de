"""Lists of the API, page by page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import Field

from ratchet.api.client.transport import Transport
from ratchet.api.schemas.common import ListOf

Item = TypeVar("Item")


class _Cursored(ListOf[Item], Generic[Item]):
    """A list, and what it leaves out."""

    damaged: list[int | str] = Field(default_factory=list)
    note: str | None = None


@dataclass(frozen=True)
class Page(Generic[Item]):
    """A page of a list. Iterating goes through it and, asking as needed, all that follow.

    `damaged` names what it leaves out since it cannot be read: steps, or groups of rollouts.
    `next_after` is the cursor that leads on, where the API names one; `note` says why a list is
    empty, where that needs a word.
    """

    data: Sequence[Item]
    has_more: bool
    _following: Callable[[], "Page[Item]"] = field(repr=False)
    damaged: Sequence[int | str] = ()
    next_after: str | None = None
    note: str | None = None

    def next_page(self) -> "Page[Item]":
        """The page after this one; raises ValueError after the last."""
        if not self.has_more:
            raise ValueError("this is the last page; ask only while has_more is true")
        return self._following()

    def __iter__(self) -> Iterator[Item]:
        page = self
        while True:
            yield from page.data
            if not page.has_more:
                return
            page = page.next_page()


def page_of(
    transport: Transport,
    model: Any,
    path: str,
    params: Mapping[str, Any] = MappingProxyType({}),
    cursor: str = "",
    cursor_of: Callable[[Item], Any] = lambda _: None,
) -> Page[Item]:
    """A page of a list of `model`, a type or a union of types. What follows it is asked for with
    the cursor that the API names. Where an API of an older build names none, parameter `cursor` is
    that of the page's last item.
    """
    listed: type[_Cursored[Any]] = _Cursored[model]
    page = transport.ask_for(listed, "GET", path, params=params)

    def following() -> Page[Item]:
        further: dict[str, Any] = {}
        if page.next_after is not None:
            further = {"after": page.next_after}
        elif page.data:
            # Of a page whose items were deleted while it was made, nothing was passed.
            further = {cursor: cursor_of(page.data[-1])}
        return page_of(transport, model, path, {**params, **further}, cursor, cursor_of)

    return Page(page.data, page.has_more, following, page.damaged, page.next_after, page.note)
