# SPDX-License-Identifier: Apache-2.0
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_ROLE_UNSPECIFIED: _ClassVar[PeerRole]
    PEER_ROLE_RING: _ClassVar[PeerRole]
    PEER_ROLE_PUSH: _ClassVar[PeerRole]
    PEER_ROLE_PULL: _ClassVar[PeerRole]
PEER_ROLE_UNSPECIFIED: PeerRole
PEER_ROLE_RING: PeerRole
PEER_ROLE_PUSH: PeerRole
PEER_ROLE_PULL: PeerRole

class FetchFeedbackRequest(_message.Message):
    __slots__ = ("links", "slots")
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedScalarFieldContainer[str]
    slots: int
    def __init__(self, links: _Optional[_Iterable[str]] = ..., slots: _Optional[int] = ...) -> None: ...

class LinkLoad(_message.Message):
    __slots__ = ("link", "goodput", "reservable", "load")
    LINK_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    RESERVABLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    link: str
    goodput: float
    reservable: float
    load: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, link: _Optional[str] = ..., goodput: _Optional[float] = ..., reservable: _Optional[float] = ..., load: _Optional[_Iterable[float]] = ...) -> None: ...

class FetchFeedbackReply(_message.Message):
    __slots__ = ("slot", "slot_ns", "links", "path")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_NS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_ns: int
    links: _containers.RepeatedCompositeFieldContainer[LinkLoad]
    path: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, slot: _Optional[int] = ..., slot_ns: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkLoad, _Mapping]]] = ..., path: _Optional[_Iterable[float]] = ...) -> None: ...

class UpdateScheduleRequest(_message.Message):
    __slots__ = ("scheduler", "flow", "links", "slot", "rates")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    scheduler: str
    flow: int
    links: _containers.RepeatedScalarFieldContainer[str]
    slot: int
    rates: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, scheduler: _Optional[str] = ..., flow: _Optional[int] = ..., links: _Optional[_Iterable[str]] = ..., slot: _Optional[int] = ..., rates: _Optional[_Iterable[float]] = ...) -> None: ...

