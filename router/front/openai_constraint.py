"""The fields of OpenAI bodies that constrain the output: `response_format`, and vLLM's `structured_outputs` and, as its
older clients have it, `guided_*`. A request has one of them at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from core.errors import BadRequest
from core.request import Grammar
from router.front.constraint import (
    ANY_OBJECT,
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    json_text_grammar,
    regex_grammar,
)
from router.strict import Strict, Text


def _schema(value: Any) -> Any:
    if value is not None and not isinstance(value, dict | str):
        raise PydanticCustomError("schema", "must be a JSON schema: an object, or its text")
    return value


Schema = Annotated[Any, AfterValidator(_schema)]


class NamedSchema(Strict):
    """`strict: false` asks for less than we do: the output always matches."""

    name: Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's; exactly one of its fields is given."""

    json_: Annotated[Schema, Field(alias="json")] = None
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None


class Constraints(Strict):
    """What both endpoints' bodies take."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None

    def grammar_field(self) -> str | None:
        """Where the caller wrote the constraint. Raises: BadRequest: in several places, or in none of a form's."""
        fields = [field for field, _make, _value in self._given()]
        if len(fields) > 1:
            raise BadRequest(fields[1], f"is not allowed beside {fields[0]}")
        form = self.response_format
        if form is not None and (form.json_schema is None) is (form.type == "json_schema"):
            raise BadRequest("response_format.json_schema", "belongs to type json_schema, and to no other")
        if self.structured_outputs is not None and not fields:
            raise BadRequest("structured_outputs", "must hold one of json, regex, choice, grammar and json_object")
        return fields[0] if fields else None

    def grammar_asked(self) -> Grammar | None:
        """Raises: BadRequest: on `grammar`: it cannot be one."""
        for _field, make, value in self._given():
            return make(value)
        return None

    def _given(self) -> list[tuple[str, Callable[[Any], Grammar], Any]]:
        """Where there is a constraint, what makes a grammar of it, and what is written there."""
        form, outputs = self.response_format, self.structured_outputs or StructuredOutputs()
        any_object = ANY_OBJECT if form and form.type == "json_object" else None
        places: list[tuple[str, Callable[[Any], Grammar], Any]] = [
            ("response_format.type", json_schema_grammar, any_object),
            ("response_format.json_schema.schema", json_schema_grammar, _schema_of(form)),
            ("structured_outputs.json", _schema_grammar, outputs.json_),
            ("structured_outputs.regex", regex_grammar, outputs.regex),
            ("structured_outputs.choice", choice_grammar, outputs.choice),
            ("structured_outputs.grammar", context_free_grammar, outputs.grammar),
            ("structured_outputs.json_object", json_schema_grammar, ANY_OBJECT if outputs.json_object else None),
            ("guided_json", _schema_grammar, self.guided_json),
            ("guided_regex", regex_grammar, self.guided_regex),
            ("guided_choice", choice_grammar, self.guided_choice),
            ("guided_grammar", context_free_grammar, self.guided_grammar),
        ]
        return [place for place in places if place[2] is not None]


def _schema_of(form: ResponseFormat | None) -> dict[str, Any] | None:
    return form.json_schema.schema_ if form and form.json_schema else None


def _schema_grammar(schema: dict[str, Any] | str) -> Grammar:
    return json_text_grammar(schema) if isinstance(schema, str) else json_schema_grammar(schema)
