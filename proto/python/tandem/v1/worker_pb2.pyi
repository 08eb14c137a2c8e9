from tandem.v1 import logprobs_pb2 as _logprobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("ref", "role", "address", "identity_digest", "block_size", "block_bytes", "num_blocks", "max_context_tokens", "metrics_address", "nvlink_domain", "adapters", "num_tier_blocks")
    REF_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NVLINK_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ref: WorkerRef
    role: Role
    address: str
    identity_digest: bytes
    block_size: int
    block_bytes: int
    num_blocks: int
    max_context_tokens: int
    metrics_address: str
    nvlink_domain: str
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    num_tier_blocks: int
    def __init__(self, ref: _Optional[_Union[WorkerRef, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., identity_digest: _Optional[bytes] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., metrics_address: _Optional[str] = ..., nvlink_domain: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., num_tier_blocks: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("waiting_requests", "running_requests", "waiting_tokens", "free_blocks", "used_blocks", "quarantined_blocks")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    free_blocks: int
    used_blocks: int
    quarantined_blocks: int
    def __init__(self, waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "start", "reserve", "prefill", "cancel", "peer_joined", "peer_dead", "resync_cache", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PEER_JOINED_FIELD_NUMBER: _ClassVar[int]
    PEER_DEAD_FIELD_NUMBER: _ClassVar[int]
    RESYNC_CACHE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    start: StartGeneration
    reserve: ReserveBlocks
    prefill: StartPrefill
    cancel: CancelRequest
    peer_joined: PeerJoined
    peer_dead: PeerDead
    resync_cache: ResyncCache
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., start: _Optional[_Union[StartGeneration, _Mapping]] = ..., reserve: _Optional[_Union[ReserveBlocks, _Mapping]] = ..., prefill: _Optional[_Union[StartPrefill, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., peer_joined: _Optional[_Union[PeerJoined, _Mapping]] = ..., peer_dead: _Optional[_Union[PeerDead, _Mapping]] = ..., resync_cache: _Optional[_Union[ResyncCache, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "worker")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    worker: WorkerRef
    def __init__(self, router_id: _Optional[str] = ..., worker: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class WorkerRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "stop_token_ids", "stop_strings", "ignore_eos", "cache_salt", "tenant", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "top_logprobs", "priority", "num_choices", "grammar", "output_token_ids", "prompt_logprobs", "traceparent", "adapter")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    cache_salt: str
    tenant: str
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    top_logprobs: int
    priority: int
    num_choices: int
    grammar: Grammar
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    traceparent: str
    adapter: Adapter
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., top_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., num_choices: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., traceparent: _Optional[str] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class StartGeneration(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: WorkerRequest
    def __init__(self, request: _Optional[_Union[WorkerRequest, _Mapping]] = ...) -> None: ...

class ReserveBlocks(_message.Message):
    __slots__ = ("request", "handoff_id", "source")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request: WorkerRequest
    handoff_id: str
    source: WorkerRef
    def __init__(self, request: _Optional[_Union[WorkerRequest, _Mapping]] = ..., handoff_id: _Optional[str] = ..., source: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class StartPrefill(_message.Message):
    __slots__ = ("request", "ticket")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request: WorkerRequest
    ticket: HandoffTicket
    def __init__(self, request: _Optional[_Union[WorkerRequest, _Mapping]] = ..., ticket: _Optional[_Union[HandoffTicket, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class PeerJoined(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class PeerDead(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class ResyncCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandoffTicket(_message.Message):
    __slots__ = ("handoff_id", "target", "generation", "first_block", "block_ids")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    target: WorkerRef
    generation: int
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handoff_id: _Optional[str] = ..., target: _Optional[_Union[WorkerRef, _Mapping]] = ..., generation: _Optional[int] = ..., first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("step", "reserved", "refused", "peer_connected", "draining", "serving")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PEER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    step: StepOutput
    reserved: Reserved
    refused: Refused
    peer_connected: PeerConnected
    draining: Draining
    serving: Serving
    def __init__(self, step: _Optional[_Union[StepOutput, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., peer_connected: _Optional[_Union[PeerConnected, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., serving: _Optional[_Union[Serving, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("deltas", "load", "others", "cache", "turns", "computing", "in_line")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    IN_LINE_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    load: WorkerLoad
    others: GivenWork
    cache: CacheEvents
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    computing: Prompts
    in_line: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., others: _Optional[_Union[GivenWork, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., computing: _Optional[_Union[Prompts, _Mapping]] = ..., in_line: _Optional[_Iterable[str]] = ...) -> None: ...

class Prompts(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("tenant", "batch", "num_choices", "prompt_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    batch: bool
    num_choices: int
    prompt_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., batch: _Optional[bool] = ..., num_choices: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class GivenWork(_message.Message):
    __slots__ = ("num_requests", "num_tokens", "prompt_tokens", "unplaced_tokens")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNPLACED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_tokens: int
    prompt_tokens: int
    unplaced_tokens: int
    def __init__(self, num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., unplaced_tokens: _Optional[int] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("sequence", "stored", "evicted", "reset", "host", "disk")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: bytes
    evicted: bytes
    reset: bool
    host: bytes
    disk: bytes
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[bytes] = ..., evicted: _Optional[bytes] = ..., reset: _Optional[bool] = ..., host: _Optional[bytes] = ..., disk: _Optional[bytes] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "position", "token_ids", "finish_reason", "matched_stop", "message", "usage", "logprobs", "choice", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    matched_stop: str
    message: str
    usage: WorkUsage
    logprobs: _containers.RepeatedCompositeFieldContainer[_logprobs_pb2.TokenLogprobs]
    choice: int
    prompt_logprobs: _logprobs_pb2.PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., matched_stop: _Optional[str] = ..., message: _Optional[str] = ..., usage: _Optional[_Union[WorkUsage, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_logprobs_pb2.TokenLogprobs, _Mapping]]] = ..., choice: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_logprobs_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class WorkUsage(_message.Message):
    __slots__ = ("cached_tokens", "fetched_tokens", "computed_tokens", "kv_blocks_received", "kv_bytes_received")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    kv_blocks_received: int
    kv_bytes_received: int
    def __init__(self, cached_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., kv_blocks_received: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ticket: HandoffTicket
    def __init__(self, request_id: _Optional[str] = ..., ticket: _Optional[_Union[HandoffTicket, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "reason", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PeerConnected(_message.Message):
    __slots__ = ("peer", "lane", "probe_gbps")
    PEER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    PROBE_GBPS_FIELD_NUMBER: _ClassVar[int]
    peer: WorkerRef
    lane: str
    probe_gbps: float
    def __init__(self, peer: _Optional[_Union[WorkerRef, _Mapping]] = ..., lane: _Optional[str] = ..., probe_gbps: _Optional[float] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("finish_s", "unbegun_request_ids")
    FINISH_S_FIELD_NUMBER: _ClassVar[int]
    UNBEGUN_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    finish_s: float
    unbegun_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, finish_s: _Optional[float] = ..., unbegun_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Serving(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    def __init__(self, role: _Optional[_Union[Role, str]] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: PeerDescription
    def __init__(self, peer: _Optional[_Union[PeerDescription, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: PeerDescription
    def __init__(self, peer: _Optional[_Union[PeerDescription, _Mapping]] = ...) -> None: ...

class PeerDescription(_message.Message):
    __slots__ = ("ref", "identity", "transport", "transport_version", "block_bytes", "num_blocks", "memory_kind", "agent_metadata", "base_addresses", "device_ids")
    REF_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    ref: WorkerRef
    identity: CacheIdentity
    transport: str
    transport_version: str
    block_bytes: int
    num_blocks: int
    memory_kind: str
    agent_metadata: bytes
    base_addresses: _containers.RepeatedScalarFieldContainer[int]
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ref: _Optional[_Union[WorkerRef, _Mapping]] = ..., identity: _Optional[_Union[CacheIdentity, _Mapping]] = ..., transport: _Optional[str] = ..., transport_version: _Optional[str] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., memory_kind: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., base_addresses: _Optional[_Iterable[int]] = ..., device_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheIdentity(_message.Message):
    __slots__ = ("schema_revision", "weights_digest", "tokenizer_digest", "kv_dtype", "kv_layout", "block_size", "num_layers", "num_kv_heads", "head_dim", "tensor_parallel_size", "numeric_class")
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    schema_revision: int
    weights_digest: str
    tokenizer_digest: str
    kv_dtype: str
    kv_layout: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int
    numeric_class: str
    def __init__(self, schema_revision: _Optional[int] = ..., weights_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., numeric_class: _Optional[str] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("worker", "load")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    load: WorkerLoad
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportDeathRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class ReportDeathResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("workers", "open_requests", "queued_requests", "router_id")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    open_requests: int
    queued_requests: int
    router_id: str
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., open_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., router_id: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "life", "load", "peers")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    life: str
    load: WorkerLoad
    peers: _containers.RepeatedCompositeFieldContainer[PeerConnected]
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., life: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerConnected, _Mapping]]] = ...) -> None: ...
