"""Writes a model folder whose weights are all floats, for programs that do not read quantised blocks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from core.errors import BadModel
from engine.dtypes import require_dtype
from engine.json_file import read_json_object
from engine.model_config import ModelConfig
from engine.model_folder import new_folder, write_json, write_tensors
from engine.weights import read_tensors

COPIED_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def export_floats(source: Path, target: Path, dtype: str, progress: Callable[[str], None]) -> Path:
    """Write the model of folder `source` into the new folder `target`; all tensors in `dtype`, blocks dequantised.

    Raises: BadModel: `source` is damaged or of an unsupported kind, or `target` exists. BadRequest: dtype.
    """
    torch_dtype = require_dtype(dtype)
    if target.exists():
        raise BadModel(f"{target} exists already")
    fields = read_json_object(source / "config.json")
    progress(f"reading {source}")
    tensors = read_tensors(source, ModelConfig.parse(fields), torch_dtype)
    fields.pop("quantization_config", None)
    progress(f"writing {target}")
    with new_folder(target) as folder:
        write_tensors(folder, tensors, {})
        for name in COPIED_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
        write_json(folder / "config.json", fields | {"torch_dtype": dtype})
    return target
