"""The shared path by itself: text, stop strings, usage, and one row for every error."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from front_fakes import MODEL, ByteTokenizer, ScriptedDispatcher, check_grammar, says

from core.errors import BadRequest, Rejected, RejectReason
from core.request import FinishReason, GenerateRequest, Placement, TokenDelta, WorkUsage
from router.admission.policy import AdmissionPolicy, DegradePolicy
from router.front.caller import Caller
from router.front.errors import edge_error, renamed
from router.front.generation import Front, TextDelta
from router.front.intake import INLINE_CHARACTERS, Draft, Intake
from router.front.meter import Endpoint
from router.front.usage import UsageSum
from telemetry.router_metrics import RouterMetrics

DRAFT = Draft(prompt="hi", model="tiny", request_id="r")


async def collect(front: Front, draft: Draft) -> list[TextDelta]:
    request = await front.prepare(draft, Caller())
    with front.meter(Endpoint.GRPC, draft.request_id) as meter:
        return [delta async for delta in front.generate(request, Placement.AUTO, meter)]


def in_one_delta(text: str, finish_reason: FinishReason | None) -> Any:
    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(request.request_id, 0, tuple(text.encode()), finish_reason)
        if finish_reason is None:
            yield TokenDelta(request.request_id, len(text.encode()), (256,), FinishReason.STOP)

    return script


async def test_a_stop_string_inside_one_delta(front: Front, dispatcher: ScriptedDispatcher) -> None:
    """Ends there by itself: no token after a stop string belongs to the answer."""
    dispatcher.script = in_one_delta("abSTOPcd", None)
    deltas = await collect(front, replace(DRAFT, stop_strings=("STOP",)))
    assert [(delta.text, delta.finish_reason, delta.matched_stop) for delta in deltas] == [("ab", "stop", "STOP")]
    assert dispatcher.closed.is_set()


async def test_the_earliest_of_several_stop_strings_wins(front: Front, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says("one two three", matched_stop="two")
    deltas = await collect(front, replace(DRAFT, stop_strings=("three", "two")))
    assert ("".join(delta.text for delta in deltas), deltas[-1].matched_stop) == ("one ", "two")


async def test_a_choice_that_a_stop_string_ended_says_nothing_more(
    front: Front, dispatcher: ScriptedDispatcher
) -> None:
    """Whatever a worker still sends of it; the others go on."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for position, (first, second) in enumerate(zip(b"aSTOPbc", b"1234567", strict=True)):
            yield TokenDelta(request.request_id, position, (first,))
            finish = FinishReason.LENGTH if position == 6 else None
            yield TokenDelta(request.request_id, position, (second,), finish, choice=1)

    dispatcher.script = script
    deltas = await collect(front, replace(DRAFT, stop_strings=("STOP",), num_choices=2))
    assert ["".join(delta.text for delta in deltas if delta.choice == choice) for choice in (0, 1)] == ["a", "1234567"]
    assert [(delta.choice, delta.finish_reason, delta.last) for delta in deltas if delta.finish_reason] == [
        (0, "stop", False),
        (1, "length", True),
    ]
    assert deltas[-1].usage.completion_tokens == 5 + 7


async def test_latencies_are_those_of_each_choice(dispatcher: ScriptedDispatcher, metrics: RouterMetrics) -> None:
    """Three tokens a second for each of two choices are no six tokens a second."""
    now_s = [100.0]
    front = Front(dispatcher, ByteTokenizer(), MODEL, metrics, check_grammar, clock=lambda: now_s[0])

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for position in range(3):
            now_s[0] += 1.0
            for choice in (0, 1):
                finish = FinishReason.LENGTH if position == 2 else None
                yield TokenDelta(request.request_id, position, (97,), finish, choice=choice)

    dispatcher.script = script
    await collect(front, replace(DRAFT, num_choices=2))
    value = metrics.registry.get_sample_value
    labels = {"model_name": "tiny"}
    assert value("vllm:time_to_first_token_seconds_sum", labels) == value("tandem_ttft_seconds_count") == 1.0
    assert value("vllm:inter_token_latency_seconds_count", labels) == 4.0
    assert value("vllm:inter_token_latency_seconds_sum", labels) == 4.0
    assert (value("tandem_tpot_seconds_count"), value("tandem_tpot_seconds_sum")) == (2.0, 2.0)
    assert value("vllm:request_generation_tokens_sum", labels) == 6.0


@pytest.mark.parametrize("whole", [False, True])
async def test_stop_strings_do_not_count_before_min_tokens(
    front: Front, dispatcher: ScriptedDispatcher, whole: bool
) -> None:
    dispatcher.script = in_one_delta("ab;cd;", FinishReason.STOP) if whole else says("ab;cd;", matched_stop=";")
    deltas = await collect(front, replace(DRAFT, stop_strings=(";",), min_tokens=5))
    assert ("".join(delta.text for delta in deltas), deltas[-1].matched_stop) == ("ab;cd", ";")


