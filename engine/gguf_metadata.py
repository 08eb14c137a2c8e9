"""The metadata of a GGUF, with errors that name what is missing."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any, Final

import gguf

from core.errors import BadModel
from engine.gguf_layout import require_whole
from engine.models.families import FAMILIES
from engine.models.family import Family

# By `general.architecture`; Mistral goes by Llama's name there.
HUGGING_FACE_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

KINDS: Final = {bool: "a bool", int: "an integer", float: "a finite float", str: "a string", list: "an array"}


class Metadata:
    """The fields of a GGUF by name.

    hugging_face_architecture: as config.json names it in `architectures`.
    """

    def __init__(self, source: Path) -> None:
        """Raises: BadModel: no whole GGUF, or of an architecture that we do not compute."""
        require_whole(source)
        self.name = source.name
        try:
            self.reader = gguf.GGUFReader(source)
        except OSError as error:
            raise BadModel(f"{source}: cannot be read: {error}") from error
        except (ValueError, LookupError) as error:  # the library's and numpy's own words
            raise BadModel(f"{source}: cannot be read as GGUF: damaged, or not all of it is here ({error})") from error
        self.architecture = self.need("general.architecture", str)
        if self.architecture not in HUGGING_FACE_ARCHITECTURES:
            supported = ", ".join(HUGGING_FACE_ARCHITECTURES)
            raise BadModel(f"{self.name}: general.architecture: need one of {supported}, got {self.architecture!r}")
        self.hugging_face_architecture = HUGGING_FACE_ARCHITECTURES[self.architecture]

    @property
    def family(self) -> Family:
        return FAMILIES[self.hugging_face_architecture]

    def get(self, field: str, kind: type, default: Any = None) -> Any:
        """The field's value, or `default`. Raises: BadModel: it is damaged, or not of this kind."""
        found = self.reader.get_field(field)
        if found is None:
            return default
        try:
            value = found.contents()
        except ValueError as error:
            raise BadModel(f"{self.name}: metadata field {field} is damaged: {error}") from error
        if type(value) is not kind or (isinstance(value, float) and not isfinite(value)):
            raise BadModel(f"{self.name}: metadata field {field}: need {KINDS[kind]}, got {str(value)[:100]}")
        return value

    def need(self, field: str, kind: type) -> Any:
        """The field's value. Raises: BadModel: it is missing, or see `get`."""
        value = self.get(field, kind)
        if value is None:
            raise BadModel(f"{self.name}: metadata field {field} is missing")
        return value

    def need_list(self, field: str, kind: type) -> list[Any]:
        """As `need`, a list of that kind."""
        values: list[Any] = self.need(field, list)
        if not all(type(value) is kind for value in values):
            raise BadModel(f"{self.name}: metadata field {field}: each element must be {KINDS[kind]}")
        return values

    def get_own(self, field: str, kind: type, default: Any = None) -> Any:
        """As `get`, of a field below the architecture's name."""
        return self.get(f"{self.architecture}.{field}", kind, default)

    def need_own(self, field: str, kind: type) -> Any:
        """As `need`, of a field below the architecture's name."""
        return self.need(f"{self.architecture}.{field}", kind)

    def refuse(self, field: str, message: str) -> BadModel:
        """The error to raise about a field below the architecture's name."""
        return BadModel(f"{self.name}: {self.architecture}.{field}: {message}")
