from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescriptorUpdate(_message.Message):
    __slots__ = ("service_name", "version", "canary_weight", "weights", "schema_hash", "compatible_schema_hashes", "engine", "endpoints", "clear_endpoints", "zone", "signature", "update_id", "expected_table_version", "plan", "models", "by", "subscribe", "front", "engine_model", "chat_template")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SignatureEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CANARY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBLE_SCHEMA_HASHES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    CLEAR_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    service_name: str
    version: str
    canary_weight: float
    weights: _containers.ScalarMap[str, float]
    schema_hash: str
    compatible_schema_hashes: _containers.RepeatedScalarFieldContainer[str]
    engine: str
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    clear_endpoints: bool
    zone: str
    signature: _containers.ScalarMap[str, str]
    update_id: str
    expected_table_version: int
    plan: CanaryPlan
    models: _containers.RepeatedScalarFieldContainer[str]
    by: str
    subscribe: Subscribe
    front: str
    engine_model: str
    chat_template: str
    def __init__(self, service_name: _Optional[str] = ..., version: _Optional[str] = ..., canary_weight: _Optional[float] = ..., weights: _Optional[_Mapping[str, float]] = ..., schema_hash: _Optional[str] = ..., compatible_schema_hashes: _Optional[_Iterable[str]] = ..., engine: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., clear_endpoints: _Optional[bool] = ..., zone: _Optional[str] = ..., signature: _Optional[_Mapping[str, str]] = ..., update_id: _Optional[str] = ..., expected_table_version: _Optional[int] = ..., plan: _Optional[_Union[CanaryPlan, _Mapping]] = ..., models: _Optional[_Iterable[str]] = ..., by: _Optional[str] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., front: _Optional[str] = ..., engine_model: _Optional[str] = ..., chat_template: _Optional[str] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("services", "answers_only")
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_ONLY_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedScalarFieldContainer[str]
    answers_only: bool
    def __init__(self, services: _Optional[_Iterable[str]] = ..., answers_only: _Optional[bool] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("url", "zone", "node")
    URL_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    url: str
    zone: str
    node: str
    def __init__(self, url: _Optional[str] = ..., zone: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class CanaryPlan(_message.Message):
    __slots__ = ("baseline", "steps", "false_alarm", "margins", "min_ready")
    class Step(_message.Message):
        __slots__ = ("weight", "min_s", "min_samples")
        WEIGHT_FIELD_NUMBER: _ClassVar[int]
        MIN_S_FIELD_NUMBER: _ClassVar[int]
        MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
        weight: float
        min_s: float
        min_samples: int
        def __init__(self, weight: _Optional[float] = ..., min_s: _Optional[float] = ..., min_samples: _Optional[int] = ...) -> None: ...
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FALSE_ALARM_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    MIN_READY_FIELD_NUMBER: _ClassVar[int]
    baseline: str
    steps: _containers.RepeatedCompositeFieldContainer[CanaryPlan.Step]
    false_alarm: float
    margins: Margins
    min_ready: float
    def __init__(self, baseline: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[CanaryPlan.Step, _Mapping]]] = ..., false_alarm: _Optional[float] = ..., margins: _Optional[_Union[Margins, _Mapping]] = ..., min_ready: _Optional[float] = ...) -> None: ...

class Margins(_message.Message):
    __slots__ = ("success", "first_token", "token_gap", "errors", "length", "finish")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GAP_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    success: float
    first_token: float
    token_gap: float
    errors: float
    length: float
    finish: float
    def __init__(self, success: _Optional[float] = ..., first_token: _Optional[float] = ..., token_gap: _Optional[float] = ..., errors: _Optional[float] = ..., length: _Optional[float] = ..., finish: _Optional[float] = ...) -> None: ...

class DescriptorEvent(_message.Message):
    __slots__ = ("ack", "nack", "snapshot", "table", "notice")
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ack: Ack
    nack: Nack
    snapshot: Snapshot
    table: Table
    notice: Notice
    def __init__(self, ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("update_id", "service_name", "table_version", "repeated", "number", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    service_name: str
    table_version: int
    repeated: bool
    number: int
    weights: _containers.ScalarMap[str, float]
    def __init__(self, update_id: _Optional[str] = ..., service_name: _Optional[str] = ..., table_version: _Optional[int] = ..., repeated: _Optional[bool] = ..., number: _Optional[int] = ..., weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("update_id", "service_name", "code", "message", "last_good_version", "number")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Nack.Code]
        INVALID: _ClassVar[Nack.Code]
        STALE: _ClassVar[Nack.Code]
        CONFLICT: _ClassVar[Nack.Code]
        UNAVAILABLE: _ClassVar[Nack.Code]
        DENIED: _ClassVar[Nack.Code]
        NOT_FOUND: _ClassVar[Nack.Code]
        EXHAUSTED: _ClassVar[Nack.Code]
    UNSPECIFIED: Nack.Code
    INVALID: Nack.Code
    STALE: Nack.Code
    CONFLICT: Nack.Code
    UNAVAILABLE: Nack.Code
    DENIED: Nack.Code
    NOT_FOUND: Nack.Code
    EXHAUSTED: Nack.Code
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_GOOD_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    update_id: str
    service_name: str
    code: Nack.Code
    message: str
    last_good_version: int
    number: int
    def __init__(self, update_id: _Optional[str] = ..., service_name: _Optional[str] = ..., code: _Optional[_Union[Nack.Code, str]] = ..., message: _Optional[str] = ..., last_good_version: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("tables", "complete")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    complete: bool
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., complete: _Optional[bool] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("service_name", "table_version", "at_us", "by", "why", "evidence", "versions", "zones", "rollout", "models")
    class ZonesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ZoneDecay
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ZoneDecay, _Mapping]] = ...) -> None: ...
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    AT_US_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ZONES_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    service_name: str
    table_version: int
    at_us: int
    by: str
    why: str
    evidence: str
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    zones: _containers.MessageMap[str, ZoneDecay]
    rollout: Rollout
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, service_name: _Optional[str] = ..., table_version: _Optional[int] = ..., at_us: _Optional[int] = ..., by: _Optional[str] = ..., why: _Optional[str] = ..., evidence: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., zones: _Optional[_Mapping[str, ZoneDecay]] = ..., rollout: _Optional[_Union[Rollout, _Mapping]] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("name", "weight", "engine", "endpoints", "schema_hash", "compatible_schema_hashes", "signature", "front", "engine_model", "chat_template")
    class SignatureEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBLE_SCHEMA_HASHES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    engine: str
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    schema_hash: str
    compatible_schema_hashes: _containers.RepeatedScalarFieldContainer[str]
    signature: _containers.ScalarMap[str, str]
    front: str
    engine_model: str
    chat_template: str
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., engine: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., schema_hash: _Optional[str] = ..., compatible_schema_hashes: _Optional[_Iterable[str]] = ..., signature: _Optional[_Mapping[str, str]] = ..., front: _Optional[str] = ..., engine_model: _Optional[str] = ..., chat_template: _Optional[str] = ...) -> None: ...

