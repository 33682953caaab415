# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 as far as gRPC needs it, by nghttp2: bytes in, events out; no I/O, no clock."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cdef extern from "nghttp2/nghttp2.h":
    ctypedef struct nghttp2_session:
        pass
    ctypedef struct nghttp2_session_callbacks:
        pass
    ctypedef struct nghttp2_option:
        pass
    ctypedef struct nghttp2_frame_hd:
        size_t length
        int32_t stream_id
        uint8_t type
        uint8_t flags
    ctypedef struct nghttp2_headers:
        int cat
    ctypedef struct nghttp2_ping:
        uint8_t[8] opaque_data
    ctypedef union nghttp2_frame:
        nghttp2_frame_hd hd
        nghttp2_headers headers
        nghttp2_ping ping
    ctypedef struct nghttp2_settings_entry:
        int32_t settings_id
        uint32_t value
    ctypedef struct nghttp2_nv:
        uint8_t* name
        uint8_t* value
        size_t namelen
        size_t valuelen
        uint8_t flags
    ctypedef union nghttp2_data_source:
        void* ptr
    ctypedef ssize_t (*nghttp2_data_source_read_callback)(
        nghttp2_session*, int32_t, uint8_t*, size_t, uint32_t*, nghttp2_data_source*, void*
    ) noexcept
    ctypedef struct nghttp2_data_provider:
        nghttp2_data_source source
        nghttp2_data_source_read_callback read_callback
    enum:
        NGHTTP2_DATA, NGHTTP2_HEADERS, NGHTTP2_SETTINGS, NGHTTP2_PING, NGHTTP2_GOAWAY
        NGHTTP2_HCAT_REQUEST
        NGHTTP2_FLAG_NONE, NGHTTP2_FLAG_END_STREAM, NGHTTP2_FLAG_ACK
        NGHTTP2_DATA_FLAG_EOF, NGHTTP2_DATA_FLAG_NO_END_STREAM
        NGHTTP2_SETTINGS_ENABLE_PUSH, NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
        NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
        NGHTTP2_NO_ERROR, NGHTTP2_ERR_DEFERRED, NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    int nghttp2_session_callbacks_new(nghttp2_session_callbacks**)
    void nghttp2_session_callbacks_del(nghttp2_session_callbacks*)
    void nghttp2_session_callbacks_set_on_frame_recv_callback(
        nghttp2_session_callbacks*,
        int (*)(nghttp2_session*, const nghttp2_frame*, void*) noexcept,
    )
    void nghttp2_session_callbacks_set_on_frame_send_callback(
        nghttp2_session_callbacks*,
        int (*)(nghttp2_session*, const nghttp2_frame*, void*) noexcept,
    )
    void nghttp2_session_callbacks_set_on_data_chunk_recv_callback(
        nghttp2_session_callbacks*,
        int (*)(nghttp2_session*, uint8_t, int32_t, const uint8_t*, size_t, void*) noexcept,
    )
    void nghttp2_session_callbacks_set_on_header_callback(
        nghttp2_session_callbacks*,
        int (*)(
            nghttp2_session*, const nghttp2_frame*, const uint8_t*, size_t, const uint8_t*, size_t,
            uint8_t, void*
        ) noexcept,
    )
    void nghttp2_session_callbacks_set_on_stream_close_callback(
        nghttp2_session_callbacks*,
        int (*)(nghttp2_session*, int32_t, uint32_t, void*) noexcept,
    )
    int nghttp2_option_new(nghttp2_option**)
    void nghttp2_option_del(nghttp2_option*)
    void nghttp2_option_set_no_auto_window_update(nghttp2_option*, int)
    void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option*, uint64_t, uint64_t)
    int nghttp2_session_client_new2(
        nghttp2_session**, nghttp2_session_callbacks*, void*, nghttp2_option*
    )
    int nghttp2_session_server_new2(
        nghttp2_session**, nghttp2_session_callbacks*, void*, nghttp2_option*
    )
    void nghttp2_session_del(nghttp2_session*)
    ssize_t nghttp2_session_mem_recv(nghttp2_session*, const uint8_t*, size_t)
    ssize_t nghttp2_session_mem_send(nghttp2_session*, const uint8_t**)
    int nghttp2_session_want_read(nghttp2_session*)
    int nghttp2_session_want_write(nghttp2_session*)
    int nghttp2_session_consume(nghttp2_session*, int32_t, size_t)
    int nghttp2_session_resume_data(nghttp2_session*, int32_t)
    int nghttp2_session_set_local_window_size(nghttp2_session*, uint8_t, int32_t, int32_t)
    int nghttp2_session_get_stream_remote_close(nghttp2_session*, int32_t)
    size_t nghttp2_session_get_outbound_queue_size(nghttp2_session*)
    int nghttp2_session_terminate_session(nghttp2_session*, uint32_t)
    int nghttp2_session_get_last_proc_stream_id(nghttp2_session*)
    int nghttp2_submit_settings(
        nghttp2_session*, uint8_t, const nghttp2_settings_entry*, size_t
    )
    int32_t nghttp2_submit_request(
        nghttp2_session*, void*, const nghttp2_nv*, size_t, const nghttp2_data_provider*, void*
    )
    int nghttp2_submit_response(
        nghttp2_session*, int32_t, const nghttp2_nv*, size_t, const nghttp2_data_provider*
    )
    int nghttp2_submit_trailer(nghttp2_session*, int32_t, const nghttp2_nv*, size_t)
    int nghttp2_submit_rst_stream(nghttp2_session*, uint8_t, int32_t, uint32_t)
    int nghttp2_submit_ping(nghttp2_session*, uint8_t, const uint8_t*)
    int nghttp2_submit_goaway(
        nghttp2_session*, uint8_t, int32_t, uint32_t, const uint8_t*, size_t
    )
    const char* nghttp2_strerror(int)

