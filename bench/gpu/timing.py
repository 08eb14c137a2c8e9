"""How fast, beside what the device allows: copies, products, decode and prefill steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from bench.gpu.machine import BLOCK_SIZE, Machine
from core.request import SamplingParams
from engine.dtypes import DTYPES
from engine.gpu.device import Device
from engine.gpu.runner import GpuModelRunner
from engine.gpu.step_layout import lay_out
from engine.step import SampleSpec, SequenceSlice, StepPlan

WARM_UPS: Final = 2
MOST_KERNELS: Final = 16
GREEDY: Final = SampleSpec(SamplingParams(temperature=0.0), 0)


def median_s(device: Device, action: Callable[[], object], rounds: int) -> float:
    """Median wall seconds of an action and of all that it queues, after WARM_UPS that are not counted."""
    seconds = []
    for index in range(rounds + WARM_UPS):
        device.finish()
        start_s = time.perf_counter()
        with device.stream():
            action()
        device.finish()
        if index >= WARM_UPS:
            seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


class Floors:
    """The least seconds that a step can take on this device, from rates measured on it. Weights are as they are stored:
    the head is float32 in either dtype."""

    def __init__(self, machine: Machine, dtype: str, num_mib: int, matrix_size: int) -> None:
        device, place = machine.device, machine.device.torch_device
        config, torch_dtype = machine.config, DTYPES[dtype]
        values = torch.randn(num_mib << 18, device=place)
        target = torch.empty_like(values)
        copy_s = median_s(device, lambda: target.copy_(values), 5)
        self.copied_bytes_per_s = 2 * values.nbytes / copy_s  # read and written
        square = torch.randn(matrix_size, matrix_size, device=place).to(torch_dtype)
        self.flops_per_s = 2 * matrix_size**3 / median_s(device, lambda: square @ square, 5)
        kv_size, query_size = config.num_kv_heads * config.head_dim, config.num_heads * config.head_dim
        layer = config.hidden_size * (2 * query_size + 2 * kv_size + 3 * config.intermediate_size)
        self._layer_values = config.num_layers * layer
        self._head_values = config.vocab_size * config.hidden_size
        self._attention_flops = 4 * query_size * config.num_layers  # for each token of context
        self._kv_bytes = 2 * kv_size * config.num_layers * torch_dtype.itemsize
        self._weight_bytes = self._layer_values * torch_dtype.itemsize + self._head_values * 4

    def prefill_s(self, num_tokens: int) -> float:
        flops = num_tokens * (2 * self._layer_values + self._attention_flops * num_tokens / 2) + 2 * self._head_values
        return max(flops / self.flops_per_s, self._weight_bytes / self.copied_bytes_per_s)

    def decode_s(self, batch: int, context: int) -> float:
        flops = 2 * batch * (self._layer_values + self._head_values)
        weights_s = max(self._weight_bytes / self.copied_bytes_per_s, flops / self.flops_per_s)
        return weights_s + batch * context * self._kv_bytes / self.copied_bytes_per_s


MeasuredFloors = Callable[[], Floors]  # measured when first asked for, inside a section of the report


def floor_figures(floors: MeasuredFloors) -> dict[str, Any]:
    return {"copy_gb_per_s": floors().copied_bytes_per_s / 1e9, "matmul_tflops": floors().flops_per_s / 1e12}


def time_decode(
    machine: Machine,
    floors: MeasuredFloors,
    dtype: str,
    exact: bool,
    batches: tuple[int, ...],
    context: int,
    rounds: int,
) -> dict[str, Any]:
    """Seconds of a decode step: by graph and eager through `run`, and of a graph alone, many replays in a queue."""
    by_graph, eager = (machine.runner(dtype, exact, graphs) for graphs in (True, False))
    with machine.device.stream():
        for runner in (by_graph, eager):
            runner.kv_pool.normal_()  # zeros would be faster than real values
    figures: dict[str, Any] = {}
    for batch in batches:
        plan, floor_s = decode_plan(batch, context), floors().decode_s(batch, context)
        graph_s, eager_s = (median_s(machine.device, partial(runner.run, plan), rounds) for runner in (by_graph, eager))
        figures[str(batch)] = {
            "graph_ms": 1e3 * graph_s,
            "eager_ms": 1e3 * eager_s,
            "replay_ms": 1e3 * replay_s(machine, by_graph, plan, rounds),
            "floor_ms": 1e3 * floor_s,
            "tokens_per_s": batch / graph_s,
            "share_of_floor": floor_s / graph_s,
        }
    return figures


def replay_s(machine: Machine, runner: GpuModelRunner, plan: StepPlan, rounds: int) -> float:
    """Of a step's uploads and kernels, `rounds` of them in a queue: the host does not wait between them."""
    layout = lay_out(plan.slices, BLOCK_SIZE, machine.num_blocks, runner.graph_sizes)

    def queue() -> None:
        with torch.inference_mode():
            for _ in range(rounds):
                runner.graphs.replay(layout)

    return median_s(machine.device, queue, 3) / rounds


