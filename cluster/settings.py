"""Reads a cluster's settings: a YAML file, the environment, flags. Each refusal names the setting."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.config import ClusterConfig
from core.errors import BadRequest
from router.once_loader import OnceLoader

VARIABLE_PREFIX: Final = "TANDEM_"
# The others: bytes that are no text, a date or number that is none, brackets without end.
NOT_YAML: Final = (yaml.YAMLError, ValueError, RecursionError)


def load_cluster_config(file: Path | None, overrides: Mapping[str, Any], default_model: Path) -> ClusterConfig:
    """Defaults, then the YAML `file`, then the environment, then `overrides` (flags); each key is a field of
    ClusterConfig.

    Raises: BadRequest: an unknown key, a wrong type or a value out of range, by its name.
    """
    values = {"model_folder": default_model, **(_read_yaml(file) if file else {}), **_environment(), **overrides}
    if values.get("aggregated") and values.get("num_prefill"):
        raise BadRequest("num_prefill", "an aggregated cluster has no prefill workers: leave it out")
    for name in ("model_folder", "policy_file"):
        if isinstance(values.get(name), str):
            values[name] = Path(values[name])
    if isinstance(values.get("adapters"), Mapping):
        values["adapters"] = {str(name): _adapter_folder(folder) for name, folder in values["adapters"].items()}
    hints = typing.get_type_hints(ClusterConfig)
    for name, value in values.items():
        if name not in hints:
            raise BadRequest(name, f"is not a setting; the settings are {', '.join(hints)}")
        values[name] = _typed(name, value, hints[name])
    config = ClusterConfig(**values)
    policy_file = config.policy_file and _absolute("policy_file", config.policy_file)
    return replace(config, model_folder=_absolute("model_folder", config.model_folder), policy_file=policy_file)


def _adapter_folder(folder: object) -> Path:
    if not folder or not isinstance(folder, str | Path):
        raise BadRequest("adapters", f"each name needs a folder, got {folder!r}")
    return _absolute("adapters", Path(folder))


def _absolute(name: str, path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # ~ of a user who is not there
        raise BadRequest(name, f"{path}: {error}") from error


def _environment() -> dict[str, Any]:
    """TANDEM_<FIELD> of each field that is set; a number or a truth value is read as YAML reads it."""
    values: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(ClusterConfig).items():
        text = os.environ.get(VARIABLE_PREFIX + name.upper())
        if text:
            values[name] = text if {str, Path}.intersection(_kinds(hint)) else _read_scalar(text)
    return values


def _read_scalar(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except NOT_YAML:
        return text  # of no other type either: refused by its name


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.load(file.read_text(), OnceLoader)
    except (OSError, *NOT_YAML) as error:
        raise BadRequest("config", f"cannot be read: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadRequest("config", f"{file} must hold a mapping of settings")
    return {str(name): value for name, value in values.items()}


def _typed(name: str, value: object, hint: object) -> object:
    """`value` if it is of the field's type; whole numbers also do for float fields."""
    allowed = _kinds(hint)
    if float in allowed and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise BadRequest(name, f"{error}") from error
    # bool is a subclass of int: `http_port: true` must not pass.
    misplaced_bool = isinstance(value, bool) and bool not in allowed
    if misplaced_bool or not isinstance(value, allowed):
        names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in allowed)
        raise BadRequest(name, f"must be {names}, got {value!r}")
    return value


def _kinds(hint: object) -> tuple[Any, ...]:
    """The types that a field's hint allows."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (typing.get_origin(hint) or hint,)
