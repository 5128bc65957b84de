"""What goes wrong between a client and the API, in two kinds: it said no, or it was not reached."""

import httpx
from pydantic import ValidationError

from ratchet.api.schemas.problems import ProblemDocument

SHORT_WAIT_S = 3.0
"""A client waits this long by itself when it is asked to; longer waits are the caller's choice."""


class RatchetError(Exception):
    """Any failure of a request; the message says what, where and how to mend it."""


class Refused(RatchetError):
    """The API answered with a problem.

    `retry_after_s` is in how many seconds the same request may succeed, None where that is unknown.
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
        """Whether waiting mends it."""
        return self.status in (429, 502, 503, 504) or self.retry_after_s is not None


class Unreachable(RatchetError):
    """No answer came, or one that is not Ratchet's."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"no answer from the API at {address}: {why}")
        self.address = address
        self.why = why


class NotExported(RatchetError):
    """A model was not written; nothing of it is left."""


def why_lost(error: httpx.TransportError) -> str:
    """Why a request got no answer, in words."""
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    return str(error) or type(error).__name__


def refusal(answer: httpx.Response) -> Refused:
    """The refusal that a response is, whose body has been read; raises nothing."""
    wait = answer.headers.get("retry-after", "")
    retry_after_s = float(wait) if wait.isdecimal() else None
    try:
        problem = ProblemDocument.model_validate_json(answer.content)
    except ValidationError:
        # Whatever stands between may answer for the API, in words of its own.
        problem = ProblemDocument(
            type="about:blank",
            title=answer.reason_phrase or "No reason given",
            status=answer.status_code,
            detail=f"{answer.url} gave no reason that Ratchet's API would give; check the address.",
        )
    return Refused(problem, retry_after_s)