async def test_a_stop_string_counts_as_soon_as_min_tokens_are_out(front: Front, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = says("ab;", matched_stop=";")
    deltas = await collect(front, replace(DRAFT, stop_strings=(";",), min_tokens=3))
    assert ("".join(delta.text for delta in deltas), deltas[-1].matched_stop) == ("ab", ";")


async def test_a_seed_that_was_not_given_is_drawn_once(front: Front) -> None:
    seeds = {(await front.prepare(DRAFT, Caller())).sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert (await front.prepare(replace(DRAFT, seed=0), Caller())).sampling.seed == 0


async def test_a_prompt_that_just_fits(front: Front) -> None:
    room = MODEL.max_context_tokens
    assert (await front.prepare(replace(DRAFT, prompt="x" * (room - 1)), Caller())).stop.max_tokens == 1
    assert (await front.prepare(replace(DRAFT, prompt="xx", max_tokens=room - 2), Caller())).stop.max_tokens == room - 2
    with pytest.raises(BadRequest, match="prompt: 64 tokens"):
        await front.prepare(replace(DRAFT, prompt="x" * room), Caller())


async def test_a_long_prompt_is_tokenised_off_the_loop() -> None:
    threads: list[int] = []

    class Watched(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            threads.append(threading.get_ident())
            return super().encode(text)[:1]

    intake = Intake(Watched(), MODEL, check_grammar)
    await intake.prepare(replace(DRAFT, prompt="x" * INLINE_CHARACTERS))
    await intake.prepare(replace(DRAFT, prompt="x" * (INLINE_CHARACTERS + 1)))
    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()


@pytest.mark.parametrize(
    ("works", "cached_tokens"),
    [
        ([], 0),
        ([WorkUsage(cached_tokens=16)], 16),
        ([WorkUsage(cached_tokens=32, computed_tokens=68)], 32),
        ([WorkUsage(fetched_tokens=48, computed_tokens=52)], 48),
        # Both sides of a hand-off held the prefix: it was saved once.
        ([WorkUsage(cached_tokens=32, computed_tokens=68), WorkUsage(cached_tokens=32, kv_blocks_received=5)], 32),
        # Only the decode side held it: the prefill side computed it all the same.
        ([WorkUsage(computed_tokens=100), WorkUsage(cached_tokens=32)], 0),
        # Migrated: the second worker computed everything again.
        ([WorkUsage(cached_tokens=50, computed_tokens=50), WorkUsage(computed_tokens=100)], 0),
    ],
)
def test_cached_tokens_are_what_no_worker_computed(works: list[WorkUsage], cached_tokens: int) -> None:
    usage = UsageSum(prompt_tokens=100)
    for work in works:
        usage.add(1, work)
    total = usage.total()
    assert (total.cached_tokens, total.completion_tokens) == (cached_tokens, len(works))
    assert total.computed_tokens == sum(work.computed_tokens for work in works)


def test_every_reject_reason_has_a_row() -> None:
    for reason in RejectReason:
        seen = edge_error(Rejected(reason, "why"))
        assert (seen.http_status, seen.grpc_status) in {
            (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (503, grpc.StatusCode.UNAVAILABLE),
        }
        assert seen.code == reason
        assert seen.retry_after_s is not None


def test_a_renamed_field_keeps_its_path() -> None:
    error = renamed(BadRequest("prompt.0.role", "wrong", "code"), {"prompt": "messages"})
    assert (error.field, error.message, error.code) == ("messages.0.role", "wrong", "code")
    assert renamed(BadRequest("seed", "wrong"), {"prompt": "messages"}).field == "seed"


async def test_another_model_answers_under_a_name_while_the_policy_says_so(front: Front) -> None:
    asked = replace(DRAFT, model="tiny-poet")
    assert (await front.prepare(asked, Caller())).adapter is not None
    front.apply(AdmissionPolicy(degrade=DegradePolicy(smaller_model={"tiny-poet": "tiny"})))
    assert (await front.prepare(asked, Caller())).adapter is None
    for asked_name, answers in (("tiny-poet", "gpt"), ("gpt", "tiny")):
        policy = AdmissionPolicy(degrade=DegradePolicy(smaller_model={asked_name: answers}))
        with pytest.raises(BadRequest, match=f"smaller_model.{asked_name}.*'gpt' is not served"):
            front.apply(policy)
    assert (await front.prepare(asked, Caller())).adapter is None  # the wrong ones changed nothing
    front.apply(AdmissionPolicy())
    assert (await front.prepare(asked, Caller())).adapter is not None
