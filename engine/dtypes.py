"""The numbers that a model may be computed in, by the names that settings and the cache identity have for them."""

from __future__ import annotations

from typing import Final

import torch

from core.errors import BadRequest

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def require_dtype(name: str) -> torch.dtype:
    """Raises: BadRequest: on `dtype`: it is none of ours."""
    if name not in DTYPES:
        raise BadRequest("dtype", f"must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]
