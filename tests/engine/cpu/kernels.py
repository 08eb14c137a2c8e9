"""Calls of single kernels with torch tensors, for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from engine.cpu.build import FOR_THIS_MACHINE, PORTABLE, build_library, cpu_features
from engine.cpu.library import STORAGES, block_dtype
from engine.cpu.memory import HugeMemory
from engine.cpu.packing import PackedMatrix, interleave_halves, pack_matrix, pad_columns
from engine.quantisation import Matrix, QuantisedMatrix

SOURCE: Final = Path(__file__).parent / "kernels_under_test.cpp"
PAGE_TOKENS: Final = 16


def _lesser_targets() -> dict[str, tuple[str, ...]]:
    """Flags of each numeric class that this machine can compute, its own left out."""
    features = cpu_features().split()
    targets = {}
    if "avx512_bf16" in features:
        targets["without-bfloat16"] = (*FOR_THIS_MACHINE, "-mno-avx512bf16")
    if "avx512bw" in features:
        targets["avx2"] = ("-march=x86-64-v3",)
    return targets | {"portable": PORTABLE}


LESSER_TARGETS: Final = _lesser_targets()
TARGETS: Final = {"native": FOR_THIS_MACHINE} | LESSER_TARGETS


def units(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows in `dtype`, filled up with zeros to whole units of 4 bytes."""
    missing = -rows.shape[-1] % (4 // dtype.itemsize)
    return torch.nn.functional.pad(rows.to(dtype), (0, missing)).contiguous()


class Kernels:
    """The library of kernels_under_test.cpp, compiled for one target."""

    def __init__(self, target_flags: Sequence[str]) -> None:
        self._functions = ctypes.CDLL(str(build_library(SOURCE, target_flags)))
        self._functions.under_test_instruction_set.restype = ctypes.c_char_p
        self._functions.under_test_soften.restype = ctypes.c_float

    def multiply(self, left: torch.Tensor, matrix: Matrix, onto: torch.Tensor | None = None) -> torch.Tensor:
        """left @ matrix.T, [rows, outputs] float32, in left's dtype; added to `onto` where that is given."""
        rows, packed = units(left, left.dtype), self._packed(matrix, left.dtype)
        num_outputs, num_inputs = matrix.shape
        output = torch.full((len(left), pad_columns(num_outputs)), float("nan"))
        if onto is not None:
            output[:, :num_outputs] = onto
        arguments = (*_stored(packed), num_outputs, num_inputs, output, onto is not None)
        self._call("multiply", left.dtype, rows, len(left), *arguments)
        return output[:, :num_outputs]

    def swiglu(self, left: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
        """silu(left @ gate.T) * (left @ up.T), [rows, outputs] in left's dtype."""
        num_outputs, num_inputs = gate_up.shape[0] // 2, gate_up.shape[1]
        rows, packed = units(left, left.dtype), self._packed(interleave_halves(gate_up), left.dtype)
        output = torch.zeros(len(left), pad_columns(num_outputs), dtype=left.dtype)
        self._call("swiglu", left.dtype, rows, len(left), *_stored(packed), num_outputs, num_inputs, output)
        return output[:, :num_outputs]

    def block_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What blocks are unpacked to in a model of `dtype`."""
        return block_dtype(self._functions.under_test_instruction_set().decode(), dtype)

    def read_outputs(self, matrix: QuantisedMatrix, dtype: torch.dtype) -> torch.Tensor:
        """The matrix, [outputs, inputs] float32, as it is read back from its packed form."""
        packed, output = self._packed(matrix, dtype), torch.empty(matrix.shape)
        self._call("read_outputs", dtype, *_stored(packed), *matrix.shape, output)
        return output

    def soften(
        self, scores: torch.Tensor, num_visible: int, scale: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, float]:
        """Weights, [tokens] in `dtype`, and the inverse of their sum."""
        weights = torch.full((len(scores),), float("nan"), dtype=dtype)
        inverse = self._functions.under_test_soften(
            int(dtype == torch.bfloat16),
            ctypes.c_void_p(scores.data_ptr()),
            num_visible,
            len(scores) // PAGE_TOKENS,
            ctypes.c_float(scale),
            ctypes.c_void_p(weights.data_ptr()),
        )
        return weights, inverse

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: torch.Tensor, block_ids: list[int]
    ) -> torch.Tensor:
        """Causal attention of the last tokens, [rows, heads, head_dim] in and out; keys and values,
        [tokens, kv_heads, head_dim], are written into the pool's blocks first. All in one dtype."""
        num_rows, num_heads, head_dim = queries.shape
        num_tokens, num_kv_heads, _ = keys.shape
        group = num_heads // num_kv_heads
        blocks = torch.tensor(block_ids, dtype=torch.int32)
        self._call("write", keys.dtype, pool, num_kv_heads, head_dim, blocks, num_tokens, keys, values)
        grouped = queries.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1).contiguous()
        outputs = torch.empty_like(queries)
        self._call(
            "attend", keys.dtype, pool, num_kv_heads, head_dim, blocks, num_tokens, num_rows, group, grouped, outputs
        )
        return outputs

    def normalise(self, row: torch.Tensor, scale: torch.Tensor, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
        """RMSNorm of one float32 row, in `dtype`."""
        output = torch.empty(len(row), dtype=dtype)
        self._call("normalise", dtype, row, scale, len(row), ctypes.c_float(epsilon), output)
        return output

    def rotate(self, head: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """One rotated head, float32."""
        rotated = head.clone()
        self._functions.under_test_rotate(*(_argument(item) for item in (rotated, cosine, sine, len(head))))
        return rotated

    def greedy_choice(self, logits: torch.Tensor) -> int:
        """Lowest id of the largest logit; -1 where one is not finite."""
        readable = torch.nn.functional.pad(logits, (0, -len(logits) % PAGE_TOKENS), value=float("nan"))
        choice: int = self._functions.under_test_greedy_choice(_argument(readable), len(logits))
        return choice

    def exponential(self, values: torch.Tensor) -> torch.Tensor:
        """e^values, float32; a multiple of 16 of them."""
        output = torch.empty_like(values)
        self._functions.under_test_exponential(_argument(values), _argument(output), len(values))
        return output

    def _packed(self, matrix: Matrix, dtype: torch.dtype) -> PackedMatrix:
        """In memory of its own, which ends where the matrix ends."""
        num_outputs, num_inputs = matrix.shape
        memory = HugeMemory(pad_columns(num_outputs) * (num_inputs + 1) * 4)
        return pack_matrix(matrix, dtype, memory, self.block_dtype(dtype))

    def _call(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        function = getattr(self._functions, f"under_test_{name}")
        function(int(dtype == torch.bfloat16), *(_argument(argument) for argument in arguments))


def _argument(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    return int(argument) if isinstance(argument, bool) else argument


def _stored(packed: PackedMatrix) -> tuple[torch.Tensor, int]:
    return packed.data, STORAGES[packed.kind]
