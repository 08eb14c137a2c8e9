"""What callers write to constrain an output, as one grammar: OpenAI's `response_format`, and what vLLM's clients send.

Every front ends in these functions, so that equal constraints are equal grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from core.errors import BadRequest
from core.request import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind

MAX_CHOICE_TEXTS: Final = 1024
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_GBNF_RULE: Final = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_REGEX_SIGNS: Final = re.compile(r"[\\.+*?()|\[\]{}^$]")


def json_schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """JSON that is valid under `schema`; the order of its properties is that of the output's.

    Raises: BadRequest: on `grammar`: it nests too deep or is too long to write.
    """
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":")))
    except (RecursionError, ValueError) as error:
        raise BadRequest("grammar", f"is not a JSON schema: {error}") from error


def json_text_grammar(text: str) -> Grammar:
    """A JSON schema that a caller has already written as text. Raises: BadRequest: on `grammar`."""
    _require_bounded(text)
    try:
        schema = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise BadRequest("grammar", f"is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise BadRequest("grammar", "must be a JSON object")
    return json_schema_grammar(schema)


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Exactly one of some texts. Raises: BadRequest: on `grammar`: there are none, too many, or one is empty."""
    if not 1 <= len(choices) <= MAX_CHOICE_TEXTS:
        raise BadRequest("grammar", f"must hold 1 to {MAX_CHOICE_TEXTS} texts, got {len(choices)}")
    if not all(choices):
        raise BadRequest("grammar", "a choice must not be empty")
    return regex_grammar("|".join(_REGEX_SIGNS.sub(r"\\\g<0>", choice) for choice in choices))


def regex_grammar(pattern: str) -> Grammar:
    """The whole output matches `pattern`. Raises: BadRequest: on `grammar`: it is empty."""
    if not pattern:
        raise BadRequest("grammar", "must not be empty")
    return Grammar(GrammarKind.REGEX, pattern)


def context_free_grammar(text: str) -> Grammar:
    """Lark with a rule `start`, or GBNF, which alone has `::=`, with a rule `root`.

    Raises: BadRequest: on `grammar`: it is empty.
    """
    if not text:
        raise BadRequest("grammar", "must not be empty")
    return Grammar(GrammarKind.GBNF if _GBNF_RULE.search(text) else GrammarKind.LARK, text)


def _require_bounded(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise BadRequest("grammar", f"{len(text)} characters exceed {MAX_GRAMMAR_CHARACTERS}")
