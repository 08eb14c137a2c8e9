"""The worker's side of its routers' streams: which router owns which request, and what goes to whom.

A router has one stream at a time. One that greets anew, because it lost us, wants nothing more of what came over its
earlier stream, which we may not know to be broken yet.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from cluster.worker.cache_feed import NO_NEWS, CacheFeed, packed
from core.membership import NOTHING_GIVEN, GivenWork, WorkerLoad
from core.messages import (
    Answer,
    CacheEvents,
    Refused,
    ReserveBlocks,
    Reserved,
    StartGeneration,
    StartPrefill,
    StepOutput,
    Turn,
)
from core.request import TokenDelta
from engine.block_pool import BlockPool
from engine.cache_changes import CacheChanges

MAX_UNREAD: Final = 1024  # messages: a router that leaves so many unread is told of the cache again when it reads
MAX_UNWRITTEN: Final = 4  # of the latest steps: a router that is further behind is not waited for


class RouterStream:
    """One router's open stream: its outbox, the requests that came over it, and what it knows of the cache.

    unsaid: of its prompts, those of which it does not know that they wait in line. computing: those in the latest step.
    """

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.outbox: asyncio.Queue[Answer | None] = asyncio.Queue()  # None: nothing more is said
        self.requests: dict[str, GivenWork] = {}
        self.work = NOTHING_GIVEN  # all of them
        self.feed = CacheFeed()
        self.unsaid: dict[str, None] = {}
        self.computing: frozenset[str] = frozenset()
        self.turns: deque[Turn] = deque(maxlen=MAX_UNREAD)  # at other routers, that it is to be told of


class RouterStreams:
    """All open streams of one worker, whose cache `pool` is. is_in_line: a prompt waits for steps, or is in one."""

    def __init__(self, pool: BlockPool, is_in_line: Callable[[str], bool]) -> None:
        self._pool = pool
        self._is_in_line = is_in_line
        self._streams: set[RouterStream] = set()
        self._owner: dict[str, RouterStream] = {}
        self._work = NOTHING_GIVEN

    def open(self, router_id: str) -> tuple[RouterStream, list[str]]:
        """A new stream, and the requests of the router's earlier one, which nobody waits for any more."""
        earlier = [stream for stream in self._streams if stream.router_id == router_id]
        orphans = [request_id for stream in earlier for request_id in self.close(stream)]
        stream = RouterStream(router_id)
        self._streams.add(stream)
        return stream, orphans

    def is_open(self, stream: RouterStream) -> bool:
        return stream in self._streams

    def close(self, stream: RouterStream) -> list[str]:
        """Forget a stream; returns the requests that nobody waits for any more. Harmless when it is closed."""
        self._streams.discard(stream)
        stream.outbox.put_nowait(None)
        orphans = sorted(stream.requests)
        for request_id in orphans:
            self.disown(request_id)
        return orphans

    def own(self, stream: RouterStream, command: StartGeneration | ReserveBlocks | StartPrefill) -> None:
        """Answers about this request go to this stream."""
        request = command.request
        num_tokens = request.num_given_tokens
        work = GivenWork(
            1,
            num_tokens,
            prompt_tokens=0 if isinstance(command, ReserveBlocks) else num_tokens,
            unplaced_tokens=0 if isinstance(command, StartPrefill) else num_tokens,
        )
        self._owner[request.request_id] = stream
        self._count(stream, request.request_id, work)
        if not isinstance(command, ReserveBlocks):
            stream.unsaid[request.request_id] = None
        if not isinstance(command, StartPrefill) and not request.output_token_ids:  # once, where it is decoded
            turn = Turn(request.tenant, request.priority > 0, request.num_choices, request.num_prompt_tokens)
            for other in self._streams - {stream}:
                other.turns.append(turn)

    def owns(self, request_id: str) -> bool:
        """Some router still waits for this request."""
        return request_id in self._owner

    def disown(self, request_id: str) -> None:
        """Nothing more will be said of this request. Unknown ids are ignored."""
        stream = self._owner.pop(request_id, None)
        if stream is not None:
            self._count(stream, request_id, NOTHING_GIVEN)
            del stream.requests[request_id]
            stream.unsaid.pop(request_id, None)

    def send(self, answer: Answer) -> None:
        """To the request's owner, or to all when it is about no request."""
        match answer:
            case Reserved(request_id):
                self._put(request_id, answer)
                self._placed(request_id)
            case Refused(request_id):
                self._put(request_id, answer)
                self.disown(request_id)
            case _:
                for stream in self._streams:
                    stream.outbox.put_nowait(answer)

    @property
    def behind(self) -> bool:
        """Some router does not know all of the cache yet, or of its prompts' place: a step would tell it more."""
        return any(stream.feed.behind or any(map(self._is_in_line, stream.unsaid)) for stream in self._streams)

    def step(self, deltas: Iterable[TokenDelta], load: WorkerLoad, changes: CacheChanges) -> None:
        """One message to each stream: its requests' new tokens, the load, what others have given, and the cache's
        changes since the last step, which are encoded once."""
        shares: defaultdict[RouterStream, list[TokenDelta]] = defaultdict(list)
        for delta in deltas:
            owner = self._owner.get(delta.request_id)
            if owner is not None:
                shares[owner].append(delta)
                work = owner.requests[delta.request_id]
                if work.prompt_tokens or work.unplaced_tokens:  # its first token is here
                    self._count(owner, delta.request_id, GivenWork(1, work.num_tokens))
        news = packed(changes)
        for stream in self._streams:
            cache = None
            if stream.outbox.qsize() < MAX_UNREAD:
                cache = stream.feed.next(news, self._pool)
            elif news != NO_NEWS:
                stream.feed.begin_again()
            self._tell(stream, tuple(shares.get(stream, ())), load, cache)

    def computes(self, request_ids: Iterable[str], load: Callable[[], WorkerLoad]) -> list[RouterStream]:
        """Tell each router which of its prompts the next step computes, where that is news. Returns: those that are
        told of some which the step before did not compute, and that keep up with what they are told."""
        shares: defaultdict[RouterStream, set[str]] = defaultdict(set)
        for request_id in request_ids:
            owner = self._owner.get(request_id)
            if owner is not None:
                shares[owner].add(request_id)
        told = []
        for stream in self._streams:
            before, stream.computing = stream.computing, frozenset(shares.get(stream, ()))
            begins = not stream.computing <= before
            left_out = (stream.requests.get(request_id, NOTHING_GIVEN) for request_id in before - stream.computing)
            if begins or any(work.prompt_tokens for work in left_out):
                self._tell(stream, (), load(), None)
            if begins and stream.outbox.qsize() <= MAX_UNWRITTEN:
                told.append(stream)
        return told

    def _tell(
        self, stream: RouterStream, deltas: tuple[TokenDelta, ...], load: WorkerLoad, cache: CacheEvents | None
    ) -> None:
        in_line = tuple(filter(self._is_in_line, stream.unsaid))
        for request_id in in_line:
            del stream.unsaid[request_id]
        turns = tuple(stream.turns)
        stream.turns.clear()
        others = self._work - stream.work
        stream.outbox.put_nowait(StepOutput(deltas, load, others, cache, turns, stream.computing, in_line))

    def _placed(self, request_id: str) -> None:
        owner = self._owner.get(request_id)
        if owner is not None:
            self._count(owner, request_id, replace(owner.requests[request_id], unplaced_tokens=0))

    def _count(self, stream: RouterStream, request_id: str, work: GivenWork) -> None:
        change = work - stream.requests.get(request_id, NOTHING_GIVEN)
        stream.requests[request_id] = work
        stream.work += change
        self._work += change

    def _put(self, request_id: str, answer: Answer) -> None:
        owner = self._owner.get(request_id)
        if owner is not None:
            owner.outbox.put_nowait(answer)
