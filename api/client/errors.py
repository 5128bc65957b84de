"""What goes wrong between a client and the API: it refused a request, or could not be reached."""

import httpx
from pydantic import ValidationError

from ratchet.api.schemas.problems import ProblemDocument

SHORT_WAIT_S = 3.0
"""Retry-After is obeyed up to this long; longer waits are the caller's decision."""


class RatchetError(Exception):
    """Any failure of a request; the message says what, where and how to fix it."""


class Refused(RatchetError):
    """The API answered with a problem.

    `retry_after_s` is in how many seconds the same request may succeed; None: unknown.
    """

    def __init__(self, problem: ProblemDocument, retry_after_s: float | None = None) -> None:
        super().__init__(f"{problem.title} ({problem.status}): {problem.detail}")
        self.problem = problem
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (429, 502, 503, 504) or self.retry_after_s is not None


class Unreachable(RatchetError):
    """No answer came, or one that is not Ratchet's."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"no answer from the API at {address}: {why}")
        self.address = address
        self.why = why


class NotExported(RatchetError):
    """The model was not exported; nothing is left of it."""


def why_lost(error: httpx.TransportError) -> str:
    """Why a request got no answer, in words."""
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    return str(error) or type(error).__name__


def refusal(answer: httpx.Response) -> Refused:
    """The refusal in a response whose body has been read; raises nothing."""
    wait = answer.headers.get("retry-after", "")
    retry_after_s = float(wait) if wait.isdecimal() else None
    try:
        problem = ProblemDocument.model_validate_json(answer.content)
    except ValidationError:
        # Something in between, such as a proxy, may answer in place of the API.
        problem = ProblemDocument(
            type="about:blank",
            title=answer.reason_phrase or "No reason stated",
            status=answer.status_code,
            detail=f"{answer.url} did not reply as Ratchet's API does; check the address.",
        )
    return Refused(problem, retry_after_s)
