"""The rules that all requests share: :class:`RequestModel`, and fields that take little or nothing (:class:`Only`).

A request is checked strictly: a number is not made out of a string, ``null`` means that the field was left out, and a
field that is not known is refused by name, since a misspelt option must not be lost in silence. A field of the OpenAI
API that has no meaning here is declared as :class:`Only`: values that ask for nothing are taken, any other is refused.

Immutable values: any thread may use them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gapless.errors import shown

__all__ = [
    "AtMost",
    "JsonList",
    "JsonObject",
    "LogitBias",
    "Metadata",
    "ModelName",
    "Only",
    "Prompt",
    "RequestModel",
    "ServiceTier",
    "StopStrings",
    "Unsupported",
]


class RequestModel(BaseModel):
    """A request body, or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class Only:
    """Marks a field that takes only some values, ``null`` always among them.

    Args:
        values: what is taken.
        because: why nothing else is; ends the message.
    """

    def __init__(self, *values: object, because: str = "") -> None:
        self._values = [None, *values]
        self._because = f" ({because})" if because else ""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Checked by :meth:`_check`, whatever the field's type says."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """An ``enum``."""
        return {"enum": self._values}

    def _check(self, value: object) -> object:
        # By type as well: in Python false is 0.
        if any(type(value) is type(known) and value == known for known in self._values):
            return value
        others = ", ".join(shown(known) for known in self._values[1:])
        raise ValueError(f"{shown(value)} is not supported{self._because}" + (f"; use {others}" if others else ""))


class AtMost:
    """Bounds a list. The first wrong item ends the check: an error for each of a million would hold up every stream.

    Args:
        length: most items.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The list's, with the bound."""
        schema: dict[str, Any] = {**handler(source), "max_length": self._length, "fail_fast": True}
        assert schema["type"] == "list"
        return cast(CoreSchema, schema)


def _described(schema: Mapping[str, Any]) -> WithJsonSchema:
    return WithJsonSchema(dict(schema))


_NULL = {"type": "null"}
_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# Unions are checked where they are used, by functions that know what they want: the messages name the item.
Prompt = Annotated[
    Any,
    _described(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
StopStrings = Annotated[Any, _described({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}, _NULL]})]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(json_schema_extra={"minimum": -100, "maximum": 100})]],
    Field(
        description="Added to logits, by token id (a decimal number): from -100 to 100.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    ),
]
JsonObject = dict[str, Any]
JsonList = list[Any]
ModelName = Annotated[str | None, Field(description="The name of the served model; it may be left out.")]
Metadata = Annotated[dict[str, str] | None, Field(max_length=16, description="Taken and not used.")]
ServiceTier = Annotated[Any, Only("auto", "default", because="there is one tier")]
Unsupported = Annotated[Any, Only()]
