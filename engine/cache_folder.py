"""Where what can be made again is kept: TANDEM_CACHE, or ~/.cache/tandem."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The root: compiled kernels, imported models, logs of runs."""
    return Path(os.environ.get("TANDEM_CACHE") or "~/.cache/tandem").expanduser().absolute()
