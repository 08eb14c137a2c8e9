"""Grammars that crash their compiler, or keep it busy for ever, are refused; the next one finds it as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.errors import BadRequest
from core.request import Grammar, GrammarKind
from router.front import grammar_gate
from router.front.grammar_gate import GrammarGate

VOCAB_SIZE = 49152
SIMPLE = Grammar(GrammarKind.REGEX, "[a-z]+")
CHAIN = "".join(f"a{index}: (a{index + 1})?\n" for index in range(3000))  # the compiler recurses along it
CRASHES = Grammar(GrammarKind.LARK, f'start: a0\n{CHAIN}a3000: "x"')
NESTED = Grammar(GrammarKind.JSON_SCHEMA, '{"allOf":[' * 300 + "{}" + "]}" * 300)
HANGS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "integer", "allOf": [{"multipleOf": value} for value in (10007, 10009, 10037)]}),
)


@pytest.fixture
async def gate(model_folder: Path) -> AsyncIterator[GrammarGate]:
    gate = GrammarGate(model_folder, VOCAB_SIZE)
    yield gate
    await gate.close()


async def test_what_ends_or_hangs_the_compiler_is_refused(gate: GrammarGate, monkeypatch: pytest.MonkeyPatch) -> None:
    await gate.check(SIMPLE, "")
    with pytest.raises(BadRequest, match="unclosed group"):
        await gate.check(Grammar(GrammarKind.REGEX, "(a"), "")
    with pytest.raises(BadRequest, match="recursion limit"):
        await gate.check(NESTED, "")
    first = gate._process
    with pytest.raises(BadRequest, match="nests too deep"):
        await gate.check(CRASHES, "")
    await gate.check(Grammar(GrammarKind.REGEX, "b"), "")
    assert first is not None and first.returncode is not None and gate._process is not first
    monkeypatch.setattr(grammar_gate, "CHECK_TIMEOUT_S", 0.5)
    with pytest.raises(BadRequest, match="did not compile within"):
        await gate.check(HANGS, "")
    assert gate._process is None
    await gate.check(SIMPLE, "")  # remembered: no process is needed
    assert gate._process is None


@pytest.mark.parametrize("fault", [None, "is too odd"])
async def test_what_many_bring_at_once_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    gate, asked = GrammarGate(tmp_path, VOCAB_SIZE), list[Grammar]()

    async def compile_it(grammar: Grammar) -> str | None:
        asked.append(grammar)
        await asyncio.sleep(0)
        return fault

    monkeypatch.setattr(gate, "_compile", compile_it)
    outcomes = await asyncio.gather(*(gate.check(SIMPLE, "") for _ in range(10)), return_exceptions=True)
    assert asked == [SIMPLE]
    assert all(isinstance(outcome, BadRequest) if fault else outcome is None for outcome in outcomes)


async def test_a_tenant_with_many_grammars_holds_up_another_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = GrammarGate(tmp_path, VOCAB_SIZE), list[str]()

    async def compile_it(grammar: Grammar) -> str | None:
        asked.append(grammar.source)
        await asyncio.sleep(0)
        return None

    monkeypatch.setattr(gate, "_compile", compile_it)
    many = [gate.check(Grammar(GrammarKind.REGEX, f"a{number}"), "many") for number in range(20)]
    await asyncio.gather(*many, gate.check(Grammar(GrammarKind.REGEX, "b"), "one"))
    assert asked.index("b") == 2
