from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAIN_OUTCOME_UNSPECIFIED: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_DONE: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_UNCHANGED: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_UNKNOWN_WORKER: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_NOT_READY: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_BUSY: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_LAST_DECODE_WORKER: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_NOT_DRAINED: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_WORKER_LOST: _ClassVar[DrainOutcome]
DRAIN_OUTCOME_UNSPECIFIED: DrainOutcome
DRAIN_OUTCOME_DONE: DrainOutcome
DRAIN_OUTCOME_UNCHANGED: DrainOutcome
DRAIN_OUTCOME_UNKNOWN_WORKER: DrainOutcome
DRAIN_OUTCOME_NOT_READY: DrainOutcome
DRAIN_OUTCOME_BUSY: DrainOutcome
DRAIN_OUTCOME_LAST_DECODE_WORKER: DrainOutcome
DRAIN_OUTCOME_NOT_DRAINED: DrainOutcome
DRAIN_OUTCOME_WORKER_LOST: DrainOutcome

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "role", "force", "timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.Role
    force: bool
    timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., force: _Optional[bool] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("outcome", "message", "duration_s")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    outcome: DrainOutcome
    message: str
    duration_s: float
    def __init__(self, outcome: _Optional[_Union[DrainOutcome, str]] = ..., message: _Optional[str] = ..., duration_s: _Optional[float] = ...) -> None: ...
