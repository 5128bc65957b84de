"""The base every config section shares.

Unknown keys are refused, sections are frozen once read, and every field carries its documentation
as a `description`, so that the JSON schema, the OpenAPI page and the README say the same thing.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A config section: strict about its keys, immutable after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
