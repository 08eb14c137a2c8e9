"""Random sequences of events for one scheduler, checked at every step.

    python -m tests.engine.scheduler_walk --walks 100000

A walk that breaks an invariant is printed with its seed; `--first SEED --walks 1` repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from core.request import FinishReason, GenerateRequest, SamplingParams, StopConditions
from engine.step import NOT_FINITE
from tests.engine.scheduler_bench import BLOCK_SIZE, Bench
from tests.engine.token_memory import undisturbed
from tests.engine.token_tiers import TokenTiers

SAMPLED = SamplingParams(1.0, seed=11)
CHUNK = 500  # walks between two lines of progress


def request(name: str, prompt, num_choices: int = 4, max_tokens: int = 8, **more) -> GenerateRequest:
    stop = StopConditions(max_tokens=max_tokens)
    return GenerateRequest(name, tuple(prompt), SAMPLED, stop, num_choices=num_choices, **more)


def singles(wanted: GenerateRequest, eos: tuple[int, ...] = ()) -> dict[str, list[int]]:
    """What one request for each choice, with the seed of that choice, says alone."""
    seeds = [wanted.sampling.for_choice(choice).seed for choice in range(wanted.num_choices)]
    return {
        f"{wanted.request_id}/{choice}" if choice else wanted.request_id: undisturbed(
            wanted.prompt_token_ids, wanted.stop.max_tokens, eos, seed
        )
        for choice, seed in enumerate(seeds)
    }


def land(bench: Bench, wanted: GenerateRequest, num_damaged: int = 0) -> bool:
    """A peer writes the KV of what is known, the last blocks of it damaged, and draws each choice's next token. False:
    there is no room for it."""
    sequence = bench.scheduler.new_sequence(wanted)
    bench.scheduler.await_room(sequence)
    taken = bench.scheduler.reserve_next()
    if taken is None:
        bench.scheduler.end_reservation(sequence)
        return False
    table, known = [*taken.hits, *taken.fresh], sequence.tokens
    num_intact = max(len(taken.hits), len(table) - num_damaged)
    for position in range(len(taken.hits) * BLOCK_SIZE, len(known)):
        damage = 500 if position // BLOCK_SIZE >= num_intact else 0
        bench.memory.slots[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = known[position] + damage
    first_tokens = [tokens[len(wanted.output_token_ids)] for tokens in singles(wanted).values()]
    for name, token in zip(singles(wanted), first_tokens, strict=True):
        bench.outputs[name].append(token)
    bench.scheduler.add_landed(sequence, table, first_tokens, num_intact)
    return True


def cut(bench: Bench, wanted: GenerateRequest, rng: random.Random) -> GenerateRequest:
    """The same request, with a part of its output out already, as when another worker has begun it."""
    out = singles(wanted)[wanted.request_id][: rng.randrange(wanted.stop.max_tokens)]
    bench.outputs[wanted.request_id] += out
    return replace(wanted, output_token_ids=tuple(out))


def walk(seed: int) -> Bench:
    """Random arrivals of one or several choices, shared prefixes, hand-offs whole and damaged, output that is out
    already, batch work, cancels in and between steps, tokens that come to a NaN, pools too small for all, every other
    time with tiers below, whose disk is slow and rots: every choice says what it says alone, and every block comes
    back."""
    rng, nan_rng, tier_rng = random.Random(seed), random.Random(f"nan {seed}"), random.Random(f"tiers {seed}")
    tiers = TokenTiers(tier_rng.choice([2, 4, 8]), tier_rng.choice([0, 10, 40, 40])) if seed % 2 else None
    if tiers is not None:
        tiers.copies_per_step = tier_rng.choice([1, 2, 4, 1000])
    growth_blocks = rng.randrange(2)
    bench = Bench(
        rng.randrange(14, 30),
        rng.choice([1, 2, 5, 16, 64]),
        rng.choice([1, 3, 64]),
        growth_blocks=growth_blocks,
        prefill_delay_steps=rng.choice([0, 0, 3]),
        tiers=tiers,
    )
    shared = tuple(rng.randrange(1000) for _ in range(12))
    wanted = []
    for number in range(rng.randrange(1, 8)):
        prompt = shared[: rng.randrange(13)] + tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 15)))
        max_tokens = rng.randrange(1, 24)
        wanted.append(request(f"r{number}", prompt, rng.choice([1, 2, 5]), max_tokens, priority=rng.choice([0, 0, 1])))
    if tiers is not None:  # what was computed once is asked for again, when others have had its blocks
        again = [replace(item, request_id=f"{item.request_id}+{turn}") for turn in range(3) for item in wanted]
        wanted += tier_rng.sample(again, len(again))
    waiting, ended = list(wanted), set()
    bounded, num_copies = False, 0
    for _ in range(3000):
        if waiting and rng.random() < 0.3:
            bounded = bounded and bool(bench.scheduler._running)
            item = waiting.pop()
            if item.num_choices == 1 and rng.random() < 0.3:
                item = cut(bench, item, rng)
            if rng.random() < 0.7 or not land(bench, item, rng.choice([0, 0, 1, 2])):
                bench.add(item)
        if tiers is not None:
            trouble(tiers, tier_rng)
        if tiers is not None and bounded:  # others ran all the time since the last plan
            assert tiers.num_copies - num_copies <= tiers.copies_per_step
        bounded, num_copies = bool(bench.scheduler._running), tiers.num_copies if tiers else 0
        plan = bench.scheduler.plan()
        if rng.random() < 0.05:
            name = rng.choice(wanted).request_id
            if bench.scheduler.cancel(name):
                ended.add(name)
        if plan is not None:
            answers = bench.memory.run(plan)
            if nan_rng.random() < 0.01:
                broken = nan_rng.randrange(len(answers))
                answers[broken] = (NOT_FINITE,) * len(answers[broken])
            for progress in bench.take(bench.scheduler.commit(plan, answers)):
                if any(delta.finish_reason is FinishReason.ERROR for delta in progress.deltas):
                    bench.scheduler.cancel(progress.request_id)  # as the router does: the other choices end too
                    ended.add(progress.request_id)
        elif not waiting and not (tiers and tiers.io()):
            break
    bench.assert_empty()
    assert bench.pool.num_free == bench.pool.num_blocks
    for item in wanted:
        for name, alone in singles(item).items():
            said = bench.outputs[name]
            assert said == (alone[: len(said)] if item.request_id in ended else alone)
    return bench


def trouble(tiers: TokenTiers, rng: random.Random) -> None:
    """A part of a read or write, and now and then damage."""
    if rng.random() < 0.8:
        tiers.io()
    if rng.random() < 0.05:
        tiers.rot(rng)
    tiers.check()


def walk_all(seeds: range) -> Counter[str]:
    """What happened in the walks. Raises: the first broken invariant, with its seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            bench = walk(seed)
        except BaseException as error:
            error.add_note(f"repeat: python -m tests.engine.scheduler_walk --first {seed} --walks 1")
            raise
        seen["walks"] += 1
        seen["steps"] += bench.scheduler.num_steps
        seen["preemptions"] += bench.scheduler.num_preemptions
        seen["copied blocks"] += bench.memory.copied_blocks
        seen["NaNs"] += FinishReason.ERROR in bench.finished.values()
        for tier, num_blocks in bench.pool.hit_blocks.items():
            seen[f"{tier} hits"] += num_blocks
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(default: %(default)s)")
    options = parser.parse_args()
    end = options.first + options.walks
    chunks = [range(first, min(first + CHUNK, end)) for first in range(options.first, end, CHUNK)]
    seen: Counter[str] = Counter()
    started_s = time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        for found in pool.map(walk_all, chunks):
            seen += found
            print(f"[{time.monotonic() - started_s:6.0f} s] {dict(seen)}", flush=True)
    print("no invariant broken")


if __name__ == "__main__":
    main()
