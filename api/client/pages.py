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
    """A list, and the items that it leaves out."""

    damaged: list[int | str] = Field(default_factory=list)
    note: str | None = None


@dataclass(frozen=True)
class Page(Generic[Item]):
    """A page of a list. Iterating yields its items and those of all pages after it, which are
    requested as needed.

    `damaged` names steps, or groups of rollouts, that are left out because they cannot be read.
    `next_after` is the cursor of the next page, if the API names one; `note` says why a list is
    empty, if that needs an explanation.
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
            raise ValueError("this is the last page; call next_page only while has_more is true")
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
    """A page of a list of `model`, a type or a union of types. The next page is requested with the
    cursor that the API names. If an older API names none, it is parameter `cursor` of the page's
    last item.
    """
    listed: type[_Cursored[Any]] = _Cursored[model]
    page = transport.ask_for(listed, "GET", path, params=params)

    def following() -> Page[Item]:
        further: dict[str, Any] = {}
        if page.next_after is not None:
            further = {"after": page.next_after}
        elif page.data:
            # All items of this page were deleted while it was made: there is no last one.
            further = {cursor: cursor_of(page.data[-1])}
        return page_of(transport, model, path, {**params, **further}, cursor, cursor_of)

    return Page(page.data, page.has_more, following, page.damaged, page.next_after, page.note)