class UpdateScheduleReply(_message.Message):
    __slots__ = ("status", "reason", "link", "slot")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[UpdateScheduleReply.Status]
        STATUS_OK: _ClassVar[UpdateScheduleReply.Status]
        STATUS_REFUSED: _ClassVar[UpdateScheduleReply.Status]
    STATUS_UNSPECIFIED: UpdateScheduleReply.Status
    STATUS_OK: UpdateScheduleReply.Status
    STATUS_REFUSED: UpdateScheduleReply.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    status: UpdateScheduleReply.Status
    reason: str
    link: str
    slot: int
    def __init__(self, status: _Optional[_Union[UpdateScheduleReply.Status, str]] = ..., reason: _Optional[str] = ..., link: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class DaemonMessage(_message.Message):
    __slots__ = ("session", "hello", "dones", "demands", "acks", "heartbeat")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DONES_FIELD_NUMBER: _ClassVar[int]
    DEMANDS_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    session: int
    hello: Hello
    dones: DoneBatch
    demands: DemandBatch
    acks: AckBatch
    heartbeat: Heartbeat
    def __init__(self, session: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., dones: _Optional[_Union[DoneBatch, _Mapping]] = ..., demands: _Optional[_Union[DemandBatch, _Mapping]] = ..., acks: _Optional[_Union[AckBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class ArbiterMessage(_message.Message):
    __slots__ = ("session", "grants", "refusals", "echo", "policy")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    session: int
    grants: GrantBatch
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    echo: HeartbeatEcho
    policy: str
    def __init__(self, session: _Optional[int] = ..., grants: _Optional[_Union[GrantBatch, _Mapping]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., echo: _Optional[_Union[HeartbeatEcho, _Mapping]] = ..., policy: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("daemon", "links", "lease_ns", "held", "host")
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_NS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    daemon: str
    links: _containers.RepeatedScalarFieldContainer[str]
    lease_ns: int
    held: HeldBatch
    host: str
    def __init__(self, daemon: _Optional[str] = ..., links: _Optional[_Iterable[str]] = ..., lease_ns: _Optional[int] = ..., held: _Optional[_Union[HeldBatch, _Mapping]] = ..., host: _Optional[str] = ...) -> None: ...

class HeldBatch(_message.Message):
    __slots__ = ("flow", "inc", "rate")
    FLOW_FIELD_NUMBER: _ClassVar[int]
    INC_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    flow: _containers.RepeatedScalarFieldContainer[int]
    inc: _containers.RepeatedScalarFieldContainer[int]
    rate: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, flow: _Optional[_Iterable[int]] = ..., inc: _Optional[_Iterable[int]] = ..., rate: _Optional[_Iterable[float]] = ...) -> None: ...

class DemandBatch(_message.Message):
    __slots__ = ("jobs", "path_hops", "path_links", "flow", "inc", "job", "path", "remaining", "cap", "wait_ns", "period_ns", "next_in_ns", "next_bytes", "gave_back", "sockets")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    PATH_HOPS_FIELD_NUMBER: _ClassVar[int]
    PATH_LINKS_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    INC_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    CAP_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_NS_FIELD_NUMBER: _ClassVar[int]
    NEXT_IN_NS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GAVE_BACK_FIELD_NUMBER: _ClassVar[int]
    SOCKETS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    path_hops: _containers.RepeatedScalarFieldContainer[int]
    path_links: _containers.RepeatedScalarFieldContainer[int]
    flow: _containers.RepeatedScalarFieldContainer[int]
    inc: _containers.RepeatedScalarFieldContainer[int]
    job: _containers.RepeatedScalarFieldContainer[int]
    path: _containers.RepeatedScalarFieldContainer[int]
    remaining: _containers.RepeatedScalarFieldContainer[int]
    cap: _containers.RepeatedScalarFieldContainer[float]
    wait_ns: _containers.RepeatedScalarFieldContainer[int]
    period_ns: _containers.RepeatedScalarFieldContainer[int]
    next_in_ns: _containers.RepeatedScalarFieldContainer[int]
    next_bytes: _containers.RepeatedScalarFieldContainer[int]
    gave_back: _containers.RepeatedScalarFieldContainer[int]
    sockets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, jobs: _Optional[_Iterable[str]] = ..., path_hops: _Optional[_Iterable[int]] = ..., path_links: _Optional[_Iterable[int]] = ..., flow: _Optional[_Iterable[int]] = ..., inc: _Optional[_Iterable[int]] = ..., job: _Optional[_Iterable[int]] = ..., path: _Optional[_Iterable[int]] = ..., remaining: _Optional[_Iterable[int]] = ..., cap: _Optional[_Iterable[float]] = ..., wait_ns: _Optional[_Iterable[int]] = ..., period_ns: _Optional[_Iterable[int]] = ..., next_in_ns: _Optional[_Iterable[int]] = ..., next_bytes: _Optional[_Iterable[int]] = ..., gave_back: _Optional[_Iterable[int]] = ..., sockets: _Optional[_Iterable[int]] = ...) -> None: ...

class DoneBatch(_message.Message):
    __slots__ = ("flow", "inc")
    FLOW_FIELD_NUMBER: _ClassVar[int]
    INC_FIELD_NUMBER: _ClassVar[int]
    flow: _containers.RepeatedScalarFieldContainer[int]
    inc: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, flow: _Optional[_Iterable[int]] = ..., inc: _Optional[_Iterable[int]] = ...) -> None: ...

class AckBatch(_message.Message):
    __slots__ = ("flow", "inc", "seq")
    FLOW_FIELD_NUMBER: _ClassVar[int]
    INC_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    flow: _containers.RepeatedScalarFieldContainer[int]
    inc: _containers.RepeatedScalarFieldContainer[int]
    seq: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, flow: _Optional[_Iterable[int]] = ..., inc: _Optional[_Iterable[int]] = ..., seq: _Optional[_Iterable[int]] = ...) -> None: ...

class GrantBatch(_message.Message):
    __slots__ = ("flow", "inc", "seq", "rate", "ceiling", "must_ack", "standing", "share", "hold_ns")
    FLOW_FIELD_NUMBER: _ClassVar[int]
    INC_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    CEILING_FIELD_NUMBER: _ClassVar[int]
    MUST_ACK_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    HOLD_NS_FIELD_NUMBER: _ClassVar[int]
    flow: _containers.RepeatedScalarFieldContainer[int]
    inc: _containers.RepeatedScalarFieldContainer[int]
    seq: _containers.RepeatedScalarFieldContainer[int]
    rate: _containers.RepeatedScalarFieldContainer[float]
    ceiling: _containers.RepeatedScalarFieldContainer[float]
    must_ack: _containers.RepeatedScalarFieldContainer[bool]
    standing: _containers.RepeatedScalarFieldContainer[bool]
    share: _containers.RepeatedScalarFieldContainer[float]
    hold_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, flow: _Optional[_Iterable[int]] = ..., inc: _Optional[_Iterable[int]] = ..., seq: _Optional[_Iterable[int]] = ..., rate: _Optional[_Iterable[float]] = ..., ceiling: _Optional[_Iterable[float]] = ..., must_ack: _Optional[_Iterable[bool]] = ..., standing: _Optional[_Iterable[bool]] = ..., share: _Optional[_Iterable[float]] = ..., hold_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("flow", "inc", "reason")
    FLOW_FIELD_NUMBER: _ClassVar[int]
    INC_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    flow: int
    inc: int
    reason: str
    def __init__(self, flow: _Optional[int] = ..., inc: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("n", "wall_ns")
    N_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    n: int
    wall_ns: int
    def __init__(self, n: _Optional[int] = ..., wall_ns: _Optional[int] = ...) -> None: ...

class HeartbeatEcho(_message.Message):
    __slots__ = ("n", "wall_ns")
    N_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    n: int
    wall_ns: int
    def __init__(self, n: _Optional[int] = ..., wall_ns: _Optional[int] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("host", "n", "jobs", "job", "role", "rank", "peer", "channel", "iteration", "total", "sent", "by_end")
    HOST_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    BY_END_FIELD_NUMBER: _ClassVar[int]
    host: str
    n: int
    jobs: _containers.RepeatedScalarFieldContainer[str]
    job: _containers.RepeatedScalarFieldContainer[int]
    role: _containers.RepeatedScalarFieldContainer[PeerRole]
    rank: _containers.RepeatedScalarFieldContainer[int]
    peer: _containers.RepeatedScalarFieldContainer[int]
    channel: _containers.RepeatedScalarFieldContainer[int]
    iteration: _containers.RepeatedScalarFieldContainer[int]
    total: _containers.RepeatedScalarFieldContainer[float]
    sent: _containers.RepeatedScalarFieldContainer[float]
    by_end: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, host: _Optional[str] = ..., n: _Optional[int] = ..., jobs: _Optional[_Iterable[str]] = ..., job: _Optional[_Iterable[int]] = ..., role: _Optional[_Iterable[_Union[PeerRole, str]]] = ..., rank: _Optional[_Iterable[int]] = ..., peer: _Optional[_Iterable[int]] = ..., channel: _Optional[_Iterable[int]] = ..., iteration: _Optional[_Iterable[int]] = ..., total: _Optional[_Iterable[float]] = ..., sent: _Optional[_Iterable[float]] = ..., by_end: _Optional[_Iterable[float]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("name", "pid", "uptime_ns", "slot", "slot_ns", "lease_ns", "recovering", "counters", "sessions", "links", "policy")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_NS_FIELD_NUMBER: _ClassVar[int]
    LEASE_NS_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    uptime_ns: int
    slot: int
    slot_ns: int
    lease_ns: int
    recovering: bool
    counters: Counters
    sessions: _containers.RepeatedCompositeFieldContainer[SessionState]
    links: _containers.RepeatedCompositeFieldContainer[LinkLoad]
    policy: str
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_ns: _Optional[int] = ..., slot: _Optional[int] = ..., slot_ns: _Optional[int] = ..., lease_ns: _Optional[int] = ..., recovering: _Optional[bool] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[SessionState, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkLoad, _Mapping]]] = ..., policy: _Optional[str] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("granted", "refused", "preempted", "expired", "rejected", "messages_in", "messages_out", "steps", "step_ns", "scheduled")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_IN_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_OUT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    granted: int
    refused: int
    preempted: int
    expired: int
    rejected: int
    messages_in: int
    messages_out: int
    steps: int
    step_ns: int
    scheduled: int
    def __init__(self, granted: _Optional[int] = ..., refused: _Optional[int] = ..., preempted: _Optional[int] = ..., expired: _Optional[int] = ..., rejected: _Optional[int] = ..., messages_in: _Optional[int] = ..., messages_out: _Optional[int] = ..., steps: _Optional[int] = ..., step_ns: _Optional[int] = ..., scheduled: _Optional[int] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("session", "daemon", "peer", "messages_in", "messages_out")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_IN_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_OUT_FIELD_NUMBER: _ClassVar[int]
    session: int
    daemon: str
    peer: str
    messages_in: int
    messages_out: int
    def __init__(self, session: _Optional[int] = ..., daemon: _Optional[str] = ..., peer: _Optional[str] = ..., messages_in: _Optional[int] = ..., messages_out: _Optional[int] = ...) -> None: ...
