"""A JSON schema as the grammar library understands it, or why it cannot be followed.

The library leaves out what it cannot express, at most with a warning. Here every schema is written anew from the
keywords that it does keep to, and one that asks for more is refused: whatever is finished is valid.

Objects list their properties in the order of the schema, and have no others unless `additionalProperties` says so (an
object without `properties` is free). Formats shape the text where the library knows them; by the standard they are
notes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from alula.grammar.regex import rewrite_regex
from alula.grammar.scalars import OF_NUMBERS, Schema, check_written, counts, number_schema, refused, text_schema

DEEPEST = 64
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
_BY_TYPE = {"string": _OF_STRINGS, "number": OF_NUMBERS, "array": _OF_ARRAYS, "object": _OF_OBJECTS}
_WHOLE = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_RULING = {*(name for names in _BY_TYPE.values() for name in names), *_WHOLE, "type"}
_BEYOND = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("additionalItems", "$dynamicRef", "$recursiveRef"),
)


def rewrite_schema(source: str) -> Schema | bool:
    """The schema of this JSON text in the library's terms. Raises AlulaError, naming the place, for any other."""
    return _Rewriter(json.loads(source)).whole()


class _Rewriter:
    """References are followed from the original and put side by side, so that they may point anywhere in it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Schema] = {}
        self._compared: dict[tuple[int, int], bool] = {}

    def whole(self) -> Schema | bool:
        schema = self._schema(self._root, "#", 0)
        for pointer, name in self._names.items():
            self._check_content(pointer, name)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _schema(self, node: Any, at: str, depth: int) -> Schema:
        if node is True:
            return {}
        if not isinstance(node, Mapping):
            reason = "allows nothing" if node is False else "is no schema"
            raise refused(at, f"{json.dumps(node)[:60]} {reason}: give an object")
        if depth > DEEPEST:
            raise refused(at, f"is nested more than {DEEPEST} deep: flatten it")
        for name in _BEYOND:
            if name in node:
                raise refused(at, f"{name} cannot be enforced: leave it out")
        whole = [name for name in _WHOLE if name in node]
        return self._whole(node, whole, at, depth) if whole else self._typed(node, at, depth)

    def _whole(self, node: Mapping[str, Any], whole: list[str], at: str, depth: int) -> Schema:
        """Keywords that say all there is to say."""
        name = whole[0]
        beside = sorted(key for key in node if key in _RULING and key != name)
        if beside and not (name in ("enum", "const") and beside == ["type"]):
            raise refused(at, f"{name} cannot be combined with {' and '.join(beside)}: write them as one")
        if name == "$ref":
            return {"$ref": "#/$defs/" + self._refer(node["$ref"], at, depth)}
        if name in ("enum", "const"):
            return _values(node, name, at)
        branches = node[name]
        if not isinstance(branches, list) or not branches:
            raise refused(at, f"{name} is no list of schemas: give at least one")
        if name == "allOf" and len(branches) > 1:
            raise refused(at, "allOf of several schemas cannot be enforced: write them as one")
        if name == "oneOf" and not self._exclude_each_other(branches):
            raise refused(at, "oneOf has schemas that may both fit: use anyOf, or tell them apart by a const property")
        found = [self._schema(branch, f"{at}/{name}/{i}", depth + 1) for i, branch in enumerate(branches)]
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _refer(self, pointer: Any, at: str, depth: int) -> str:
        target = self._resolve(pointer, at)
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self._definitions[name] = self._schema(target, str(pointer), depth + 1)
        return self._names[pointer]

    def _check_content(self, pointer: str, name: str) -> None:
        """References that only lead to each other say nothing."""
        seen = {name}
        while (target := self._definitions[name].get("$ref")) is not None:
            name = target.removeprefix("#/$defs/")
            if name in seen:
                raise refused(pointer, "references lead to nothing but each other: let one of them be a schema")
            seen.add(name)

    def _resolve(self, pointer: Any, at: str) -> Any:
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise refused(at, f"$ref is {json.dumps(pointer)[:60]}: give a pointer into this schema, as #/$defs/name")
        node = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[_index(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise refused(at, f"$ref {pointer!r} points nowhere: correct it") from None
        return node

    def _typed(self, node: Mapping[str, Any], at: str, depth: int) -> Schema:
        if (types := _types(node, at)) is None:
            return {}
        branches = [self._of_type(kind, node, at, depth) for kind in types]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _of_type(self, kind: str, node: Mapping[str, Any], at: str, depth: int) -> Schema:
        if kind == "object":
            return self._object(node, at, depth)
        if kind == "array":
            return self._array(node, at, depth)
        if kind == "string":
            return text_schema(node, at)
        return number_schema(kind, node, at) if kind in ("integer", "number") else {"type": kind}

    def _array(self, node: Mapping[str, Any], at: str, depth: int) -> Schema:
        if node.get("uniqueItems"):
            raise refused(at, "uniqueItems cannot be enforced: leave it out")
        schema: Schema = {"type": "array", **counts(node, ("minItems", "maxItems"), at)}
        if "prefixItems" in node:
            if not isinstance(node["prefixItems"], list):
                raise refused(at, "prefixItems is no list: give a list of schemas")
            places = enumerate(node["prefixItems"])
            schema["prefixItems"] = [self._schema(item, f"{at}/prefixItems/{i}", depth + 1) for i, item in places]
        items = node.get("items", "prefixItems" not in node)
        schema["items"] = items if items is False else self._schema(items, f"{at}/items", depth + 1)
        return schema

    def _object(self, node: Mapping[str, Any], at: str, depth: int) -> Schema:
        properties, patterns = _map(node, "properties", at), _map(node, "patternProperties", at)
        more = node.get("additionalProperties", not properties and not patterns)
        _check_object(node, properties, patterns, more, at)
        schema: Schema = {"type": "object", "additionalProperties": False}
        schema |= counts(node, ("minProperties", "maxProperties"), at)
        schema |= {"required": node["required"]} if "required" in node else {}
        if more is not False:
            schema["additionalProperties"] = self._schema(more, f"{at}/additionalProperties", depth + 1)
        for name, group in (("properties", properties), ("patternProperties", patterns)):
            if group:
                places = group.items()
                found = {key: self._schema(value, f"{at}/{name}/{key}", depth + 1) for key, value in places}
                schema[name] = found if name == "properties" else _rewritten_names(found, at)
        return schema

    def _exclude_each_other(self, branches: list[Any]) -> bool:
        followed = [self._follow(branch) for branch in branches]
        pairs = ((a, b) for i, a in enumerate(followed) for b in followed[i + 1 :])
        return all(self._differ(a, b) for a, b in pairs)

    def _differ(self, a: Any, b: Any) -> bool:
        """Whether no value fits both. Every pair is compared once: schemas may refer to each other in many ways."""
        pair = (id(a), id(b))
        if pair not in self._compared:
            self._compared[pair] = False  # what comes back to the same pair has not told them apart
            self._compared[pair] = self._are_apart(a, b)
        return self._compared[pair]

    def _are_apart(self, a: Any, b: Any) -> bool:
        """As far as types, listed values and required properties tell."""
        if not isinstance(a, Mapping) or not isinstance(b, Mapping):
            return False
        values_a, values_b = _listed(a), _listed(b)
        if values_a is not None and values_b is not None:
            return not {*map(_key, values_a)} & {*map(_key, values_b)}
        types_a, types_b = _possible(a, values_a), _possible(b, values_b)
        if types_a is not None and types_b is not None and not types_a & types_b:
            return True
        if types_a != {"object"} or types_b != {"object"}:
            return False
        shared = {*_names(a, "required")} & {*_names(b, "required")}
        return any(
            self._differ(self._follow(a["properties"][name]), self._follow(b["properties"][name]))
            for name in shared
            if name in _map(a, "properties", "#") and name in _map(b, "properties", "#")
        )

    def _follow(self, node: Any) -> Any:
        for _ in range(DEEPEST):
            if not _is_reference(node):
                return node
            node = self._resolve(node["$ref"], "#")
        return node


def _index(key: str) -> int:
    """Raises ValueError for what is no place in a list, such as -1."""
    if not key.isdecimal():
        raise ValueError(key)
    return int(key)


def _is_reference(node: Any) -> bool:
    return isinstance(node, Mapping) and "$ref" in node


def _types(node: Mapping[str, Any], at: str) -> list[str] | None:
    """Types a value may have; where none is given, those that the keywords are about. None: all."""
    if "type" not in node:
        return [kind for kind, names in _BY_TYPE.items() if any(name in node for name in names)] or None
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    for kind in types:
        if kind not in _TYPES:
            raise refused(at, f"type is {json.dumps(kind)[:60]}: give one of {', '.join(_TYPES)}")
    if not types:
        raise refused(at, "type is empty: give at least one")
    return types


def _values(node: Mapping[str, Any], name: str, at: str) -> Schema:
    values = node[name] if name == "enum" else [node[name]]
    if not isinstance(values, list) or not values:
        raise refused(at, "enum is no list of values: give at least one")
    check_written(values, name, at)
    allowed = None if "type" not in node else {*(_types(node, at) or ())}
    for value in values:
        if allowed is not None and not _kinds(value) & allowed:
            raise refused(at, f"{name} has {json.dumps(value)[:60]}, which is not of its type: correct one of them")
    return {"enum": values}


def _check_object(node: Mapping[str, Any], properties: Schema, patterns: Schema, more: Any, at: str) -> None:
    for name in _names(node, "required"):
        if name not in properties:
            raise refused(at, f"required has {name!r}, which properties lack: add it there")
    if patterns and (properties or len(patterns) > 1 or more is not False):
        raise refused(at, "patternProperties can be enforced alone and with one pattern only: list the properties")
    if (patterns or more is not False) and node.get("minProperties", 0) not in (0, 1):
        raise refused(at, "minProperties above 1 cannot be enforced where names are free: list the properties")


def _rewritten_names(patterns: Schema, at: str) -> Schema:
    field = f"structured_outputs.json at {at}: patternProperties"
    return {f"^{rewrite_regex(pattern, field, in_json=True)}$": value for pattern, value in patterns.items()}


def _map(node: Mapping[str, Any], name: str, at: str) -> Schema:
    value = node.get(name, {})
    if not isinstance(value, dict):
        raise refused(at, f"{name} is no object: give schemas by name")
    return value


def _names(node: Mapping[str, Any], name: str) -> list[str]:
    value = node.get(name, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise refused("#", f"{name} is no list of names: give a list")
    return value


def _listed(node: Mapping[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def _possible(node: Mapping[str, Any], values: list[Any] | None) -> set[str] | None:
    """Types a value that fits may have; None where nothing says so."""
    if values is not None:
        return {kind for value in values for kind in _kinds(value)}
    types = node.get("type")
    if types is None:
        return None
    found = {kind for kind in _TYPES if kind in (types if isinstance(types, list) else [types])}
    return found | {"integer"} if "number" in found else found


def _kinds(value: Any) -> set[str]:
    """Types that a value has: a whole number is a number too."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"integer", "number"} if float(value).is_integer() else {"number"}
    return {{str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]}


def _key(value: Any) -> str:
    """Equal for equal JSON values."""
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)
