"""Row-wise kernels in Triton's language. Called by engine/gpu/arithmetic.py only.

Each does in one launch what torch would do in four to seven. A row's result is a function of the row alone.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])  # else compiled anew for 1 and for multiples of 16
def norm_rows(rows, scale, output, num_rows, epsilon, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """RMSNorm of contiguous float32 rows, [num_rows, WIDTH]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    places = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    values = tl.load(rows + places, mask=mask, other=0.0)
    mean_square = tl.sum(values * values, 1) / WIDTH
    scales = tl.load(scale + column, mask=column < WIDTH, other=0.0)
    tl.store(output + places, values * tl.rsqrt(mean_square + epsilon)[:, None] * scales[None, :], mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def gate_rows(gated, output, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """silu(gate) * up of contiguous rows, gate before up, [num_rows, 2 * WIDTH]; computed in float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * PADDED + tl.arange(0, PADDED)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    gates = row.to(tl.int64)[:, None] * (2 * WIDTH) + column[None, :]
    gate = tl.load(gated + gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gated + gates + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    places = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(output + places, result.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def rotate_rows(
    heads,  # [num_tokens, num_heads, 2 * HALF], float32, strided
    cosine,  # [num_tokens, HALF], float32, contiguous; `sine` too
    sine,
    output,  # as heads, contiguous
    num_rows,  # tokens x heads
    num_heads,
    token_stride,
    head_stride,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotary positions, halves rotated."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    mask = (row < num_rows)[:, None] & (column < HALF)[None, :]
    token = (row // num_heads).to(tl.int64)
    sources = (token * token_stride + (row % num_heads) * head_stride)[:, None] + column[None, :]
    angles = token[:, None] * HALF + column[None, :]
    first = tl.load(heads + sources, mask=mask, other=0.0)
    second = tl.load(heads + sources + HALF, mask=mask, other=0.0)
    cosines = tl.load(cosine + angles, mask=mask, other=0.0)
    sines = tl.load(sine + angles, mask=mask, other=0.0)
    targets = row.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    tl.store(output + targets, first * cosines - second * sines, mask=mask)
    tl.store(output + targets + HALF, second * cosines + first * sines, mask=mask)
