"""What a grammar costs: compiling it, one mask, and applying masks to a batch.

    python -m bench.grammar [--rows 16]

The text is what a model would say; each of its tokens costs a mask and a push. Times are of one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import fmean

import torch

from cluster.folders import default_model_folder
from core.request import Grammar, GrammarKind, SamplingParams
from engine.gguf_import import import_default_model
from engine.grammar import GrammarCompiler
from engine.sampler import sample
from engine.step import SampleSpec
from engine.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CASES = {
    "json_object": (
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        '{"a": [1, 2.5, {"b": "some words"}], "c": null}',
    ),
    "schema": (
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
        '{"name": "Ada Lovelace", "age": 36, "tags": ["red"]}',
    ),
    "regex": (Grammar(GrammarKind.REGEX, r"[a-z.]{3,40}@[a-z]+\.(com|org)"), "ada.lovelace@example.org"),
    "choice": (Grammar(GrammarKind.REGEX, "|".join(f"choice number {n}" for n in range(1000))), "choice number 777"),
    "lark": (Grammar(GrammarKind.LARK, 'start: sum\nsum: INT (("+" | "-") sum)?\nINT: /[0-9]+/'), "12+345-6+7890"),
}


def best_of(runs: int, work: Callable[[], object]) -> float:
    """Shortest time, in seconds: the box is shared."""
    times = []
    for _ in range(runs):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="batch of the last table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(import_default_model(default_model_folder(), print))
    start_s = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    print(f"vocabulary of {tokenizer.vocab_size}: {time.perf_counter() - start_s:.2f} s")
    for name, (grammar, text) in CASES.items():
        compile_s = best_of(3, lambda grammar=grammar: compiler._compile(grammar))  # past the cache
        masks_s, pushes_s = walk(compiler, grammar, tokenizer.encode(text))
        print(
            f"{name:12} compile {compile_s * 1e3:7.2f} ms  mask mean {fmean(masks_s) * 1e6:6.1f} us"
            f"  max {max(masks_s) * 1e6:6.1f} us  push mean {fmean(pushes_s) * 1e6:5.1f} us  ({len(masks_s)} tokens)"
        )
    logits = torch.randn((arguments.rows, tokenizer.vocab_size), generator=torch.Generator().manual_seed(0))
    plain = SampleSpec(SamplingParams(temperature=0.0, logit_bias=((0, -1.0),)), 0)
    matchers = [compiler.matcher(CASES["json_object"][0]) for _row in range(arguments.rows)]
    bound = [SampleSpec(plain.sampling, 0, grammar=matcher) for matcher in matchers]
    without_s = best_of(20, lambda: sample(logits, [plain] * arguments.rows))
    with_s = best_of(20, lambda: sample(logits, bound))
    print(
        f"greedy sampling of {arguments.rows} rows: {without_s * 1e3:.2f} ms; under grammars {with_s * 1e3:.2f} ms:"
        f" {(with_s - without_s) / arguments.rows * 1e6:.0f} us a row more"
    )


def walk(compiler: GrammarCompiler, grammar: Grammar, token_ids: list[int]) -> tuple[list[float], list[float]]:
    """Seconds of each mask and of each push along a text. Raises: AssertionError: the grammar does not allow it."""
    masks_s, pushes_s = [], []
    matcher = compiler.matcher(grammar)
    for token_id in token_ids:
        start_s = time.perf_counter()
        mask = matcher.mask()
        masked_s = time.perf_counter()
        matcher.push(token_id)
        pushes_s.append(time.perf_counter() - masked_s)
        masks_s.append(masked_s - start_s)
        assert isinstance(mask, bytes), mask
    assert isinstance(matcher.mask(), bytes), "not allowed by the grammar"
    return masks_s, pushes_s


if __name__ == "__main__":
    main()
