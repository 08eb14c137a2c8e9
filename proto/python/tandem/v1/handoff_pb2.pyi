from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffNotice(_message.Message):
    __slots__ = ("handoff_id", "generation", "pushed", "landed", "stop", "quiet", "renew", "push_prefix", "checksums")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    PUSH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    generation: int
    pushed: BlocksPushed
    landed: Landed
    stop: StopPushing
    quiet: Quiet
    renew: Renew
    push_prefix: PushPrefix
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handoff_id: _Optional[str] = ..., generation: _Optional[int] = ..., pushed: _Optional[_Union[BlocksPushed, _Mapping]] = ..., landed: _Optional[_Union[Landed, _Mapping]] = ..., stop: _Optional[_Union[StopPushing, _Mapping]] = ..., quiet: _Optional[_Union[Quiet, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., push_prefix: _Optional[_Union[PushPrefix, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksPushed(_message.Message):
    __slots__ = ("sequence", "first_block", "num_blocks", "num_pushes", "first_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    first_block: int
    num_blocks: int
    num_pushes: int
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_pushes: _Optional[int] = ..., first_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Landed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopPushing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Quiet(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushPrefix(_message.Message):
    __slots__ = ("block_hashes", "block_ids")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...
