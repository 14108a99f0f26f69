"""Arguments that are what a tool's JSON schema asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


class MisfitArgumentError(ValueError):
    """An argument that is not what the schema asks for; the message is one line for the model."""


def fitted(value: Any, schema: Schema, *, name: str) -> Any:
    """Return the argument `name` as the schema has it. Raises MisfitArgumentError.

    Two things are taken for what they mean, where they can mean nothing else: a text that is JSON of the type, where no
    text is allowed (`"3"` for an integer; all that Qwen3-Coder writes is text), and a whole number such as 3.0 for an
    integer.
    """
    for each in (value, *_other_readings(value)):
        if _fits(each, schema):
            return each
    raise MisfitArgumentError(f"{name}={_shown(value)}: expected {in_words(schema)}")


def in_words(schema: Schema) -> str:
    """`integer`, `one of "kg", "g"`, `array of string or null`."""
    types = schema.get("type", "any value")
    words = [types] if isinstance(types, str) else list(types)
    if "enum" in schema:
        words = [f"one of {', '.join(map(_shown, schema['enum']))}"]
    elif "anyOf" in schema:
        words = [in_words(each) for each in schema["anyOf"]]
    elif "items" in schema:
        words = [f"array of {in_words(schema['items'])}"]
    return " or ".join([*words, "null"] if schema.get("nullable") else words)


def _other_readings(value: Any) -> list[Any]:
    if isinstance(value, float) and value.is_integer():
        return [int(value)]
    if not isinstance(value, str):
        return []
    try:
        read = json.loads(value.lower() if value in ("True", "False") else value)
    except (ValueError, RecursionError):
        return []
    return [read, *(_other_readings(read) if isinstance(read, float) else [])]


def _fits(value: Any, schema: Schema) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    types = schema.get("type", [])
    if types and not any(_KINDS[kind](value) for kind in ([types] if isinstance(types, str) else types)):
        return False
    if "enum" in schema and not any(type(value) is type(each) and value == each for each in schema["enum"]):
        return False
    if isinstance(value, list) and "prefixItems" in schema:
        inner = schema["prefixItems"]
        return len(inner) == len(value) and all(map(_fits, value, inner))
    if isinstance(value, list):
        return all(_fits(item, schema.get("items", {})) for item in value)
    if isinstance(value, dict):
        return all(_fits(item, schema.get("additionalProperties", {})) for item in value.values())
    return True


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.80}"
