"""A process that ends by an exception while its transport is inside NIXL; run by test_nixl.py."""

from __future__ import annotations

import asyncio

from transport_ends import Ends

NUM_BLOCKS = 256
BLOCK_BYTES = 720 << 10  # 189 MB a push: the post takes longer than the interpreter's end


async def main() -> None:
    ends = Ends("nixl")
    source, target = (ends.make(name, 1, NUM_BLOCKS, BLOCK_BYTES) for name in ("prefill-0", "decode-0"))
    await source.transport.connect(target.transport.describe())
    blocks = range(NUM_BLOCKS)
    pushes = [asyncio.create_task(source.transport.push(target.ref, blocks, blocks, b"")) for _ in range(8)]
    await asyncio.wait(pushes, return_when=asyncio.FIRST_COMPLETED)
    print("pushing", flush=True)
    raise RuntimeError("left in anger")


asyncio.run(main())
