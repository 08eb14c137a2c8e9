"""What a caller asks for, after the edge has checked it: plain values, no transport, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from core.errors import BadRequest
from core.identity import Adapter

MAX_STOP_STRINGS: Final = 16
MAX_LOGIT_BIASES: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_PRIORITY: Final = 100
SEED_BITS: Final = 63
MAX_CHOICES: Final = 16
CHOICE_STRIDE: Final = 0x9E3779B97F4A7C15  # odd and far from small: no two choices of a request, or of near seeds, meet
MAX_GRAMMAR_CHARACTERS: Final = 1 << 16


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # cancelled by the client or by us
    ERROR = "error"  # failed after it had started; the message says why
    DEAD_END = "dead_end"  # the caller's grammar leaves no token to draw; the message says why


FAILURES: Final = frozenset({FinishReason.ABORT, FinishReason.ERROR, FinishReason.DEAD_END})


class Placement(StrEnum):
    """Where a prompt is prefilled."""

    AUTO = "auto"  # the router decides
    REMOTE = "remote"  # on a prefill worker, with a KV hand-off
    LOCAL = "local"  # on the decode worker itself: aggregated


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. temperature 0 is greedy: seed, min_p, top_k and top_p then mean nothing.

    The random number of a draw depends on (seed, position) alone, so a token does not depend on the
    batch, the worker, preemption or migration. engine/sampler.py says in which order all apply.

    min_p: least probability that is kept, as a share of the best token's; 0 keeps all.
    repetition_penalty: divides positive logits, and multiplies others, of the tokens of prompt and output; 1 is off.
    presence_penalty, frequency_penalty: taken from the logit of each output token, once and once per occurrence.
    logit_bias: (token id, what is added to its logit), each id once.
    top_logprobs: how many alternatives to report beside each token's log probability; None reports nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require_between("temperature", self.temperature, 0.0, 2.0)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise BadRequest("top_p", f"must be a number in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise BadRequest("top_k", f"must be 0 (no limit) or positive, got {self.top_k}")
        if not 0 <= self.seed < 1 << SEED_BITS:
            raise BadRequest("seed", f"must be in [0, 2**{SEED_BITS}), got {self.seed}")
        _require_between("min_p", self.min_p, 0.0, 1.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise BadRequest("repetition_penalty", f"must be a number above 0, got {self.repetition_penalty}")
        _require_between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise BadRequest("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias:
            _require_between(f"logit_bias.{token_id}", bias, -100.0, 100.0)
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise BadRequest("top_logprobs", f"must be in [0, {MAX_TOP_LOGPROBS}], got {self.top_logprobs}")

    @property
    def has_penalties(self) -> bool:
        """The tokens so far change what is drawn next."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def for_choice(self, choice: int) -> SamplingParams:
        """How choice `choice` of a request is drawn: from a seed of its own, which for choice 0 is the request's."""
        return replace(self, seed=(self.seed + choice * CHOICE_STRIDE) % (1 << SEED_BITS)) if choice else self


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a generation ends. Until `min_tokens` are out, EOS and stop ids cannot be drawn and
    stop strings do not count."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise BadRequest("min_tokens", f"must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise BadRequest("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop_strings)}")
        if any(not text for text in self.stop_strings):
            raise BadRequest("stop", "a stop string must not be empty")


class GrammarKind(StrEnum):
    """How a grammar is written down."""

    JSON_SCHEMA = "json_schema"  # as JSON
    REGEX = "regex"  # Rust's syntax; matches the whole output
    LARK = "lark"  # llguidance's dialect, from a rule `start`
    GBNF = "gbnf"  # llama.cpp's, from a rule `root`


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match, in the form that the edge compiled once. Equal grammars have equal sources."""

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        if len(self.source) > MAX_GRAMMAR_CHARACTERS:
            raise BadRequest("grammar", f"{len(self.source)} characters exceed {MAX_GRAMMAR_CHARACTERS}")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and what to generate from it, as the router hands it to workers.

    `num_choices`: how many outputs to draw from the one prompt; `stop` and `sampling` hold for each
    (SamplingParams.for_choice).
    `prompt_logprobs`: how many alternatives to report beside each prompt token's log probability; None reports nothing.
    Such a prompt is computed, whatever is cached of it.
    `cache_salt` separates prefix caches: requests share cached blocks only when their salts are equal.
    `tenant` comes from authentication at the edge, never from a client's field.
    `priority`: lower goes first, as in vLLM, which clients know; above 0 is batch work, which gets what the rest leaves
    and is preempted first. What it is worth is bounded: engine/waiting_line.py.
    `session_id`: requests of one session of a tenant prefer the same workers; workers do not hear of it.
    `traceparent`: W3C's, of the span that what is done for the request belongs to; empty: nothing of it is traced.
    `adapter`: what is added to the model's weights for it, by name and content; None: the model as it is.
    `output_token_ids`: output that is out already; generation goes on after it, as if it had never been interrupted.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    num_choices: int = 1
    grammar: Grammar | None = None
    output_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    session_id: str = ""
    traceparent: str = ""
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        _require_between("n", self.num_choices, 1, MAX_CHOICES)
        if not self.prompt_token_ids:
            raise BadRequest("prompt", "must hold at least one token")
        _require_between("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.output_token_ids and self.num_choices != 1:
            raise BadRequest("output_token_ids", "only one choice can go on")
        if len(self.output_token_ids) >= self.stop.max_tokens:
            raise BadRequest("output_token_ids", f"max_tokens = {self.stop.max_tokens} leaves nothing to generate")
        if self.prompt_logprobs is not None:
            _require_between("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_given_tokens(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one choice of a request. `position` is the index of the first of them in the choice's output, so
    that whoever merges deltas from several workers emits each position exactly once."""

    request_id: str
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None  # the stop string that ended it
    message: str = ""  # why, when finish_reason is ERROR or DEAD_END
    usage: WorkUsage | None = None  # with the first delta of a worker
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where the request asks for them
    choice: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # with the first delta of all, where the request asks for them


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities for one output position: before bans, biases, penalties,
    temperature and filters. `top` holds (token id, logprob), best first; of equals the lower id comes first."""

    drawn: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The model's own log probabilities of a prompt's tokens, from the second on. Flat: there may be 100,000.

    ranks: how many tokens are at least as probable, itself included.
    top_ids, top_logprobs: of each token's `num_top` alternatives, best first, one token's after another's.
    """

    num_top: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def top(self, index: int) -> tuple[tuple[int, float], ...]:
        """(token id, log probability) of the alternatives of one token."""
        part = slice(index * self.num_top, (index + 1) * self.num_top)
        return tuple(zip(self.top_ids[part], self.top_logprobs[part], strict=True))


@dataclass(frozen=True, slots=True)
class WorkUsage:
    """What one worker did for a request before its first delta: what tests and logs read to see
    that nothing was silently recomputed."""

    cached_tokens: int = 0  # prompt tokens found in this worker's own prefix cache
    fetched_tokens: int = 0  # prompt tokens pushed here by a holder of the shared prefix
    computed_tokens: int = 0  # prompt tokens this worker computed
    kv_blocks_received: int = 0
    kv_bytes_received: int = 0


def _require_between(field: str, value: float, least: float, most: float) -> None:
    """Raises BadRequest; NaN is in no range."""
    if not least <= value <= most:
        raise BadRequest(field, f"must be a number in [{least:g}, {most:g}], got {value}")
