"""Compiles the Triton kernel for GPUs that need not be there. Run with TRITON_INTERPRET=0."""

from __future__ import annotations

import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.paged_kernel import paged_attention

POINTERS = {
    "queries": "*fp32",
    "output": "*fp32",
    "block_tables": "*i32",
    "query_starts": "*i32",
    "context_lens": "*i32",
    "scale": "fp32",
}
DTYPES = {"*fp32": tl.float32, "*bf16": tl.bfloat16}


def compile_for(capability: int, pool: str, tile_rows: int) -> int:
    """Bytes of machine code for the default model's heads."""
    constants = {
        "GROUP": 3,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": 64,
        "PADDED_DIM": 64,
        "TILE_QUERIES": tile_rows // 3,
        "TILE_ROWS": tile_rows,
        "TILE_KEYS": 64,
        "OPERAND": DTYPES[pool],
    }
    types = {**POINTERS, "keys": pool, "values": pool, **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "i32") for name in paged_attention.arg_names}
    source = ASTSource(paged_attention, signature, constexprs=constants)
    return len(compile_kernel(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])


if __name__ == "__main__":
    for case in ((80, "*bf16", 16), (90, "*bf16", 16), (90, "*bf16", 64), (90, "*fp32", 16), (100, "*bf16", 64)):
        print(*case, compile_for(*case))
