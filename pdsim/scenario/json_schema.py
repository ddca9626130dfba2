"""The JSON schema of scenario files, for editors: `pdsim schema`, committed as pdsim.schema.json."""

from dataclasses import is_dataclass
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from pdsim.scenario.component import describe_component
from pdsim.scenario.schema import Scenario


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return describe_component(dft) if is_dataclass(dft) else super().encode_default(dft)


def scenario_schema() -> dict[str, Any]:
    schema: dict[str, Any] = Scenario.model_json_schema(schema_generator=_Generator)
    return schema
