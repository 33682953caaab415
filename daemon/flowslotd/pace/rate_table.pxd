# SPDX-License-Identifier: Apache-2.0
# Types of rate_table.py, for the compiler, which infers those of variables that are not named here.
# `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from flowslotd.flows.rows cimport Row

# struct Ctl from flowslotd.pace.layout:CTL
cdef packed struct Ctl:
    uint64_t cookie
    uint64_t deadline_ns
    uint64_t reserved
    uint64_t ceiling
    uint64_t drain_at
    uint32_t growth
    uint32_t queue_us
    uint32_t base_rtt_us
    uint32_t guaranteed
    uint32_t lender
    uint32_t lender_cookie
    uint32_t burst
    uint32_t least
    uint64_t line
    uint32_t uplink
    uint32_t pad0
# end

# struct Stat from flowslotd.pace.layout:STAT
cdef packed struct Stat:
    uint64_t cookie
    uint64_t sent
    uint64_t rate
    uint64_t extra
    uint64_t active_ns
    uint32_t unsent
    uint32_t srtt_us
    uint32_t min_rtt_us
    uint32_t rtt_us
    uint32_t retrans
    uint32_t cwnd
    uint32_t mode
    uint32_t high
    uint16_t family
    uint16_t sport
    uint16_t dport
    uint16_t pad0
    uint8_t src[16]
    uint8_t dst[16]
    uint64_t drained
    uint64_t acked
# end

# struct Entry from flowslotd.pace.pacer:ENTRY
cdef packed struct Entry:
    uint64_t cookie
    double reserved
    double ceiling
    uint8_t guaranteed
    double growth
    int64_t queue_us
    double burst
    double least
    double line
    int64_t uplink
# end

cdef double _max_rate, _max_small

cpdef typed_rows(Row[::1] rows)
cpdef typed_entries(Entry[::1] entries)
cpdef typed_ctl(Ctl[::1] ctl)
cpdef typed_stat(const Stat[::1] stat)
cpdef bint are(Row[::1] rows, const Py_ssize_t[::1] at, const uint64_t[:] flows)
cpdef bint lives(const Stat[::1] stat, const Py_ssize_t[::1] slots, const uint64_t[:] cookies)
cpdef bint holds(const Ctl[::1] ctl, const Py_ssize_t[::1] slots, const uint64_t[:] cookies)
@cython.locals(
    rates=double[:], ceilings=double[:], guaranteed=uint8_t[:], n=Py_ssize_t, grows=double,
    most=double, share=double, lowest=double, taking_turns=double, same=cython.bint,
)
cpdef Py_ssize_t put(
    Entry[::1] held, Row[::1] rows, const Py_ssize_t[::1] at, tuple columns, bint hard,
    Py_ssize_t[::1] changed,
)
cdef uint64_t within(double value, double most)
@cython.locals(changed=Py_ssize_t, guaranteed=uint32_t, same=cython.bint)
cpdef Py_ssize_t write(Ctl[::1] ctl, const Py_ssize_t[::1] slots, Entry[::1] entries)
@cython.locals(ours=Py_ssize_t)
cpdef Py_ssize_t refresh(
    Ctl[::1] ctl, const Stat[::1] stat, const Py_ssize_t[::1] live, const Py_ssize_t[::1] path,
    uint32_t[::1] base, uint64_t deadline_ns,
)
cpdef bint read(const Stat[::1] stat, const uint64_t[::1] known, int64_t[:, ::1] counters)
