"""Cached blocks in a file that has no name, so that nothing of it is left however its process ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from pathlib import Path

import xxhash

from core.errors import BadRequest


def require_room(folder: Path, num_bytes: int, whose: str) -> None:
    """Taking what there is until it ends would harm others. whose: those bytes, for the message.

    Raises: BadRequest: naming the setting: `folder` cannot be written, or has less room.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadRequest("disk_cache_folder", f"{folder} cannot be written: {error}") from error
    if num_bytes > free:
        raise BadRequest("disk_cache_bytes", f"{num_bytes} bytes of {whose}, but {folder} has {free} free")


class DiskSlots:
    """Slots of `slot_bytes` in one file below `folder`, whose room is taken at once; one call at a time.

    Each slot's XXH3-64 is kept in memory: what a disk gives back damaged is told, not served.

    Raises: OSError: the folder cannot be written, or has no room. So do the methods where the disk fails.
    """

    def __init__(self, folder: Path, num_slots: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_slots * slot_bytes)
        except OSError:
            self._file.close()
            raise
        self._checksums = array("Q", bytes(8 * num_slots))

    def write(self, slot: int, data: memoryview) -> None:
        """data: [slot_bytes]."""
        self._checksums[slot] = xxhash.xxh3_64_intdigest(data)
        self._require_all(os.pwrite(self._file.fileno(), data, slot * self._slot_bytes))

    def read(self, slot: int, data: memoryview) -> bool:
        """Fill `data` with what was written. False: it is not what was written."""
        self._require_all(os.preadv(self._file.fileno(), [data], slot * self._slot_bytes))
        return xxhash.xxh3_64_intdigest(data) == self._checksums[slot]

    def close(self) -> None:
        """The room is the folder's again. Idempotent."""
        self._file.close()

    def _require_all(self, num_bytes: int) -> None:
        if num_bytes != self._slot_bytes:
            raise OSError(f"{num_bytes} of {self._slot_bytes} bytes of a cached block were read or written")
