"""Where Tandem keeps models and what runs write, in its cache."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.cache_folder import cache_folder

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
RUNS_KEPT: Final = 10
MAX_TEMP_ROOT_CHARS: Final = 24  # Ray adds about 75 to it for a unix socket, whose path may have 107


def models_folder() -> Path:
    """Where imported models lie. Named after the form of their weights: a version that knows another finds its own."""
    return cache_folder() / "models" / "blocks"


def default_model_folder() -> Path:
    """Where `tandem model fetch` puts the default model, in Hugging Face form."""
    return models_folder() / DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class RunFolders:
    """Where one run writes."""

    logs: Path  # one file a process; the last RUNS_KEPT runs are kept
    ray: Path  # Ray's sockets and its own logs; gone after the run


@contextmanager
def run_folders() -> Iterator[RunFolders]:
    """Fresh folders for one run; the runs before the last RUNS_KEPT go."""
    runs = cache_folder() / "run"
    runs.mkdir(parents=True, exist_ok=True)
    for old in sorted(runs.iterdir())[: -RUNS_KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)
    logs = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}" / "logs"
    logs.mkdir(parents=True)
    with ray_folder() as ray:
        yield RunFolders(logs, ray)


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for Ray's sockets."""
    root = tempfile.gettempdir()
    short_root = root if len(root) <= MAX_TEMP_ROOT_CHARS else "/tmp"
    with tempfile.TemporaryDirectory(prefix="tandem-ray-", dir=short_root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
