"""Policy files of every wrong kind, in every place: refused by path, at once, and the last good one holds."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.errors import BadRequest
from router.policy_file import MAX_FILE_BYTES, Policy, follow_policy, parse_policy, read_policy
from router.strict import Strict
from telemetry.router_metrics import PolicyMetrics
from tests.router.test_policy_file import WHOLE, until

# What each section needs beside the field under test.
NEEDED = {"admission.tenants.acme": {"tokens_per_s": "5.0"}}
HUGE = "1" + 400 * "0"
NO_NUMBERS = ("'1'", "text", "true", "2026-11-30", "[1]", "{a: 1}", "!!binary MQ==", "1:30:00x", "0b2")
NO_SANE_NUMBERS = (".nan", ".inf", "-.inf", "-1", "-1.0", HUGE, "-" + HUGE, "1.0e+300", "1.0e+400", "0x" + 400 * "f")


def kinds(annotation: Any) -> list[Any]:
    """The types that a field may have, without None."""
    if typing.get_origin(annotation) is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [kind for part in typing.get_args(annotation) for kind in kinds(part)]
    return [] if annotation is type(None) else [annotation]


def fields(model: type[Strict], path: str = "") -> Iterator[tuple[str, type | None, type[Strict] | None]]:
    """(path, type, section) of each field, down to the last; a section's type is None, a leaf's section is None."""
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        (kind, *_) = [*kinds(field.annotation), None]
        if typing.get_origin(kind) is dict:
            kind, here = typing.get_args(kind)[1], f"{here}.acme"
        if isinstance(kind, type) and issubclass(kind, Strict):
            yield here, None, kind
            yield from fields(kind, here)
        else:
            yield here, kind, None


FIELDS = list(fields(Policy))
LEAVES = {path: kind for path, kind, section in FIELDS if section is None}
SECTIONS = ["", *(path for path, _, section in FIELDS if section is not None)]


def written(path: str, value: str) -> str:
    """A policy that says this, and as little else as it must."""
    section, _, name = path.rpartition(".")
    text = ", ".join(f"{key}: {said}" for key, said in {**NEEDED.get(section, {}), name: value}.items())
    for part in reversed(section.split(".") if section else []):
        text = f"{part}: {{{text}}}"
    return f"{{{text}}}"


def said(policy: object, path: str) -> object:
    for part in path.split("."):
        policy = policy[part] if isinstance(policy, dict) else getattr(policy, part)
    return policy


def test_every_field_is_attacked() -> None:
    numbers = [path for path, kind in LEAVES.items() if kind in (int, float)]
    assert {"routing.imbalance", "routing.hedge.after_s", "admission.tenants.acme.weight"} <= set(numbers)
    assert {"admission.queue.interactive.max_ttft_s", "admission.anonymous.tokens_per_s"} <= set(numbers)
    assert len(numbers) > 25 and len(LEAVES) > 30 and len(SECTIONS) > 8
    for path in numbers:
        if path != "admission.anonymous.burst_tokens":  # which needs a rate
            assert said(parse_policy(written(path, "1")), path) == 1


@pytest.mark.parametrize("path", LEAVES)
def test_a_wrong_value_is_refused_by_its_path(path: str) -> None:
    kind = LEAVES[path]
    wrong = [*NO_NUMBERS, *NO_SANE_NUMBERS, ".5" if kind is int else HUGE]
    if kind is bool:
        wrong.remove("true")
    if kind is str:
        wrong = ["true", "5", ".nan", "[a]", "{a: b}", "2026-11-30", "!!binary MQ=="]
    for value in wrong:
        with pytest.raises(BadRequest) as caught:
            parse_policy(written(path, value))
        # Of what is no field's own fault (a rate that is missing, a model that is not there) the section is named.
        assert path.startswith(caught.value.field.removesuffix(".0")), (value, caught.value.field)


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_no_key_of_a_section_is_refused(section: str) -> None:
    for key in ("colour", "''", "5", "true", ".nan", "~", "2026-11-30", "'\\ud800'", '"\\ud800"'):
        with pytest.raises(BadRequest):
            parse_policy(written(f"{section}.{key}" if section else key, "1"))
    with pytest.raises(BadRequest) as caught:
        parse_policy(written(f"{section}.colour" if section else "colour", "1"))
    assert caught.value.field == (f"{section}.colour" if section else "colour")


@pytest.mark.parametrize(
    "text", ["{name}: 1, {name}: 1", "{name}: 1, <<: {{{name}: 2}}", "<<: [{{{name}: 1}}, {{{name}: 2}}]"]
)
def test_two_rules_for_one_thing_are_refused(text: str) -> None:
    for path in LEAVES:
        section, _, name = path.rpartition(".")
        inner = text.format(name=name)
        for part in reversed(section.split(".")):
            inner = f"{part}: {{{inner}}}"
        with pytest.raises(BadRequest, match=r"stands twice|merges"):
            parse_policy(f"{{{inner}}}")


def bomb(levels: int) -> str:
    lines = ["a0: &a0 {weight: 1}"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb(40),
        "[" * 200_000,
        "{a: " * 100_000,
        "- " * 100_000,
        "? " * 100_000,
        "!!python/object/apply:os.system [ls]",
        "%YAML 9.9\n---\n{}",
        "{}\n---\n{}",
        "\x00",
        "admission: \x07",
        "a: " + "9" * 5000,
        "a: 0:" + "59:" * 5000 + "1",
        "<<: {admission: {}}",
        "admission: {<<: {queue: {max_waiting: 1}}}",
        "[]: {}",
        "{[]: {}}",
        "'admission'",
        "5",
        "true",
        "---",
        "...",
        "\ufeff",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_what_is_no_policy_at_all_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_policy(text)


def test_a_good_file_with_random_damage_is_read_or_refused_and_nothing_else() -> None:
    rng, outcomes = random.Random(5), {True: 0, False: 0}
    pieces = [*"{}[]:,&*!?-|>%@`'\"#\n\t \\", "<<", "~", ".nan", "1e999", "\x00", "\ud800", "é", "admission", "weight"]
    for _ in range(500):
        text = WHOLE
        for _ in range(rng.randrange(1, 4)):
            begin = rng.randrange(len(text))
            text = text[:begin] + rng.choice(pieces) * rng.randrange(3) + text[begin + rng.randrange(4) :]
        good = False
        with suppress(BadRequest):
            good = isinstance(parse_policy(text), Policy)
        outcomes[good] += 1
    assert min(outcomes.values()) > 5, outcomes


def gone(file: Path) -> None:
    file.unlink()


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def a_pipe_without_a_writer(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_socket(file: Path) -> None:
    file.unlink()
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(file))


def a_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def too_long(file: Path) -> None:
    file.write_text("{}" + " " * MAX_FILE_BYTES)


def no_text(file: Path) -> None:
    file.write_bytes("{}".encode("utf-16"))


def empty(file: Path) -> None:
    file.write_bytes(b"")


WAYS: list[Callable[[Path], None]] = [
    gone,
    a_folder,
    a_pipe_without_a_writer,
    a_socket,
    a_device,
    itself,
    too_long,
    no_text,
    empty,
]


@pytest.mark.parametrize("way", WAYS)
async def test_a_file_that_becomes_anything_else_changes_nothing(way: Callable[[Path], None], tmp_path: Path) -> None:
    file, registry, applied = tmp_path / "policy.yaml", CollectorRegistry(), list[Policy]()

    def count(outcome: str) -> float | None:
        return registry.get_sample_value("tandem_policy_reads_total", {"outcome": outcome})

    file.write_text("{routing: {imbalance: 2}}")
    following = asyncio.create_task(follow_policy(file, applied.append, PolicyMetrics(registry), interval_s=0.005))
    await until(lambda: count("applied") == 1)
    way(file)
    with pytest.raises(BadRequest) as caught:
        read_policy(file)
    assert caught.value.field == "policy"
    await until(lambda: count("refused") == 1)
    if file.is_dir():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    file.write_text("{routing: {imbalance: 3}}")
    await until(lambda: count("applied") == 2)
    assert [policy.routing.imbalance for policy in applied] == [2.0, 3.0]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