class ZoneDecay(_message.Message):
    __slots__ = ("share", "since_us", "why")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    share: float
    since_us: int
    why: str
    def __init__(self, share: _Optional[float] = ..., since_us: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("id", "version", "plan", "step", "phase", "since_us", "why", "evidence", "by")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Rollout.Phase]
        RUNNING: _ClassVar[Rollout.Phase]
        HELD: _ClassVar[Rollout.Phase]
        PROMOTED: _ClassVar[Rollout.Phase]
        FAILED: _ClassVar[Rollout.Phase]
        ABORTED: _ClassVar[Rollout.Phase]
        SUPERSEDED: _ClassVar[Rollout.Phase]
    UNSPECIFIED: Rollout.Phase
    RUNNING: Rollout.Phase
    HELD: Rollout.Phase
    PROMOTED: Rollout.Phase
    FAILED: Rollout.Phase
    ABORTED: Rollout.Phase
    SUPERSEDED: Rollout.Phase
    ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    version: str
    plan: CanaryPlan
    step: int
    phase: Rollout.Phase
    since_us: int
    why: str
    evidence: str
    by: str
    def __init__(self, id: _Optional[str] = ..., version: _Optional[str] = ..., plan: _Optional[_Union[CanaryPlan, _Mapping]] = ..., step: _Optional[int] = ..., phase: _Optional[_Union[Rollout.Phase, str]] = ..., since_us: _Optional[int] = ..., why: _Optional[str] = ..., evidence: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("service_name", "kind", "text")
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    service_name: str
    kind: str
    text: str
    def __init__(self, service_name: _Optional[str] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
