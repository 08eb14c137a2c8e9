from __future__ import annotations

import json

import pytest

from core.errors import BadRequest
from core.request import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from engine.grammar import MAX_CACHED, GrammarCompiler, TokenMatcher
from engine.grammar_check import check
from engine.step import DeadEnd
from tests.engine.grammar_vocabulary import END, NAME, WIDTH, SmallVocabulary, allowed


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(SmallVocabulary(), WIDTH)


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def push_all(matcher: TokenMatcher, text: str) -> bool:
    return [matcher.push(byte) for byte in text.encode()][-1]


def test_masks_follow_the_tokens(compiler: GrammarCompiler) -> None:
    """Tokens of several bytes are allowed where all their bytes are; the end where the grammar is satisfied."""
    matcher = compiler.matcher(regex("a(b|c)*"))
    assert allowed(matcher.mask()) == {ord("a"), 260}
    assert not matcher.push(260)
    assert allowed(matcher.mask()) == {ord("b"), ord("c"), END}
    assert matcher.push(END)


def test_a_character_may_be_split_over_tokens(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(regex("(é|日)x"))
    assert allowed(matcher.mask()) == {0xC3, 261, 0xE6, 262}
    matcher.push(262)
    assert allowed(matcher.mask()) == {0xA5}


def test_no_token_that_is_no_text_is_ever_allowed(compiler: GrammarCompiler) -> None:
    """Special tokens but the end, and ids of the model that the tokenizer does not have."""
    everything = allowed(compiler.matcher(regex("(?s:.*)")).mask())
    assert END in everything and ord("a") in everything
    assert NAME not in everything and not everything & {WIDTH - 1, WIDTH}


def test_a_special_token_s_spelling_is_a_text_like_any_other(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(regex("<end>!"))
    for byte in b"<end>":
        assert allowed(matcher.mask()) == {byte}
        assert not matcher.push(byte)
    assert matcher.push(ord("!"))


def test_complete_means_that_nothing_can_follow(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(schema({"type": "object", "properties": {}, "additionalProperties": False}))
    assert not push_all(matcher, "{")
    assert push_all(matcher, "}")
    digits = compiler.matcher(schema({"type": "integer"}))
    assert not push_all(digits, "12")
    assert END in allowed(digits.mask())


def test_forks_and_matchers_built_again_go_their_own_way(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(regex("a(bx|cy)"))
    push_all(matcher, "a")
    fork = matcher.fork()
    push_all(matcher, "b")
    push_all(fork, "c")
    assert allowed(matcher.mask()) == {ord("x")}
    assert allowed(fork.mask()) == {ord("y")}
    again = compiler.matcher(regex("a(bx|cy)"))
    push_all(again, "ab")
    assert again.mask() == matcher.mask()


def chain_of_rules(length: int) -> str:
    rules = (f"r{number} ::= r{number + 1}" for number in range(length))
    return "\n".join(("root ::= r0", *rules, f'r{length} ::= "a"'))


def test_gbnf_is_read_as_lark_is(compiler: GrammarCompiler) -> None:
    source = 'root ::= item ("," item)*\nitem ::= [a-c]+ "!"?\n'
    matcher = compiler.matcher(Grammar(GrammarKind.GBNF, source))
    assert allowed(matcher.mask()) & set(range(256)) == set(b"abc")
    push_all(matcher, "ab!")
    assert allowed(matcher.mask()) & set(range(256)) == {ord(",")}
    push_all(matcher, ",c")
    assert END in allowed(matcher.mask())


def test_a_dead_end_says_so_instead_of_ending_well(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(regex("ab"))
    assert not matcher.push(ord("z"))
    assert isinstance(matcher.mask(), DeadEnd)


def test_blanks_between_tokens_of_json_are_bounded(compiler: GrammarCompiler) -> None:
    """Else a model may go on with blanks until its tokens run out."""
    matcher = compiler.matcher(schema({"type": "object"}))
    push_all(matcher, "{\n" + " " * 32)
    assert not allowed(matcher.mask()) & set(b" \n\t")
    assert ord('"') in allowed(matcher.mask())


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("(a"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"not": {}}), "Unimplemented keys"),
        (schema({"$ref": "http://127.0.0.1/schema"}), "not present in a registry"),
        (schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "unsatisfiable"),
        (schema([]), "must be a JSON object"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "must be a JSON object"),
        (Grammar(GrammarKind.LARK, "start: a"), "unknown name"),
        (Grammar(GrammarKind.GBNF, "root ::= a"), "'a' not found"),
        (Grammar(GrammarKind.GBNF, 'other ::= "a"'), "No 'root' rule"),
        (Grammar(GrammarKind.GBNF, "root ::= " + "(" * 60_000), ""),
        (Grammar(GrammarKind.GBNF, chain_of_rules(4000)), "to read"),  # reading it is quadratic
        (schema({"$ref": "#"}), "allows no output"),
    ],
)
def test_what_is_no_grammar_is_refused(compiler: GrammarCompiler, grammar: Grammar, message: str) -> None:
    fault = check(compiler, grammar)
    assert fault is not None and message in fault
    assert check(compiler, schema({"type": "object"})) is None
    assert check(compiler, Grammar(GrammarKind.GBNF, chain_of_rules(20))) is None


def test_sources_and_the_cache_are_bounded(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadRequest, match="grammar"):
        regex("a" * (MAX_GRAMMAR_CHARACTERS + 1))
    regex("a" * MAX_GRAMMAR_CHARACTERS)
    for number in range(MAX_CACHED + 1):
        compiler.matcher(regex(f"x{number}"))
    assert compiler.has(regex("x1"))
    assert not compiler.has(regex("x0"))


def test_a_grammar_beyond_its_bounds_dies_alone(compiler: GrammarCompiler) -> None:
    """It compiles, and goes beyond the bound of a step later."""
    greedy = compiler.matcher(Grammar(GrammarKind.LARK, 'start: "a"{1000000}'))
    assert allowed(greedy.mask()) == {ord("a")}
    assert not greedy.push(ord("a"))
    assert isinstance(greedy.mask(), DeadEnd)
    assert allowed(compiler.matcher(regex("a")).mask()) == {ord("a")}
