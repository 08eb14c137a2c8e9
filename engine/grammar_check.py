"""A process that compiles grammars from anyone, so that one that is too much for the compiler ends this process alone:
the library's compiler recurses without a bound and may compute for minutes (docs/adr/0012).

A request is a line of JSON on standard input, [kind, source]; the answer a line on standard output: null, or what is
wrong. It ends with its input. What it accepts, workers compile in a thread with twice its stack.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Final

from core.errors import BadRequest
from core.request import Grammar, GrammarKind
from engine.grammar import GrammarCompiler, lark_of
from engine.step import DeadEnd
from engine.tokenizer import Tokenizer

STACK_BYTES: Final = 4 << 20
GROWTH_BYTES: Final = 512 << 20  # of address space, beyond what is there once the vocabulary is loaded
CHECK_CPU_S: Final = 5  # the kernel ends the process then, also when nobody waits for the answer any more
COMPILE_CPU_S: Final = 0.5
# Of a GBNF, in Python, which is quadratic in its rules; unlike the compiler it keeps a worker's steps from running.
READ_CPU_S: Final = 0.1
FIRST_MASK_CPU_S: Final = 0.1


def check(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    """What is wrong with a grammar: it does not compile, or not within its bounds, or allows no first token."""
    start_s = time.thread_time()
    try:
        if grammar.kind is GrammarKind.GBNF:
            lark_of(grammar.source)
            if time.thread_time() - start_s > READ_CPU_S:
                return f"is too complex: it takes more than {READ_CPU_S} s to read"
        matcher = compiler.matcher(grammar)
    except BadRequest as error:
        return error.message
    compiled_s = time.thread_time()
    if compiled_s - start_s > COMPILE_CPU_S:
        return f"is too complex: it takes more than {COMPILE_CPU_S} s to compile"
    mask = matcher.mask()
    if isinstance(mask, DeadEnd):
        return f"allows no output: {mask.message}"
    if time.thread_time() - compiled_s > FIRST_MASK_CPU_S:
        return f"is too complex: it takes more than {FIRST_MASK_CPU_S} s to find the tokens that may come first"
    return None


def _serve(compiler: GrammarCompiler) -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CHECK_CPU_S, hard))
        kind, source = json.loads(line)
        print(json.dumps(check(compiler, Grammar(GrammarKind(kind), source))), flush=True)


def main(folder: Path, vocab_size: int) -> None:
    """Load the tokenizer of a model folder, then answer until the input ends."""
    compiler = GrammarCompiler(Tokenizer.load(folder), vocab_size)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + GROWTH_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve, args=(compiler,))
    server.start()
    server.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
