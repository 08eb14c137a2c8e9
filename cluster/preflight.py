"""What is checked before anything is started: each refusal names the setting."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from cluster.config import ClusterConfig
from cluster.free_ports import free_ports, listen_once
from core.errors import BadModel, BadRequest
from engine.adapter_config import AdapterConfig
from engine.digest import adapter_digest
from router.policy_file import read_policy

TRIES: Final = 20


def resolve_ports(config: ClusterConfig) -> ClusterConfig:
    """`config` with each port 0 replaced by a free one; all of a cluster on this machine can be listened on.

    Raises: BadRequest: a port cannot be listened on.
    """
    controller_port = _usable_port("controller_port", config.controller_host, config.controller_port)
    return resolve_router_ports(replace(config, controller_port=controller_port))


def resolve_router_ports(config: ClusterConfig) -> ClusterConfig:
    """As `resolve_ports`, of the routers alone."""
    any_free = config.num_routers > 1 and 0 in (config.http_port, config.grpc_port, config.registry_port)
    for _ in range(TRIES - 1 if any_free else 0):
        with suppress(BadRequest):  # a free port for the first router need not leave one for the next
            return _resolve(config)
    return _resolve(config)


def _resolve(config: ClusterConfig) -> ClusterConfig:
    http_port = _usable_port("http_port", config.http_host, config.http_port)
    grpc_port = _usable_port("grpc_port", config.grpc_host, config.grpc_port)
    registry_port = _usable_port("registry_port", config.registry_host, config.registry_port)
    resolved = replace(config, http_port=http_port, grpc_port=grpc_port, registry_port=registry_port)
    for index in range(1, config.num_routers):
        _resolve(resolved.of_router(index))
    return resolved


def require_model(folder: Path) -> None:
    """Raises: BadRequest: `folder` is not a model in Hugging Face form."""
    if not folder.exists():
        raise BadRequest(
            "model_folder", f"{folder} does not exist: a folder or a GGUF file here is needed, nothing is downloaded"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise BadRequest("model_folder", f"{folder} is no model folder: it has no {name}")


def require_adapters(folders: Mapping[str, Path]) -> None:
    """Raises: BadRequest: what is wrong in an adapter's folder, as far as that is seen without its base model."""
    try:
        for folder in folders.values():
            AdapterConfig.load(folder)
            adapter_digest(folder)
    except BadModel as error:
        raise BadRequest("adapters", str(error)) from error


def require_disk_cache(config: ClusterConfig) -> None:
    """Raises: BadRequest: its folder cannot be written, or has less room than all workers here take."""
    folder = config.disk_cache_folder
    if folder is None:
        return
    try:
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadRequest("disk_cache_folder", f"{folder} cannot be written: {error}") from error
    num_bytes = config.disk_cache_bytes * len(config.roles)
    if num_bytes > free:
        raise BadRequest("disk_cache_bytes", f"{num_bytes} of all workers, but {folder} has {free} free")


def require_policy(file: Path | None) -> None:
    """Raises: BadRequest: what is wrong in it, by the file and its path there."""
    if file is not None:
        try:
            read_policy(file)
        except BadRequest as error:
            raise BadRequest("policy_file", f"{file}: {error}") from error


def _usable_port(field: str, host: str, port: int) -> int:
    try:
        listen_once(host, port)
        return port or free_ports(1, host)[0]
    except OSError as error:
        what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror or error})"
        flag = f"--{field.replace('_', '-')}"
        raise BadRequest(field, f"port {port} on {host} {what}: choose another one with {flag}") from None