MAX_HEADERS_BYTES = 16384
"""Of one block, names and values; a stream with more is reset."""
STREAM_WINDOW, CONNECTION_WINDOW = 65536, 1 << 22
"""How much the other side may send before what it has sent is consumed."""

RESET_BURST, RESETS_PER_S = 10000, 1000
"""Streams that the other side may reset: a client does with each answer that is late."""

cdef size_t _MAX_HEADERS = MAX_HEADERS_BYTES


class Http2Error(Exception):
    """The other side does not speak HTTP/2, or what is asked for is not possible any more."""


cdef class _Outgoing:
    """What a stream has to send yet."""

    cdef bytearray data
    cdef bint ended
    cdef list trailers

    def __cinit__(self):
        self.data = bytearray()


cdef class Session:
    """One connection's state."""

    cdef nghttp2_session* _session
    cdef bint _server
    cdef list _events
    cdef set _open  # streams
    cdef dict _outgoing  # by stream
    cdef dict _headers  # of blocks that are not complete: by stream, [fields, their bytes]

    def __cinit__(self, *, bint server, int max_streams=0):
        """`max_streams`: how many the other side may have open at once."""
        self._server = server
        self._events, self._open, self._outgoing, self._headers = [], set(), {}, {}
        cdef nghttp2_session_callbacks* callbacks = NULL
        cdef nghttp2_option* option = NULL
        cdef int failed
        if nghttp2_session_callbacks_new(&callbacks) or nghttp2_option_new(&option):
            nghttp2_session_callbacks_del(callbacks)
            raise MemoryError
        nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, _on_frame)
        nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, _on_sent)
        nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, _on_data)
        nghttp2_session_callbacks_set_on_header_callback(callbacks, _on_header)
        nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, _on_close)
        nghttp2_option_set_no_auto_window_update(option, 1)
        nghttp2_option_set_stream_reset_rate_limit(option, RESET_BURST, RESETS_PER_S)
        if server:
            failed = nghttp2_session_server_new2(&self._session, callbacks, <void*>self, option)
        else:
            failed = nghttp2_session_client_new2(&self._session, callbacks, <void*>self, option)
        nghttp2_option_del(option)
        nghttp2_session_callbacks_del(callbacks)
        if failed:
            raise MemoryError
        self._settings(max_streams)

    def __dealloc__(self):
        nghttp2_session_del(self._session)

    cdef _settings(self, int max_streams):
        cdef nghttp2_settings_entry[4] entries
        entries[0].settings_id = NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS
        entries[0].value = max_streams
        entries[1].settings_id = NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE
        entries[1].value = STREAM_WINDOW
        entries[2].settings_id = NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE
        entries[2].value = MAX_HEADERS_BYTES
        entries[3].settings_id = NGHTTP2_SETTINGS_ENABLE_PUSH  # of clients only
        entries[3].value = 0
        _check(nghttp2_submit_settings(
            self._session, NGHTTP2_FLAG_NONE, entries, 3 if self._server else 4
        ))
        _check(nghttp2_session_set_local_window_size(
            self._session, NGHTTP2_FLAG_NONE, 0, CONNECTION_WINDOW
        ))

    # --- what comes

    def receive(self, bytes data):
        """Take what came from the other side. Raises Http2Error: no more can be received."""
        _check(<int>nghttp2_session_mem_recv(self._session, data, len(data)))

    def events(self):
        """What has happened since the last call, in order; sending, too, can end a stream."""
        events, self._events = self._events, []
        return events

    def consume(self, int32_t stream, size_t count):
        """So many bytes of the stream's data are done with: the other side may send as many."""
        nghttp2_session_consume(self._session, stream, count)

    # --- what goes

    def request(self, list headers):
        """Open a stream; returns its number. Raises Http2Error."""
        return self._submit(0, headers, True)

    def respond(self, int32_t stream, list headers, *, bint ended=False):
        """Answer with these headers; `ended`: and nothing else. Raises Http2Error."""
        self._submit(stream, headers, not ended)

    cdef int32_t _submit(self, int32_t stream, list headers, bint body) except 0:
        cdef nghttp2_data_provider provider
        cdef nghttp2_nv* fields = _fields(headers)
        cdef int32_t result
        if stream and stream not in self._open:
            free(fields)
            raise Http2Error("the stream has ended")
        provider.source.ptr = NULL
        provider.read_callback = _supply
        if stream:
            result = nghttp2_submit_response(
                self._session, stream, fields, len(headers), &provider if body else NULL
            ) or stream
        else:
            result = nghttp2_submit_request(
                self._session, NULL, fields, len(headers), &provider, NULL
            )
        free(fields)
        _check(result)
        self._open.add(result)
        if body:
            self._outgoing[result] = _Outgoing()
        return result

    def send(self, int32_t stream, bytes data):
        """Data for a stream that has been opened or responded to. Raises Http2Error."""
        cdef _Outgoing outgoing = self._outgoing.get(stream)
        if outgoing is None or outgoing.ended:
            raise Http2Error("the stream has ended")
        outgoing.data += data
        nghttp2_session_resume_data(self._session, stream)  # unless it is not deferred

    def end(self, int32_t stream, list trailers=None):
        """Nothing more comes on that stream but these trailers. Raises Http2Error."""
        cdef _Outgoing outgoing = self._outgoing.get(stream)
        if outgoing is None or outgoing.ended:
            raise Http2Error("the stream has ended")
        outgoing.ended, outgoing.trailers = True, trailers
        nghttp2_session_resume_data(self._session, stream)

    def unsent(self, int32_t stream):
        """Bytes of a stream's data that are still here: its window, or the session's, is full."""
        cdef _Outgoing outgoing = self._outgoing.get(stream)
        return 0 if outgoing is None else len(outgoing.data)

    def reset(self, int32_t stream, uint32_t code):
        """End the stream both ways, now (RFC 9113, 7: error codes)."""
        nghttp2_submit_rst_stream(self._session, NGHTTP2_FLAG_NONE, stream, code)

    def ping(self, bytes payload):
        """Ask whether the other side is there: it has to send these 8 bytes back."""
        assert len(payload) == 8
        _check(nghttp2_submit_ping(self._session, NGHTTP2_FLAG_NONE, payload))

    def refuse_more(self):
        """Let the streams go on that there are, and take no new ones."""
        nghttp2_submit_goaway(
            self._session, NGHTTP2_FLAG_NONE,
            nghttp2_session_get_last_proc_stream_id(self._session), NGHTTP2_NO_ERROR, NULL, 0,
        )

    def terminate(self):
        """Say that this is the end; `finished` once that is sent."""
        nghttp2_session_terminate_session(self._session, NGHTTP2_NO_ERROR)

    def output(self):
        """All that is to be sent to the other side now. Raises Http2Error."""
        cdef const uint8_t* data
        cdef ssize_t count
        cdef list parts = []
        while True:
            count = nghttp2_session_mem_send(self._session, &data)
            if count <= 0:
                break
            parts.append(data[:count])
        _check(<int>count)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def queued(self):
        """Frames that wait to be sent, but for data that waits for its stream's window."""
        return nghttp2_session_get_outbound_queue_size(self._session)

    @property
    def finished(self):
        """Nothing is to be received or sent any more: close the connection."""
        return not (
            nghttp2_session_want_read(self._session) or nghttp2_session_want_write(self._session)
        )


