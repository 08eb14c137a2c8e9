"""How the scheduler fills a step, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from core.errors import BadRequest
from engine.step_pace import OFF

_LEAST: Final = {
    "token_budget": 1,
    "max_sequences": 1,
    "ageing_steps": 1,
    "growth_blocks": 0,
    "scan_depth": 0,
    "max_overtakes": 0,
    "prefill_delay_steps": 0,
    "max_scored_tokens": 1,
}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """token_budget: most tokens one step computes. max_sequences: most sequences in one step.

    ageing_steps: what one step of priority is worth, in engine steps of waiting: seconds for 1, minutes for 100.
    growth_blocks: most blocks that an admission leaves free for each sequence that runs or is about to; 0 leaves none.
    scan_depth: how many are tried behind a head that finds no room. max_overtakes: how often it may be overtaken.
    prefill_delay_steps: how many engine steps at most a prompt waits for others to be computed with, while there are
        decodes to compute and too few prompt tokens to fill the budget; 0 waits for nobody. Fewer steps then carry
        prompts, which pays where such a step costs more than its tokens (as SGLang's prefill delayer and TensorRT-LLM's
        batch_wait_timeout_iters have it). On our CPU kernels it does not.
    max_decode_slowdown: how many times longer than its decodes alone a step may take for the prompts that share it
        (engine/step_pace.py); its OFF: no bound but the budget.
    max_scored_tokens: most tokens of a step that belong to prompts to be scored: each needs a row of logits in memory.
    """

    token_budget: int = 256
    max_sequences: int = 256
    ageing_steps: int = 100
    growth_blocks: int = 1
    scan_depth: int = 8
    max_overtakes: int = 16
    prefill_delay_steps: int = 0
    max_scored_tokens: int = 64
    max_decode_slowdown: float = OFF

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise BadRequest(name, f"must be at least {least}, got {getattr(self, name)}")
        if not self.max_decode_slowdown > 1.0:
            raise BadRequest("max_decode_slowdown", f"must be a number above 1, got {self.max_decode_slowdown}")
