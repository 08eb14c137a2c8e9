"""Reads a cluster's settings: a YAML file, the environment, flags. Each refusal names the setting."""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import yaml

from cluster.byte_size import read_byte_size
from cluster.config import ClusterConfig
from core.errors import BadRequest
from router.once_loader import OnceLoader

VARIABLE_PREFIX: Final = "TANDEM_"
# Variables that are no settings: who reads each stands in README.md.
OTHER_VARIABLES: Final = {"TANDEM_API_KEY", "TANDEM_ATTENTION", "TANDEM_CACHE", "TANDEM_ENGINE", "TANDEM_EXACT"}
# The others: bytes that are no text, a date or number that is none, brackets without end.
NOT_YAML: Final = (yaml.YAMLError, ValueError, RecursionError)


def load_cluster_config(file: Path | None, overrides: Mapping[str, Any], default_model: Path) -> ClusterConfig:
    """Defaults, then the YAML `file`, then the environment, then `overrides` (flags); each key is a field of
    ClusterConfig.

    Raises: BadRequest: an unknown key, a wrong type or a value out of range, by its name.
    """
    from_file = read_settings_file(file) if file else {}
    values = {"model_folder": default_model, **from_file, **_environment(), **overrides}
    if values.get("aggregated") and values.get("num_prefill"):
        raise BadRequest("num_prefill", "an aggregated cluster has no prefill workers: leave it out")
    for name in ("model_folder", "policy_file", "disk_cache_folder"):
        if isinstance(values.get(name), str):
            values[name] = Path(values[name])
    if isinstance(values.get("adapters"), Mapping):
        values["adapters"] = {str(name): _adapter_folder(folder) for name, folder in values["adapters"].items()}
    hints = typing.get_type_hints(ClusterConfig)
    for name, value in values.items():
        if name not in hints:
            meant = nearest(name, hints)
            raise BadRequest(name, f"is not a setting; {meant} is one" if meant else f"is none of {', '.join(hints)}")
        if isinstance(value, str) and "bytes" in name.split("_"):
            value = read_byte_size(name, value)
        values[name] = _typed(name, value, hints[name])
    config = ClusterConfig(**values)
    return replace(
        config,
        model_folder=_absolute("model_folder", config.model_folder),
        policy_file=config.policy_file and _absolute("policy_file", config.policy_file),
        disk_cache_folder=config.disk_cache_folder and _absolute("disk_cache_folder", config.disk_cache_folder),
    )


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return VARIABLE_PREFIX + field.upper()


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Names that begin as ours do and that nothing reads, each with the one that may have been meant."""
    known = {variable(item.name) for item in fields(ClusterConfig)} | OTHER_VARIABLES
    names = sorted(name for name, text in environment.items() if text and name.startswith(VARIABLE_PREFIX))
    meant = {name: nearest(name, known) for name in names if name not in known}
    return [f"{name} ({right}?)" if right else name for name, right in meant.items()]


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that a misspelt one looks like; empty when none does."""
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.8)), "")


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
        text = os.environ.get(variable(name))
        if text:
            values[name] = text if {str, Path}.intersection(_kinds(hint)) else _read_scalar(text)
    return values


def _read_scalar(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except NOT_YAML:
        return text  # of no other type either: refused by its name


def read_settings_file(file: Path) -> dict[str, Any]:
    """What stands in it, unchecked. Raises: BadRequest: on `config`: it is no mapping in YAML."""
    try:
        values = yaml.load(file.read_text(), OnceLoader)
    except (OSError, *NOT_YAML) as error:
        raise BadRequest("config", f"{file} cannot be read: {error}") from error
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