def time_prefill(
    machine: Machine, floors: MeasuredFloors, dtype: str, exact: bool, lengths: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    """Seconds of one step that computes a whole prompt."""
    figures: dict[str, Any] = {}
    runner = machine.runner(dtype, exact)
    for length in lengths:
        plan = prefill_plan(length, machine.config.vocab_size)
        seconds = median_s(machine.device, partial(runner.run, plan), rounds)
        figures[str(length)] = {
            "ms": 1e3 * seconds,
            "floor_ms": 1e3 * floors().prefill_s(length),
            "tokens_per_s": length / seconds,
            "share_of_floor": floors().prefill_s(length) / seconds,
        }
    return figures


def profile_steps(machine: Machine, batch: int, num_tokens: int) -> dict[str, Any]:
    """Where an eager bfloat16 decode and prefill spend their time: kernels that take most, [count, microseconds]."""
    runner = machine.runner("bfloat16", graphs=False)
    kinds = [torch.profiler.ProfilerActivity.CUDA if machine.is_gpu else torch.profiler.ProfilerActivity.CPU]
    figures: dict[str, Any] = {}
    for name, plan in (
        ("decode", decode_plan(batch, 4 * BLOCK_SIZE)),
        ("prefill", prefill_plan(num_tokens, machine.config.vocab_size)),
    ):
        with torch.profiler.profile(activities=kinds) as profile:
            runner.run(plan)
        spent = [
            (event.self_device_time_total if machine.is_gpu else event.self_cpu_time_total, event.count, event.key[:80])
            for event in profile.key_averages()
        ]
        figures[name] = {key: [count, time_us] for time_us, count, key in sorted(spent, reverse=True)[:MOST_KERNELS]}
        figures[f"{name}_kernels"] = sum(count for _, count, _ in spent)
    return figures


def time_host_copies(machine: Machine, num_blocks: int, rounds: int) -> dict[str, Any]:
    """KV blocks to pinned host memory and back, in one piece: what a tier in host memory could reach."""
    blocks = machine.runner("bfloat16").kv_pool[:num_blocks]
    host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=machine.is_gpu)
    to_host_s = median_s(machine.device, lambda: host.copy_(blocks, non_blocking=True), rounds)
    to_device_s = median_s(machine.device, lambda: blocks.copy_(host, non_blocking=True), rounds)
    return {"to_host_gb_per_s": host.nbytes / to_host_s / 1e9, "to_device_gb_per_s": host.nbytes / to_device_s / 1e9}


def prefill_plan(num_tokens: int, vocab_size: int) -> StepPlan:
    """A whole prompt in one step."""
    tokens = tuple(3 + 37 * index % (vocab_size - 3) for index in range(num_tokens))
    return StepPlan((SequenceSlice("prompt", tokens, 0, tuple(range(-(-num_tokens // BLOCK_SIZE))), (GREEDY,)),))


def decode_plan(batch: int, context: int) -> StepPlan:
    """One token for each of `batch` sequences, whose blocks lie scattered."""
    blocks_each = -(-context // BLOCK_SIZE)
    blocks = torch.randperm(batch * blocks_each, generator=torch.Generator().manual_seed(0)).view(batch, -1).tolist()
    return StepPlan(
        tuple(SequenceSlice(str(row), (5 + row,), context - 1, tuple(blocks[row]), (GREEDY,)) for row in range(batch))
    )
