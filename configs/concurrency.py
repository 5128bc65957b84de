"""How far the number of executing rollouts may move when it follows the load of the engines."""

from pydantic import Field, model_validator

from ratchet.configs.base import Section


class ConcurrencyConfig(Section):
    """Bounds of the permits where they follow the engines' load."""

    initial: int | None = Field(
        default=None,
        ge=1,
        description="Permits to begin with; none: as many rollouts of the longest context as the "
        "engines' KV cache holds, but no more than they run at once.",
    )
    min_inflight: int = Field(
        default=1, ge=1, description="Never fewer permits; one activity's worth is always granted."
    )
    max_inflight: int = Field(default=1024, ge=1, le=1_000_000, description="Never more permits.")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "ConcurrencyConfig":
        if self.min_inflight > self.max_inflight:
            raise ValueError(
                f"min_inflight ({self.min_inflight}) must not be above max_inflight "
                f"({self.max_inflight})"
            )
        if self.initial and not self.min_inflight <= self.initial <= self.max_inflight:
            raise ValueError(
                f"initial ({self.initial}) must lie between min_inflight ({self.min_inflight}) "
                f"and max_inflight ({self.max_inflight})"
            )
        return self
