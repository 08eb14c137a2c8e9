"""Many seeded schedules of hand-offs under faults, each to end with what a single engine says and every block back.

    python -m tests.simulation.soak --schedules 10000           on virtual time: whole clusters, every fourth with two
                                                                routers, and hand-offs alone; on all cores
    python -m tests.simulation.soak --real 1000 [--lane tcp]    over NIXL, in processes that are killed and frozen
    ... --plant free-before-drain                               the run must fail

A schedule that fails is named with the command that runs it again. On virtual time a seed is a run, to the last
event; between processes it is the same requests and faults, whose moments the machine shifts.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from router.policy.routing_policy import HedgePolicy, RoutingPolicy
from tests.simulation import cluster_world, handoff_world
from tests.simulation.planted_bugs import PLANTS
from tests.simulation.real_soak import soak
from tests.simulation.world_limits import LIMITED

NUM_REQUESTS = 25
NUM_HANDOFFS = 30
PRIORITIES = (0, 0, 1, -1, 5)
NUM_CHOICES = (1, 1, 3)
FAULTS = cluster_world.Faults(num_slow=2)
HEDGED = RoutingPolicy(hedge=HedgePolicy(after_s=1.0, times_predicted=1.5, max_share=0.2))
PART = 20  # schedules that one process walks at a time
SAY_EVERY_S = 10.0


def walk(seed: int) -> Counter[str]:
    """One schedule on virtual time. Raises what is wrong."""
    num_routers = 2 if seed % 4 == 3 else 1
    cluster = cluster_world.World(seed, FAULTS, PRIORITIES, NUM_CHOICES, num_routers, admission=LIMITED, routing=HEDGED)
    cluster.run(NUM_REQUESTS)
    handoffs = handoff_world.World(seed, handoff_world.Faults())
    handoffs.run(NUM_HANDOFFS)
    handoffs.check_over()
    seen = Counter({"hand-offs landed": handoffs.num_landed, "hand-offs aborted": handoffs.num_aborted})
    for client in cluster.clients:
        seen["requests finished"] += client.finished
        seen["clients that left"] += client.left
        seen["requests that failed"] += client.error is not None
    seen["preemptions"] = sum(host.scheduler.num_preemptions for host in cluster.hosts.values())
    seen["hedges"] = cluster.hedges["begun"]
    seen["deaths"] = len(cluster.deaths)
    return seen


def walk_all(seeds: Iterable[int]) -> Counter[str]:
    """Raises what is wrong with the first schedule that fails, and how to run it again."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += walk(seed)
        except BaseException as error:
            error.add_note(f"reproduce: python -m tests.simulation.soak --schedules 1 --first-seed {seed}")
            raise
    return seen


def walk_part(seeds: Iterable[int]) -> Counter[str] | str:
    """As walk_all; what is wrong, as text, which any process can read."""
    try:
        return walk_all(seeds)
    except Exception:
        return traceback.format_exc()


def walk_on_all_cores(seeds: range) -> Counter[str]:
    """As walk_all, with a line now and then; exits with what is wrong."""
    seen: Counter[str] = Counter()
    parts = [seeds[start : start + PART] for start in range(0, len(seeds), PART)]
    say_at_s = time.monotonic() + SAY_EVERY_S
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        for number, part in enumerate(pool.map(walk_part, parts), start=1):
            if isinstance(part, str):
                pool.shutdown(wait=False, cancel_futures=True)
                sys.exit(part)
            seen += part
            if time.monotonic() > say_at_s:
                say_at_s = time.monotonic() + SAY_EVERY_S
                print(f"  {min(number * PART, len(seeds))} schedules", flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=0, metavar="N", help="on virtual time")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="over NIXL")
    parser.add_argument("--lane", choices=("auto", "tcp"), default="auto", help="of --real; tcp: nothing else")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--plant", choices=PLANTS, help="a bug that the run must find")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    if arguments.schedules:
        if arguments.plant:
            PLANTS[arguments.plant](setattr)
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.schedules)
        report("on virtual time", len(seeds), walk_on_all_cores(seeds), started_s)
    if arguments.real:
        started_s, plant = time.monotonic(), arguments.plant or ""
        say = partial(print, flush=True)
        seen = asyncio.run(soak(arguments.first_seed, arguments.real, arguments.lane, plant, say))
        report(f"over NIXL ({arguments.lane})", arguments.real, seen, started_s)


def report(where: str, num_schedules: int, seen: Counter[str], started_s: float) -> None:
    facts = ", ".join(f"{count} {name}" for name, count in sorted(seen.items()))
    print(f"{num_schedules} schedules {where} in {time.monotonic() - started_s:.0f} s, none wrong: {facts}")


if __name__ == "__main__":
    sys.exit(main())
