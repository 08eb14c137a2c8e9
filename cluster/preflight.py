"""What is checked before anything is started: each refusal names the setting."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cluster.config import PORTS, ClusterConfig
from cluster.free_ports import free_ports, listen_once
from cluster.worker.config import DTYPES, slots_within
from core.errors import BadModel, BadRequest
from engine.adapter_config import AdapterConfig
from engine.digest import adapter_digest
from engine.disk_slots import require_room
from engine.json_file import read_json_object
from engine.model_config import ModelConfig
from engine.parallel.shard import require_split
from router.policy_file import read_policy

TRIES: Final = 20
GGUF_MAGIC: Final = b"GGUF"
MODEL_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json")
A_MODEL: Final = f"a folder with {', '.join(MODEL_FILES)} and *.safetensors, or a GGUF file,"


def resolve_ports(config: ClusterConfig) -> ClusterConfig:
    """`config` with each port 0 replaced by a free one; all of a cluster on this machine can be listened on.

    Raises: BadRequest: on the first of the ports that cannot be listened on; it names all of them.
    """
    return _resolve(config, (*PORTS, "controller_port"))


def resolve_router_ports(config: ClusterConfig) -> ClusterConfig:
    """As `resolve_ports`, of the routers alone."""
    return _resolve(config, PORTS)


def _resolve(config: ClusterConfig, names: Sequence[str]) -> ClusterConfig:
    any_free = config.num_routers > 1 and 0 in (getattr(config, name) for name in PORTS)
    for _ in range(TRIES - 1 if any_free else 0):
        with suppress(BadRequest):  # a free port for the first router need not leave one for the next
            return _resolve_once(config, names)
    return _resolve_once(config, names)


def _resolve_once(config: ClusterConfig, names: Sequence[str]) -> ClusterConfig:
    refused: list[tuple[str, str]] = []

    def usable(name: str, of: ClusterConfig) -> int:
        host: str = getattr(of, name.replace("_port", "_host"))
        port: int = getattr(of, name)
        try:
            listen_once(host, port)
            return port or free_ports(1, host)[0]
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            what = "is in use" if in_use else f"cannot be listened on ({error.strerror or error})"
            refused.append((name, f"port {port} on {host} (--{name.replace('_', '-')}) {what}"))
            return port

    ports: dict[str, Any] = {name: usable(name, config) for name in names}
    resolved = replace(config, **ports)
    for index in range(1, config.num_routers):
        for name in PORTS:
            if getattr(resolved, name):  # 0: none was found for the first one
                usable(name, resolved.of_router(index))
    if refused:
        choose = "choose another one" if len(refused) == 1 else "choose other ones"
        raise BadRequest(refused[0][0], f"{', '.join(text for _, text in refused)}: {choose}; 0 takes any free one")
    return resolved


def require_gguf(file: Path) -> None:
    """Raises: BadRequest: on `model_folder`: `file` is none."""
    try:
        with file.open("rb") as opened:
            is_gguf = opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError as error:
        raise BadRequest("model_folder", f"{file} cannot be read: {error.strerror}") from error
    if not is_gguf:
        raise BadRequest("model_folder", f"{file} is a file, but no GGUF: {A_MODEL} is needed")


def require_model(folder: Path) -> ModelConfig:
    """What `folder` says of its model. Raises: BadRequest: it is none in Hugging Face form, or one that we do not
    compute."""
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        raise BadRequest("model_folder", f"{folder} does not exist: {A_MODEL} is needed, none is downloaded") from None
    except OSError as error:
        raise BadRequest("model_folder", f"{folder} cannot be read: {error.strerror}: {A_MODEL} is needed") from error
    lacks = [name for name in MODEL_FILES if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        lacks.append("*.safetensors")
    if lacks:
        files = sorted(name for name in names if name.endswith(".gguf"))
        hint = f"; it has {files[0]}: name that file" if files else ""
        raise BadRequest("model_folder", f"{folder} has no {', '.join(lacks)}: {A_MODEL} is needed{hint}")
    try:
        read_json_object(folder / "tokenizer.json")
        return ModelConfig.load(folder)
    except BadModel as error:
        raise BadRequest("model_folder", str(error)) from error


def require_fit(config: ClusterConfig, model: ModelConfig) -> None:
    """Raises: BadRequest: what of the settings this model does not go with."""
    require_split(model, config.tensor_parallel_size)
    block_bytes = model.kv_geometry(config.block_size, DTYPES[config.dtype]).block_bytes
    for name in ("host_cache_bytes", "disk_cache_bytes"):
        slots_within(name, getattr(config, name), block_bytes)


def require_adapters(folders: Mapping[str, Path]) -> None:
    """Raises: BadRequest: what is wrong in an adapter's folder, as far as that is seen without its base model."""
    try:
        for folder in folders.values():
            AdapterConfig.load(folder)
            adapter_digest(folder)
    except BadModel as error:
        raise BadRequest("adapters", str(error)) from error


def require_cache_room(config: ClusterConfig) -> None:
    """Raises: BadRequest: this machine has less memory, or its disk less room, than the caches of all workers take; or
    the disk's folder cannot be written."""
    num_bytes = config.host_cache_bytes * len(config.roles)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory:
        raise BadRequest("host_cache_bytes", f"{num_bytes} of all workers, but this machine has {memory}")
    if config.disk_cache_folder is not None:
        require_room(config.disk_cache_folder, config.disk_cache_bytes * len(config.roles), "all workers")


def require_policy(file: Path | None) -> None:
    """Raises: BadRequest: what is wrong in it, by the file and its path there."""
    if file is not None:
        try:
            read_policy(file)
        except BadRequest as error:
            raise BadRequest("policy_file", f"{file}: {error}") from error
