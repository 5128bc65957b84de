"""The base every config section shares.

Unknown keys are refused, sections are frozen once read, and every field carries its documentation
as a `description`, so that the JSON schema, the OpenAPI page and docs/reference say the same thing.
"""

import difflib
import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class Section(BaseModel):
    """A config section: strict about its keys, immutable after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def refusal(kind: str, place: str | tuple[str, ...], message: str, value: Any) -> ValidationError:
    """A validation error of one section that points at its key `place`, or at one below it."""
    error = PydanticCustomError("value_error", "{message}", {"message": message})
    loc = (place,) if isinstance(place, str) else place
    return ValidationError.from_exception_data(
        kind, [InitErrorDetails(type=error, loc=loc, input=value)]
    )


def choose_by_type(noun: str, *classes: type[Section]) -> Callable[[Any], Any]:
    """A validator that reads a table as the class among `classes` that its `type` names.

    Unlike pydantic's discriminated unions, errors point at the user's keys and are about the chosen
    class only.
    """
    by_type = {cls.model_fields["type"].default: cls for cls in classes}
    known = ", ".join(repr(name) for name in by_type)

    def choose(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "type" not in data:
            raise refusal(noun, "type", f"is required; one of {known}", data)
        name = data["type"]
        if not isinstance(name, str) or name not in by_type:
            near = difflib.get_close_matches(str(name)[:64], by_type, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {known}"
            raise refusal(noun, "type", f"there is no {noun} {name!r}; {hint}", name)
        fields = by_type[name].model_fields
        for key in data:
            if key not in fields:
                options = ", ".join(field for field in fields if field != "type") or "none"
                message = f"is not an option of {noun} {name!r}; its options: {options}"
                raise refusal(noun, str(key), message, data[key])
        return by_type[name].model_validate(data)

    return choose


class FunctionSection(Section):
    """A section that names a function of the user."""

    function: str = Field(description="'module:function'.")
    path: str | None = Field(
        default=None, description="Folder with the function's module, if it is not installed."
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the function."
    )

    @field_validator("function")
    @classmethod
    def _function_is_an_import_path(cls, value: str) -> str:
        name = r"[A-Za-z_]\w*"
        if not re.fullmatch(rf"{name}(\.{name})*:{name}", value):
            raise ValueError(f"must have the form 'module:function', got {value!r}")
        return value
