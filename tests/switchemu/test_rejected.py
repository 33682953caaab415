# SPDX-License-Identifier: Apache-2.0
"""Which calls count as rejected: those that the caller has spoilt, not those that it ended; and
what stock clients of gRPC are told."""

from contextlib import ExitStack

import pytest
from rawhttp2 import RawClient, message
from switchproc import Switch
from waiting import settle

from flowslot_proto import methods
from flowslot_proto.grpcio import grpc
from flowslot_switch import limits

CUT_OFF = message(b"cut", announced=5)
TOO_LARGE = message(b"x", announced=limits.MAX_MESSAGE_BYTES + 1)


def rejected(switch: Switch) -> int:
    return switch.describe().counters.rejected


@pytest.mark.parametrize(
    ("path", "said", "whole", "counted"),
    [
        (methods.DESCRIBE, 2 * message(b""), True, 1),
        (methods.DESCRIBE, b"", True, 0),  # the caller may have gone
        (methods.DESCRIBE, TOO_LARGE, False, 0),
        (methods.NEGOTIATE, TOO_LARGE, False, 0),
    ],
)
def test_what_is_no_call_is_ended_and_counted_if_the_caller_is_to_blame(
    unhurried_switch: Switch, path: str, said: bytes, whole: bool, counted: int
) -> None:
    before = rejected(unhurried_switch)
    with RawClient(unhurried_switch.port) as raw:
        call = raw.begin(path)
        raw.send(call, said, end=whole)
        raw.wait(call)
        assert call in raw.ended
    assert rejected(unhurried_switch) == before + counted


@pytest.mark.parametrize(
    ("path", "how", "counted"),
    [
        ("/t.T/None", grpc.Compression.NoCompression, 1),
        (methods.DESCRIBE, grpc.Compression.Gzip, 0),
    ],
)
def test_other_methods_and_compressed_messages_are_refused(
    unhurried_switch: Switch, path: str, how: grpc.Compression, counted: int
) -> None:
    before = rejected(unhurried_switch)
    with unhurried_switch.channel() as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(path)(b"\0" * 10_000, timeout=20, compression=how)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert rejected(unhurried_switch) == before + counted


def test_one_caller_has_so_many_calls_at_once_and_the_next_is_counted(
    unhurried_switch: Switch,
) -> None:
    before = rejected(unhurried_switch)
    with ExitStack() as stack:
        channel = stack.enter_context(unhurried_switch.channel())
        clients = [
            stack.enter_context(RawClient(unhurried_switch.port))
            for _ in range(limits.CALLS_PER_CALLER // limits.MAX_STREAMS)
        ]

        def refused() -> bool:
            for client in clients:  # on a slow machine, their first calls may be over by now
                client.hear()
                for _ in range(limits.MAX_STREAMS - len(client.pending())):
                    client.begin(methods.NEGOTIATE)
            call = channel.stream_stream(methods.NEGOTIATE)
            try:
                return bool(list(call(iter(()), timeout=limits.HELLO_TIMEOUT_S)))
            except grpc.RpcError as error:
                return "calls at once" in (error.details() or "")

        settle(refused, what="all of one caller's calls are taken")
        other = stack.enter_context(RawClient(unhurried_switch.port, "127.0.0.2"))
        assert not other.answer(methods.DESCRIBE, message(b"")), "others have theirs"
    settle(lambda: rejected(unhurried_switch) > before, what="counted")


@pytest.mark.parametrize("path", [methods.DESCRIBE, methods.NEGOTIATE])
@pytest.mark.parametrize("cancels", [True, False])
def test_a_call_that_is_cancelled_or_lost_is_not(
    unhurried_switch: Switch, path: str, cancels: bool
) -> None:
    before = rejected(unhurried_switch)
    with RawClient(unhurried_switch.port) as raw:
        call = raw.begin(path)
        raw.send(call, CUT_OFF)
        if cancels:
            raw.reset(call)
            raw.answer(methods.DESCRIBE, message(b""))
    assert rejected(unhurried_switch) == before


def test_an_answer_that_nobody_takes_is_not_kept(unhurried_switch: Switch) -> None:
    with RawClient(unhurried_switch.port, window=0) as raw:
        call = raw.begin(methods.DESCRIBE)
        raw.send(call, message(b""), end=True)
        assert raw.wait(call), "the call, or the connection, is ended"
    assert unhurried_switch.describe().pid
