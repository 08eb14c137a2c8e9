"""The compiled kernels' cache: keyed by all that matters, filled once, never half written."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cpu import build
from engine.cpu.build import Compiler, KernelsUnavailable, build_library

SOURCE_TEXT = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles at once, and an empty cache."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE_TEXT, encoding="utf-8")
    return path


def test_a_library_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_library(source)
    assert ctypes.CDLL(str(first)).answer() == 42
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build_library(source) == first


def test_the_key_holds_source_flags_compiler_and_processor(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [build_library(source), build_library(source, ("-O0",))]
    source.write_text(SOURCE_TEXT + "\n", encoding="utf-8")
    libraries.append(build_library(source))
    monkeypatch.setattr(build, "cpu_features", lambda: "another processor")
    libraries.append(build_library(source))
    compiler = build.find_compiler()
    assert compiler is not None
    monkeypatch.setattr(build, "find_compiler", lambda: Compiler(compiler.path, "another version"))
    libraries.append(build_library(source))
    assert len(set(libraries)) == len(libraries)


def test_two_processes_at_once_compile_once(source: Path, tmp_path: Path) -> None:
    counter = tmp_path / "bin" / "g++"
    counter.parent.mkdir()
    compiler = build.find_compiler()
    assert compiler is not None
    counter.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo run >>{tmp_path}/runs; sleep 0.3; }}\nexec {compiler.path} "$@"\n',
        encoding="utf-8",
    )
    counter.chmod(counter.stat().st_mode | stat.S_IXUSR)
    code = f"from pathlib import Path; from engine.cpu.build import build_library; build_library(Path({str(source)!r}))"
    environment = os.environ | {
        "PATH": f"{counter.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert (tmp_path / "runs").read_text(encoding="utf-8").count("run") == 1
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_failed_compilation_says_why_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("int broken(", encoding="utf-8")
    with pytest.raises(KernelsUnavailable, match=r"small\.cpp"):
        build_library(source)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".so", ".part")]


def test_a_cache_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    with pytest.raises(KernelsUnavailable, match="cache"):
        build_library(source)


def test_sources_that_were_not_installed_are_named(source: Path) -> None:
    source.unlink()
    with pytest.raises(KernelsUnavailable, match=r"small\.cpp cannot be compiled"):
        build_library(source)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only an x86-64 compiler knows these processors")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "skylake-avx512", "cooperlake"])
def test_kernels_compile_for_processors_that_this_is_not(processor: str) -> None:
    """Each numeric class, without a warning, whatever this machine can run."""
    compiler = build.find_compiler()
    assert compiler is not None
    flags = ("-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-std=c++17", "-Wno-psabi", f"-march={processor}")
    command = [compiler.path, *flags, f"-I{build.KERNEL_FOLDER}", str(build.FORWARD_SOURCE)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=build.COMPILE_TIMEOUT_S)
    assert answer.returncode == 0, answer.stderr[-2000:]
