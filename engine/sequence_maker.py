"""What becomes of a request before it is scheduled: a sequence that knows its limits, its cache and what is out."""

from __future__ import annotations

from collections.abc import Collection

from core.errors import BadRequest
from core.identity import Adapter, namespace
from core.request import GenerateRequest
from engine.sequence import MatcherFactory, ModelLimits, Sequence, StopWatch, StopWatchFactory
from engine.step import GrammarMatcher


class SequenceMaker:
    """capacity_tokens: what the KV pool holds. ageing_steps: as in SchedulerConfig. adapters: those that are loaded."""

    def __init__(
        self,
        limits: ModelLimits,
        capacity_tokens: int,
        ageing_steps: int,
        identity_digest: bytes,
        make_watch: StopWatchFactory,
        make_matcher: MatcherFactory,
        adapters: Collection[Adapter] = (),
    ) -> None:
        self._limits = limits
        self._capacity_tokens = capacity_tokens
        self._ageing_steps = ageing_steps
        self._identity_digest = identity_digest
        self._make_watch = make_watch
        self._make_matcher = make_matcher
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._num_made = 0

    def make(self, request: GenerateRequest, step: int, *, prefill_only: bool) -> Sequence:
        """A sequence that came when `step` steps had been planned.

        Raises: BadRequest: not even one choice can ever fit; several need not fit together, some are then preempted.
            Or its grammar is not one, or its adapter is not loaded here with the same content.
        """
        self._require_adapter(request.adapter)
        self._require_fitting(request, prefill_only)
        self._num_made += 1
        return Sequence(
            request=request,
            limits=self._limits,
            namespace=namespace(self._identity_digest, request.tenant, request.cache_salt, request.adapter),
            prefill_only=prefill_only,
            watch=self._watch_of(request),
            tokens=[*request.prompt_token_ids, *request.output_token_ids],
            num_choices=request.num_choices,
            sampling=request.sampling,
            scoring=request.prompt_logprobs is not None and not request.output_token_ids,  # else they are out
            arrived_step=step,
            grammar=self._matcher_of(request),
            due_step=step + request.priority * self._ageing_steps,
            number=self._num_made,
        )

    def _require_fitting(self, request: GenerateRequest, prefill_only: bool) -> None:
        given = request.num_given_tokens
        most_tokens = given + 1 if prefill_only else request.num_prompt_tokens + request.stop.max_tokens
        if given >= self._limits.max_context_tokens:
            raise BadRequest("prompt", f"{given} tokens leave no room in the context")
        if min(most_tokens, self._limits.max_context_tokens) > self._capacity_tokens:
            message = f"{most_tokens} tokens never fit into a KV pool of {self._capacity_tokens}"
            raise BadRequest("max_tokens", message)

    def _require_adapter(self, adapter: Adapter | None) -> None:
        if adapter is None:
            return
        ours = self._adapters.get(adapter.name)
        if ours is None:
            raise BadRequest("adapter.name", f"{adapter.name!r} is not loaded on this worker")
        if ours.digest != adapter.digest:
            message = f"{adapter.name!r} has other content on this worker: ours {ours.digest}, theirs {adapter.digest}"
            raise BadRequest("adapter.digest", message)

    def _matcher_of(self, request: GenerateRequest) -> GrammarMatcher | None:
        """One that stands behind what is out already."""
        if request.grammar is None:
            return None
        matcher = self._make_matcher(request.grammar)
        for token_id in request.output_token_ids:
            matcher.push(token_id)
        return matcher

    def _watch_of(self, request: GenerateRequest) -> StopWatch | None:
        """One that has seen what is out already."""
        if not request.stop.stop_strings:
            return None
        watch = self._make_watch(request)
        for token_id in request.output_token_ids:
            watch.push(token_id)
        return watch
