"""Grammars compiled against a model's vocabulary: the only module that knows llguidance (docs/adr/0012).

Tokens are matched by their bytes, so one token may end a string and begin the next key, and a character may be split
over tokens. Special tokens stand for no text: none but EOS can be drawn under a grammar.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from core.errors import BadRequest
from core.request import Grammar, GrammarKind
from engine.step import DeadEnd

if TYPE_CHECKING:  # of the library's stubs, not of its module
    from llguidance._lib import JsonCompileOptions

MAX_CACHED: Final = 32
MAX_ERROR_CHARACTERS: Final = 400
# Between JSON's tokens at most a blank or a newline with an indent: a model could go on with blanks for ever.
JSON_OPTIONS: Final[JsonCompileOptions] = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}
# Far below the defaults: a step that goes beyond them ends its own request, not the time of all others.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class Vocabulary(Protocol):
    """What is needed of a tokenizer (engine/tokenizer.py)."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def spelling(self, token_id: int) -> bytes: ...

    def special_token_ids(self) -> list[int]: ...

    def plain_encoder(self) -> Callable[[str], list[int]]: ...


class GrammarCompiler:
    """Compiles grammars and keeps the last ones. May be called from any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """vocab_size: width of a row of logits; ids that the tokenizer does not have are never allowed."""
        tokens = [vocabulary.spelling(token_id) for token_id in range(vocab_size)]
        wrapper = TokenizerWrapper(_LibraryTokenizer(vocabulary, tokens))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(vocabulary.eos_token_ids))
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, grammar: Grammar) -> bool:
        """`matcher` would take no time to speak of."""
        return grammar in self._compiled

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """A matcher at the start of an output. Raises: BadRequest: on `grammar`: what is wrong with it."""
        with self._lock:
            start = self._compiled.get(grammar)
            if start is not None:
                self._compiled.move_to_end(grammar)
        if start is None:
            start = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = start
                while len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
        return TokenMatcher(start.deep_copy())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        start = LLMatcher(self._tokenizer, _library_form(grammar), log_level=0, limits=LIMITS)
        if start.is_error():
            raise BadRequest("grammar", _fault(start))
        return start


class TokenMatcher:
    """An engine.step.GrammarMatcher: one output's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> bytes | DeadEnd:
        """See GrammarMatcher. Its length is that of the vocabulary, rounded up to whole 32-bit words."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # the mask then has EOS alone, which would pass for an end
            return DeadEnd(f"the grammar has come to a dead end: {_fault(self._matcher)}")
        return mask

    def push(self, token_id: int) -> bool:
        """See GrammarMatcher. A token that the grammar does not allow shows in the next mask."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fork(self) -> TokenMatcher:
        """See GrammarMatcher."""
        return TokenMatcher(self._matcher.deep_copy())


class _LibraryTokenizer:
    """The tokenizer in the words of the library, which asks for tokens where a grammar leaves one text only."""

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes]) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = vocabulary.special_token_ids()
        self._encode = vocabulary.plain_encoder()

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _fault(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()[:MAX_ERROR_CHARACTERS]


def _library_form(grammar: Grammar) -> str:
    """Raises: BadRequest: a schema is not JSON, or a GBNF not one."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(grammar.source, overrides=JSON_OPTIONS)
            except ValueError as error:
                raise BadRequest("grammar", f"must be a JSON object: {error}") from error
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)
        case GrammarKind.GBNF:
            return LLMatcher.grammar_from_lark(lark_of(grammar.source))


def lark_of(gbnf: str) -> str:
    """The same grammar in Lark. Raises: BadRequest: it is no GBNF, or nests deeper than its reader goes."""
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:  # the library raises nothing more exact
        raise BadRequest("grammar", str(error)[:MAX_ERROR_CHARACTERS]) from error
