"""Any values in any fields of a gRPC request are served or refused by a field's name; nothing is an error of ours."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import grpc
from front_fakes import ScriptedDispatcher
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tandem.v1 import inference_pb2, inference_pb2_grpc
from test_openai_attacks import speak

NUM_REQUESTS = 150
ODD: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 0.5, 1.0, 1e308, -1e308],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 16, 20, 256, 2**31, 2**32 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_SINT32: [0, -1, 100, -100, 2**31 - 1, -(2**31)],
    FieldDescriptor.TYPE_BOOL: [True, False],
    FieldDescriptor.TYPE_ENUM: [0, 1, 2, 3, -1, 2**31 - 1],
    FieldDescriptor.TYPE_STRING: ["", "tiny", "user", "hi", "\u0000", "é" * 20, "x" * 300, "{}", "a*", "wrong"],
}


def fill(message: Message, rng: random.Random, chance: float) -> None:
    """Some of its fields, and of theirs."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() >= chance:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[rng.choice([0, 5, 256, 2**32 - 1])] = rng.choice(ODD[field.TYPE_DOUBLE])
        elif field.type == field.TYPE_MESSAGE and field.is_repeated:
            for _ in range(rng.randrange(3)):
                fill(getattr(message, field.name).add(), rng, 0.8)
        elif field.type == field.TYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), rng, chance)
        elif field.is_repeated:
            getattr(message, field.name).extend(rng.choices(ODD[field.type], k=rng.randrange(4)))
        else:
            setattr(message, field.name, rng.choice(ODD[field.type]))


def spelled(field: str, request: inference_pb2.GenerateRequest) -> bool:
    """Whether the caller could have written a field of this path."""
    descriptor, parts = request.DESCRIPTOR, [part for part in field.split(".") if not part.isdigit()]
    for part in parts:
        if descriptor is None or (part not in descriptor.fields_by_name and part not in descriptor.oneofs_by_name):
            return False
        found = descriptor.fields_by_name.get(part)
        descriptor = None if found is None else found.message_type
    return True


async def test_any_values_are_served_or_refused_by_name(
    channel: grpc.aio.Channel, dispatcher: ScriptedDispatcher
) -> None:
    dispatcher.script = speak
    rng, seen = random.Random(3), Counter[str]()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    for _ in range(NUM_REQUESTS):
        request = inference_pb2.GenerateRequest(text="hi")
        fill(request, rng, rng.choice([0.05, 0.1, 0.3]))
        try:
            assert [item async for item in stub.Generate(request, timeout=10)]
            seen["served"] += 1
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (error.code(), details, request)
            assert spelled(details.partition(": ")[0], request), (details, request)
            seen["refused"] += 1
    assert min(seen["served"], seen["refused"]) > NUM_REQUESTS / 10, seen
