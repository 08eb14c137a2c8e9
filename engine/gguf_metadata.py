"""The metadata of a GGUF, with errors that name what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf

from core.errors import BadModel
from engine.models.families import FAMILIES
from engine.models.family import Family

# By `general.architecture`; Mistral goes by Llama's name there.
HUGGING_FACE_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class Metadata:
    """The fields of a GGUF by name.

    hugging_face_architecture: as config.json names it in `architectures`.
    """

    def __init__(self, source: Path) -> None:
        """Raises: BadModel: no GGUF, or of an architecture that we do not compute."""
        self.name = source.name
        try:
            self.reader = gguf.GGUFReader(source)
        except OSError as error:
            raise BadModel(f"{source}: cannot be read: {error}") from error
        except (ValueError, IndexError) as error:  # the library's and numpy's own words
            raise BadModel(f"{source}: cannot be read as GGUF: damaged, or not all of it is here ({error})") from error
        self.architecture = self.need("general.architecture")
        if self.architecture not in HUGGING_FACE_ARCHITECTURES:
            supported = ", ".join(HUGGING_FACE_ARCHITECTURES)
            raise BadModel(f"{self.name}: general.architecture: need one of {supported}, got {self.architecture!r}")
        self.hugging_face_architecture = HUGGING_FACE_ARCHITECTURES[self.architecture]

    @property
    def family(self) -> Family:
        return FAMILIES[self.hugging_face_architecture]

    def get(self, field: str, default: Any = None) -> Any:
        """The field's value, or `default`. Raises: BadModel: it is damaged."""
        found = self.reader.get_field(field)
        try:
            return default if found is None else found.contents()
        except ValueError as error:
            raise BadModel(f"{self.name}: metadata field {field} is damaged: {error}") from error

    def need(self, field: str) -> Any:
        """The field's value. Raises: BadModel: it is missing."""
        value = self.get(field)
        if value is None:
            raise BadModel(f"{self.name}: metadata field {field} is missing")
        return value

    def get_own(self, field: str, default: Any = None) -> Any:
        """As `get`, of a field below the architecture's name."""
        return self.get(f"{self.architecture}.{field}", default)

    def need_own(self, field: str) -> Any:
        """As `need`, of a field below the architecture's name."""
        return self.need(f"{self.architecture}.{field}")

    def refuse(self, field: str, message: str) -> BadModel:
        """The error to raise about a field below the architecture's name."""
        return BadModel(f"{self.name}: {self.architecture}.{field}: {message}")