cdef int _check(int result) except -1:
    if result < 0:
        raise Http2Error(nghttp2_strerror(result).decode())
    return 0


cdef nghttp2_nv* _fields(list headers) except NULL:
    """To be freed; points into the bytes of `headers`."""
    cdef nghttp2_nv* fields = <nghttp2_nv*>malloc((len(headers) or 1) * sizeof(nghttp2_nv))
    cdef bytes name, value
    if fields == NULL:
        raise MemoryError
    for i, (name, value) in enumerate(headers):
        fields[i].name, fields[i].namelen = <uint8_t*>name, len(name)
        fields[i].value, fields[i].valuelen = <uint8_t*>value, len(value)
        fields[i].flags = 0
    return fields


# --- nghttp2 calls these while `receive` and `output` run

cdef int _on_header(
    nghttp2_session* session, const nghttp2_frame* frame, const uint8_t* name, size_t name_bytes,
    const uint8_t* value, size_t value_bytes, uint8_t flags, void* user,
) noexcept:
    cdef Session self = <Session>user
    cdef list block = self._headers.setdefault(frame.hd.stream_id, [[], 0])
    block[1] += name_bytes + value_bytes
    if block[1] > _MAX_HEADERS:
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    block[0].append((name[:name_bytes], value[:value_bytes]))
    return 0


