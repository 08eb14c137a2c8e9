"""Compiles the C++ kernels for this machine, once.

    python -m engine.cpu.build        compile now, so that the first start need not

1. The key is a hash of sources, flags, compiler version and the processor's features: a library made for another
   machine, by another compiler or from other sources is never loaded.
2. Under a file lock, one process compiles into a temporary file and renames it; the others wait and find it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import TandemError
from engine.cache_folder import cache_folder

KERNEL_FOLDER: Final = Path(__file__).parent / "kernels"
FORWARD_SOURCE: Final = KERNEL_FOLDER / "forward.cpp"
COMPILERS: Final = ("g++", "clang++")
COMPILE_TIMEOUT_S: Final = 300.0
# Contraction and fast-math would let the compiler change the order or rounding of a sum between two tiles.
FLAGS: Final = ("-O3", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-Wno-psabi")
FOR_THIS_MACHINE: Final = ("-march=native",)
PORTABLE: Final = ("-DTANDEM_PORTABLE",)


class KernelsUnavailable(TandemError):
    """The CPU kernels cannot be built or cannot compute this model; torch can take their place."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler of this machine; `version` is the first line that it says of itself."""

    path: str
    version: str


def kernel_folder() -> Path:
    """Where compiled libraries are kept."""
    return cache_folder() / "kernels"


def find_compiler() -> Compiler | None:
    """The first of g++ and clang++ that runs; None where there is neither."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if answer.returncode == 0:
            return Compiler(path, answer.stdout.partition("\n")[0])
    return None


def cpu_features() -> str:
    """What -march=native depends on: architecture, model and instruction-set flags of the first processor."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
    lines = [platform.machine()]
    try:
        first_processor = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return f"{lines[0]} {platform.processor()}"
    lines += [line for line in first_processor.splitlines() if line.partition("\t")[0].strip() in wanted]
    return "\n".join(lines)


def build_library(source: Path = FORWARD_SOURCE, target_flags: Sequence[str] = FOR_THIS_MACHINE) -> Path:
    """The compiled library of `source` and the kernel headers; compiled now where the cache has none.

    Args:
        target_flags: what the library is compiled for: FOR_THIS_MACHINE or PORTABLE.
    Raises: KernelsUnavailable: no compiler, it failed (with its words), or the cache cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise KernelsUnavailable(f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH")
    flags = (*FLAGS, *target_flags)
    try:
        library = kernel_folder() / f"{source.stem}-{_key(source, flags, compiler)}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    _compile(compiler, source, flags, library)
    except OSError as error:
        raise KernelsUnavailable(f"{source.name} cannot be compiled into {kernel_folder()}: {error}") from error
    return library


def _key(source: Path, flags: Sequence[str], compiler: Compiler) -> str:
    """24 hex digits of SHA-256 over everything that the library depends on."""
    digest = hashlib.sha256()
    for path in (source, *sorted(KERNEL_FOLDER.glob("*.h"))):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    digest.update("\0".join((*flags, compiler.version, cpu_features())).encode())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; it ends with the process, so no stale lock is left."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: Compiler, source: Path, flags: Sequence[str], library: Path) -> None:
    """Compile beside `library` and rename: whoever finds it finds all of it."""
    handle, unfinished = tempfile.mkstemp(dir=library.parent, prefix=library.stem, suffix=".part")
    os.close(handle)
    command = [compiler.path, *flags, f"-I{KERNEL_FOLDER}", str(source), "-o", unfinished]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if answer.returncode:
            raise KernelsUnavailable(f"{' '.join(command)} failed: {answer.stderr[-2000:]}")
        os.replace(unfinished, library)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{' '.join(command)} took more than {COMPILE_TIMEOUT_S:.0f} s") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def main() -> int:
    """Compile and say where the library lies; a machine that cannot is told why, and serves with torch."""
    try:
        print(f"CPU kernels: {build_library()}")
    except KernelsUnavailable as error:
        print(f"CPU kernels: {error}; torch will compute instead, slower")
    return 0


if __name__ == "__main__":
    sys.exit(main())
