"""What every part of a scenario file is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Immutable; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)
