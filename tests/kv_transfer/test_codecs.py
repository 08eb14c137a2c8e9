"""What goes over the wire comes out whole, or is refused."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from tandem.v1 import worker_pb2 as pb

from core.errors import BadRequest
from core.identity import Adapter, CacheIdentity
from core.membership import GivenWork, WorkerLoad, WorkerRef
from core.messages import StartGeneration, StepOutput, Turn
from core.request import (
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    PromptLogprobs,
    SamplingParams,
    StopConditions,
    TokenDelta,
    TokenLogprobs,
    WorkUsage,
)
from kv_transfer.membership_codec import decode_info, encode_info
from kv_transfer.pool import MemoryPool, PoolDescription
from kv_transfer.pool_codec import decode_pool, encode_pool
from kv_transfer.stream_codec import decode_answer, decode_command, encode_answer, encode_command
from tests.worker_info import worker_info

DESCRIPTION = PoolDescription(
    ref=WorkerRef("decode-0", "9f3a2c1d"),
    identity=CacheIdentity(1, "weights", "tokenizer", "float32", "layout", 16, 30, 3, 64, 2, "cpu-avx2"),
    transport="nixl",
    transport_version="1.5.1",
    pool=MemoryPool((0x7FFF_FFFF_F000, 0x7FFE_0000_0000), 4096, 720 << 10, memory_kind="VRAM", device_ids=(3, 4)),
    agent_metadata=bytes(range(256)),
)


def test_round_trip_through_bytes() -> None:
    sent = encode_pool(DESCRIPTION).SerializeToString()
    assert decode_pool(pb.PeerDescription.FromString(sent)) == DESCRIPTION


def test_every_field_is_on_the_wire() -> None:
    def names(message: type) -> set[str]:
        return {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]

    of_pool = {item.name for item in fields(MemoryPool)}
    assert names(pb.PeerDescription) == {item.name for item in fields(PoolDescription)} - {"pool"} | of_pool
    assert names(pb.CacheIdentity) == {item.name for item in fields(CacheIdentity)}


SAMPLING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    seed=2**63 - 1,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    logit_bias=((0, -100.0), (49_151, 0.1)),
    top_logprobs=0,
)
STOP = StopConditions(max_tokens=9, min_tokens=2, stop_token_ids=(7,), stop_strings=("\n", "END"), ignore_eos=True)
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, "{}")
REQUEST = GenerateRequest(
    "r1", (1, 2, 3), SAMPLING, STOP, "salt", "tenant", priority=-3, num_choices=4, grammar=GRAMMAR, prompt_logprobs=0
)
TURNS = (Turn("acme", True, 3, 70_000), Turn("", False, 1, 5))
DELTA = TokenDelta(
    request_id="r1",
    position=3,
    token_ids=(5, 6),
    finish_reason=FinishReason.STOP,
    matched_stop="END",
    message="why",
    usage=WorkUsage(1, 2, 3, 4, 5),
    logprobs=(TokenLogprobs(-0.1), TokenLogprobs(-2.5, ((6, -0.2), (0, -1.0 / 3.0)))),
    choice=3,
    prompt_logprobs=PromptLogprobs(1, (-0.1, -1.0 / 3.0), (2, 1), (7, 0), (-0.05, -1.0 / 3.0)),
)


def over_the_wire(request: GenerateRequest) -> GenerateRequest:
    payload = encode_command(StartGeneration(request)).SerializeToString()
    command = decode_command(pb.ConnectRequest.FromString(payload))
    assert isinstance(command, StartGeneration)
    return command.request


def test_requests_and_deltas_come_out_whole() -> None:
    assert all(getattr(SAMPLING, item.name) != item.default for item in fields(SamplingParams)), "a field is not tried"
    assert over_the_wire(REQUEST) == REQUEST
    adapted = replace(REQUEST, adapter=Adapter("poet", "d1"))
    assert over_the_wire(adapted) == adapted
    bare = replace(REQUEST, sampling=SamplingParams())
    assert over_the_wire(bare) == bare
    assert all(getattr(DELTA, item.name) != item.default for item in fields(TokenDelta)), "a field is not tried"
    answer = StepOutput((DELTA, TokenDelta("r2", 0, (1,))), WorkerLoad(), GivenWork(1, 2, 3, 4), turns=TURNS)
    for computing in (None, frozenset[str](), frozenset({"r1", "r2"})):
        said = replace(answer, computing=computing, in_line=("r3", "r4"))
        assert decode_answer(pb.ConnectResponse.FromString(encode_answer(said).SerializeToString())) == said


def test_a_worker_s_adapters_come_out_whole() -> None:
    adapters = frozenset({Adapter("poet", "d1"), Adapter("clerk", "d2")})
    info = worker_info(WorkerRef("d", "1"), metrics_address="h:2", nvlink_domain="nvl", adapters=adapters)
    assert decode_info(pb.WorkerInfo.FromString(encode_info(info).SerializeToString())) == info


def test_a_reason_of_a_later_revision_is_refused() -> None:
    answer = pb.ConnectResponse(refused=pb.Refused(request_id="r1", reason="on_fire"))
    with pytest.raises(BadRequest, match="on_fire"):
        decode_answer(answer)
