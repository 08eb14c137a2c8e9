"""Compiles the Triton kernels for GPUs that need not be there. Run with TRITON_INTERPRET=0."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.paged_kernel import paged_attention
from engine.gpu.row_kernels import gate_rows, norm_rows, rotate_rows

FLOATS = dict.fromkeys(("queries", "output", "rows", "heads", "cosine", "sine"), "*fp32") | {"epsilon": "fp32"}
POINTERS = {"block_tables": "*i32", "query_starts": "*i32", "context_lens": "*i32"}
DTYPES = {"*fp32": tl.float32, "*bf16": tl.bfloat16}


def attention(pool: str, tile_rows: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Kernel, types and constants, for the default model's heads."""
    constants = {"GROUP": 3, "BLOCK_SIZE": 16, "HEAD_DIM": 64, "PADDED_DIM": 64, "TILE_QUERIES": tile_rows // 3}
    constants |= {"TILE_ROWS": tile_rows, "TILE_KEYS": 64, "OPERAND": DTYPES[pool]}
    return paged_attention, {"keys": pool, "values": pool, "scale": "fp32"}, constants


CASES: dict[str, tuple[int, tuple[Any, dict[str, str], dict[str, Any]]]] = {
    "decode, 8.0": (80, attention("*bf16", 16)),
    "decode, 9.0": (90, attention("*bf16", 16)),
    "prefill, 9.0": (90, attention("*bf16", 64)),
    "float32 decode, 9.0": (90, attention("*fp32", 16)),
    "prefill, 10.0": (100, attention("*bf16", 64)),
    "norm": (90, (norm_rows, {"scale": "*fp32"}, {"WIDTH": 576, "PADDED": 1024, "ROWS": 4})),
    "gate": (90, (gate_rows, {"gated": "*bf16", "output": "*bf16"}, {"WIDTH": 1536, "PADDED": 1024, "ROWS": 4})),
    "rotation": (90, (rotate_rows, {}, {"HALF": 32, "PADDED": 32, "ROWS": 4})),
}


def compile_for(capability: int, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> int:
    """Bytes of machine code."""
    known = FLOATS | POINTERS | types | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    return len(compile_kernel(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])


if __name__ == "__main__":
    for name, (capability, case) in CASES.items():
        print(name, compile_for(capability, *case))
