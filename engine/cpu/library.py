"""The compiled kernels as Python calls. The structs mirror kernels/model.h field by field.

ctypes releases the interpreter lock during a call, so transfers and streams go on while a step computes.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.cpu.packing import PackedAdapterLayer, PackedLayer, PackedLowRank, PackedMatrix, PackedWeights
from engine.model_config import ModelConfig
from engine.rope import rotary_tables

Int32Array = npt.NDArray[np.int32]


STORAGES: Final = {None: 0, "Q4_0": 1, "Q4_1": 2, "Q8_0": 3}  # kernels/model.h, TandemStorage


class _Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("storage", ctypes.c_int32)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", ctypes.c_void_p),
        ("qkv", _Matrix),
        ("output", _Matrix),
        ("feed_forward_norm", ctypes.c_void_p),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("qkv_bias", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
    ]


class _LowRank(ctypes.Structure):
    _fields_ = [("shrink", _Matrix), ("expand", _Matrix), ("rank", ctypes.c_int32)]


class _AdapterLayer(ctypes.Structure):
    _fields_ = [("qkv", _LowRank), ("output", _LowRank), ("gate_up", _LowRank), ("down", _LowRank)]


class _Model(ctypes.Structure):
    _fields_ = [
        ("is_bfloat16", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("max_context_tokens", ctypes.c_int32),
        ("rms_norm_eps", ctypes.c_float),
        ("embedding", _Matrix),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", ctypes.c_void_p),
        ("head", _Matrix),
        ("kv_pool", ctypes.c_void_p),
        ("num_adapters", ctypes.c_int32),
        ("adapter_layers", ctypes.POINTER(_AdapterLayer)),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("num_sequences", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("table_offsets", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("num_logit_rows", ctypes.c_int32),
        ("only_probes", ctypes.c_int32),
        ("logit_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("greedy_ids", ctypes.c_void_p),
    ]


def block_dtype(instruction_set: str, dtype: torch.dtype) -> torch.dtype:
    """What blocks are unpacked to in a model of `dtype`: float32 where nothing multiplies pairs of bfloat16."""
    return dtype if instruction_set.endswith("bf16") else torch.float32


class KernelLibrary:
    """A library that engine.cpu.build compiled."""

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))
        functions.tandem_instruction_set.restype = ctypes.c_char_p
        functions.tandem_create.argtypes = [ctypes.POINTER(_Model)]
        functions.tandem_create.restype = ctypes.c_void_p
        functions.tandem_destroy.argtypes = [ctypes.c_void_p]
        functions.tandem_destroy.restype = None
        functions.tandem_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Step)]
        functions.tandem_run.restype = ctypes.c_int
        self.functions = functions
        self.instruction_set: str = functions.tandem_instruction_set().decode()


class KernelEngine:
    """One model and KV pool in the kernels' hands. Keeps alive what they point to. One step at a time."""

    def __init__(
        self,
        library: KernelLibrary,
        config: ModelConfig,
        weights: PackedWeights,
        kv_pool: torch.Tensor,
        adapters: Sequence[Sequence[PackedAdapterLayer]],
    ) -> None:
        """Raises: MemoryError."""
        self._functions = library.functions
        cosines, sines = rotary_tables(config)
        self._kept = (weights, kv_pool, cosines, sines, adapters)
        adapter_layers = [_adapter_layer(layer) for adapter in adapters for layer in adapter]
        layers = (_Layer * config.num_layers)(*(_layer(layer) for layer in weights.layers))
        model = _Model(
            is_bfloat16=kv_pool.dtype == torch.bfloat16,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_context_tokens=config.max_context_tokens,
            rms_norm_eps=config.rms_norm_eps,
            embedding=_argument(weights.embedding),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            layers=layers,
            final_norm=weights.final_norm.data_ptr(),
            head=_argument(weights.head),
            kv_pool=kv_pool.data_ptr(),
            num_adapters=len(adapters),
            adapter_layers=(_AdapterLayer * len(adapter_layers))(*adapter_layers),
        )
        self._handle = self._functions.tandem_create(ctypes.byref(model))
        if not self._handle:
            raise MemoryError("no memory for the engine's activations")
        weakref.finalize(self, self._functions.tandem_destroy, self._handle)

    def run(
        self,
        token_ids: Int32Array,
        starts: Sequence[int],
        lengths: Sequence[int],
        table_lengths: Sequence[int],
        block_ids: Int32Array,
        adapters: Sequence[int],
        logit_rows: Sequence[int],
        logits: torch.Tensor,
        *,
        only_probes: bool,
    ) -> Int32Array:
        """Compute one step of checked slices, one after another (see TandemStep in kernels/model.h).

        Args:
            logits: [at least len(logit_rows), vocab_size padded to 64], float32; filled, unless `only_probes`.
        Returns: [len(logit_rows)], the best ids, or 0 if `only_probes`; -1 where a logit is not finite.
        Raises: MemoryError.
        """
        # One array: to make each of them costs more, between two steps with cold caches, than to fill it.
        table_offsets = list(accumulate(table_lengths, initial=0))
        parts = (starts, lengths, table_offsets, adapters, logit_rows, logit_rows)  # the last is room for the best ids
        numbers = np.fromiter(chain.from_iterable(parts), np.int32, sum(map(len, parts)))
        ends = accumulate(map(len, parts), initial=0)
        address = numbers.ctypes.data
        places = [address + numbers.itemsize * end for end in ends]
        step = _Step(
            num_sequences=len(starts),
            token_ids=token_ids.ctypes.data,
            starts=places[0],
            lengths=places[1],
            table_offsets=places[2],
            block_ids=block_ids.ctypes.data,
            adapters=places[3],
            num_logit_rows=len(logit_rows),
            only_probes=only_probes,
            logit_rows=places[4],
            logits=logits.data_ptr(),
            greedy_ids=places[5],
        )
        if self._functions.tandem_run(self._handle, ctypes.byref(step)):
            raise MemoryError("no memory for the step's activations")
        return numbers[len(numbers) - len(logit_rows) :]


def _layer(layer: PackedLayer) -> _Layer:
    fields = {field[0]: getattr(layer, field[0]) for field in _Layer._fields_}
    return _Layer(**{name: _argument(value) for name, value in fields.items() if value is not None})


def _adapter_layer(layer: PackedAdapterLayer) -> _AdapterLayer:
    return _AdapterLayer(*(map(_low_rank, (layer.qkv, layer.output, layer.gate_up, layer.down))))


def _low_rank(pair: PackedLowRank | None) -> _LowRank:
    if pair is None:
        return _LowRank()
    return _LowRank(_argument(pair.shrink), _argument(pair.expand), pair.rank)


def _argument(value: torch.Tensor | PackedMatrix) -> object:
    if isinstance(value, PackedMatrix):
        return _Matrix(value.data.data_ptr(), STORAGES[value.kind])
    return value.data_ptr()
