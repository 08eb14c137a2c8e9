"""Where Tandem keeps things: TANDEM_CACHE, or ~/.cache/tandem."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
RUNS_KEPT: Final = 10


def cache_folder() -> Path:
    """The root of everything that can be made again."""
    return Path(os.environ.get("TANDEM_CACHE") or "~/.cache/tandem").expanduser().absolute()


def default_model_folder() -> Path:
    """Where `tandem model fetch` puts the default model, in Hugging Face form."""
    return cache_folder() / "models" / DEFAULT_MODEL


def new_run_folder() -> Path:
    """A fresh folder for one run, named by the time, with `logs` in it; the oldest runs beyond RUNS_KEPT go."""
    runs = cache_folder() / "run"
    runs.mkdir(parents=True, exist_ok=True)
    for old in sorted(runs.iterdir())[: -RUNS_KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    (folder / "logs").mkdir(parents=True)
    return folder
