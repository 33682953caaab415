# SPDX-License-Identifier: Apache-2.0
"""The binding of nghttp2 by itself, whatever it is fed with."""

from hypothesis import given, settings
from hypothesis import strategies as st
from rawhttp2 import PREFACE, fields

from flowslot_rpc.http2 import Http2Error, Session


def transcript() -> bytes:
    """What a client says in a call."""
    client, server = Session(server=False), Session(server=True, max_streams=5)
    said = b""
    call = client.request(fields(b"/t.T/Twice"))
    client.send(call, b"\0\0\0\0\5hello" * 20)
    client.ping(b"are you?")
    for _ in range(3):
        out = client.output()
        said += out
        server.receive(out)
        client.receive(server.output())
    client.end(call)
    return said + client.output()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_nothing_that_is_received_breaks_a_session(data: st.DataObject) -> None:
    """Valid bytes, some of them changed, cut anywhere; and answers in between."""
    said = bytearray(transcript())
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(len(PREFACE), len(said) - 1))
        said[at] = data.draw(st.integers(0, 255))
    session = Session(server=True, max_streams=5)
    while said:
        cut = data.draw(st.integers(1, len(said)))
        try:
            session.receive(bytes(said[:cut]))
            for kind, stream, _ in session.events():
                if kind == "request":
                    session.respond(stream, [(b":status", b"200")])
                    session.send(stream, b"answer")
                    session.end(stream, [(b"grpc-status", b"0")])
            session.output()
        except Http2Error:
            return
        del said[:cut]