cdef int _on_frame(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    cdef Session self = <Session>user
    cdef int32_t stream = frame.hd.stream_id
    cdef bint ack = frame.hd.flags & NGHTTP2_FLAG_ACK
    if frame.hd.type == NGHTTP2_HEADERS:
        fields = self._headers.pop(stream, [[], 0])[0]
        if frame.headers.cat == NGHTTP2_HCAT_REQUEST:
            self._open.add(stream)
            self._events.append(("request", stream, fields))
        else:
            self._events.append(("headers", stream, fields))
    elif frame.hd.type == NGHTTP2_PING and ack:
        self._events.append(("pong", 0, frame.ping.opaque_data[:8]))
    elif frame.hd.type == NGHTTP2_SETTINGS and not ack:
        self._events.append(("settings", 0, None))
    elif frame.hd.type == NGHTTP2_GOAWAY:
        self._events.append(("goaway", 0, None))
    if frame.hd.type in (NGHTTP2_DATA, NGHTTP2_HEADERS):
        if frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
            self._events.append(("end", stream, None))
    return 0


cdef int _on_data(
    nghttp2_session* session, uint8_t flags, int32_t stream, const uint8_t* data, size_t count,
    void* user,
) noexcept:
    (<Session>user)._events.append(("data", stream, data[:count]))
    return 0


cdef int _on_close(
    nghttp2_session* session, int32_t stream, uint32_t code, void* user
) noexcept:
    cdef Session self = <Session>user
    self._open.discard(stream)
    self._outgoing.pop(stream, None)
    self._headers.pop(stream, None)
    self._events.append(("close", stream, code))
    return 0


cdef int _on_sent(nghttp2_session* session, const nghttp2_frame* frame, void* user) noexcept:
    """A server that has said all need not hear the rest: the stream closes both ways."""
    cdef Session self = <Session>user
    if self._server and frame.hd.type in (NGHTTP2_DATA, NGHTTP2_HEADERS):
        if frame.hd.flags & NGHTTP2_FLAG_END_STREAM:
            if nghttp2_session_get_stream_remote_close(session, frame.hd.stream_id) == 0:
                nghttp2_submit_rst_stream(
                    session, NGHTTP2_FLAG_NONE, frame.hd.stream_id, NGHTTP2_NO_ERROR
                )
    return 0


cdef ssize_t _supply(
    nghttp2_session* session, int32_t stream, uint8_t* buffer, size_t room, uint32_t* flags,
    nghttp2_data_source* source, void* user,
) noexcept:
    cdef Session self = <Session>user
    cdef _Outgoing outgoing = self._outgoing.get(stream)
    if outgoing is None:
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE
    cdef size_t count = min(room, <size_t>len(outgoing.data))
    if count == 0 and not outgoing.ended:
        return NGHTTP2_ERR_DEFERRED
    memcpy(buffer, <const char*>outgoing.data, count)
    del outgoing.data[:count]
    if outgoing.ended and not outgoing.data:
        flags[0] |= NGHTTP2_DATA_FLAG_EOF
        if outgoing.trailers is not None:
            flags[0] |= NGHTTP2_DATA_FLAG_NO_END_STREAM
            fields = _fields(outgoing.trailers)
            nghttp2_submit_trailer(session, stream, fields, len(outgoing.trailers))
            free(fields)
    return count
