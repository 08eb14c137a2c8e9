"""Where what can be made again is kept: TANDEM_CACHE, or ~/.cache/tandem."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from core.errors import BadRequest

VARIABLE: Final = "TANDEM_CACHE"


def cache_folder() -> Path:
    """The root: compiled kernels, imported models, logs of runs. Raises: BadRequest: a ~name of nobody."""
    try:
        return Path(os.environ.get(VARIABLE) or "~/.cache/tandem").expanduser().absolute()
    except RuntimeError as error:
        raise BadRequest(VARIABLE, str(error)) from error
