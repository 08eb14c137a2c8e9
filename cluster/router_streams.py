"""The worker's side of its routers' streams: which router owns which request, and what goes to whom."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from core.membership import WorkerLoad
from core.messages import Answer, Refused, Reserved, StepOutput
from core.request import TokenDelta


class RouterStream:
    """One router's open stream: its outbox, and the requests that came over it."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.outbox: asyncio.Queue[Answer | None] = asyncio.Queue()  # None: the router says nothing more
        self.requests: set[str] = set()


class RouterStreams:
    """All open streams of one worker."""

    def __init__(self) -> None:
        self._streams: set[RouterStream] = set()
        self._owner: dict[str, RouterStream] = {}

    def open(self, router_id: str) -> RouterStream:
        stream = RouterStream(router_id)
        self._streams.add(stream)
        return stream

    def close(self, stream: RouterStream) -> list[str]:
        """Forget a stream; returns the requests that nobody waits for any more."""
        self._streams.discard(stream)
        for request_id in stream.requests:
            self._owner.pop(request_id, None)
        return sorted(stream.requests)

    def own(self, stream: RouterStream, request_id: str) -> None:
        """Answers about this request go to this stream."""
        self._owner[request_id] = stream
        stream.requests.add(request_id)

    def owns(self, request_id: str) -> bool:
        """Some router still waits for this request."""
        return request_id in self._owner

    def disown(self, request_id: str) -> None:
        """Nothing more will be said of this request. Unknown ids are ignored."""
        stream = self._owner.pop(request_id, None)
        if stream is not None:
            stream.requests.discard(request_id)

    def send(self, answer: Answer) -> None:
        """To the request's owner, or to all when it is about no request."""
        match answer:
            case Reserved(request_id):
                self._put(request_id, answer)
            case Refused(request_id):
                self._put(request_id, answer)
                self.disown(request_id)
            case _:
                for stream in self._streams:
                    stream.outbox.put_nowait(answer)

    def step(self, deltas: Iterable[TokenDelta], load: WorkerLoad) -> None:
        """One message to each stream: its requests' new tokens, and the load."""
        shares: defaultdict[RouterStream, list[TokenDelta]] = defaultdict(list)
        for delta in deltas:
            owner = self._owner.get(delta.request_id)
            if owner is not None:
                shares[owner].append(delta)
        for stream in self._streams:
            stream.outbox.put_nowait(StepOutput(tuple(shares.get(stream, ())), load))

    def _put(self, request_id: str, answer: Answer) -> None:
        owner = self._owner.get(request_id)
        if owner is not None:
            owner.outbox.put_nowait(answer)
