# SPDX-License-Identifier: Apache-2.0
# Types of rules.py, for the compiler. `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from flowslot.policy.fill cimport link_sum

# struct Row from flowslot.arbiter.ledger:ROW
cdef packed struct Row:
    int64_t session
    uint64_t flow
    int64_t inc
    int64_t job
    int64_t aggregate
    int64_t group
    double tightest
    double remaining
    double least
    uint8_t stalled
    int64_t ready_at
    int64_t period_ns
    int64_t due_at
    double next_bytes
    int64_t idle_since
    int64_t began_at
    double whole
    double goal
    double grant
    int64_t seq
    int64_t oldest_pending
    int64_t held_since
    uint8_t standing
    uint8_t reported_standing
    uint8_t anticipated
    int64_t borrower
    double lent
    int64_t pending_seq[4]
    double pending_rate[4]
# end

cdef Py_ssize_t _pending
cdef int64_t _never, _together, _free
cdef double _least_left, _pressing, _rounding, _inf

# A view of memory that need not be checked again.
@cython.locals(flows=Row[::1])
cpdef table(rows)

@cython.locals(
    k=Py_ssize_t, i=Py_ssize_t, job=Py_ssize_t, size=double, begun=int64_t, joins=cython.bint
)
cpdef void report(
    int64_t now, Row[::1] rows, const Py_ssize_t[::1] at, const int64_t[:, ::1] said,
    const uint8_t[::1] stalled, int64_t[:, ::1] phases,
)

@cython.locals(
    k=Py_ssize_t, i=Py_ssize_t, still=Py_ssize_t, p=Py_ssize_t, seq=int64_t, rate=double
)
cpdef void acknowledge(
    int64_t now, Row[::1] rows, const Py_ssize_t[::1] at, const int64_t[::1] upto
)

@cython.locals(i=Py_ssize_t)
cpdef void progress(Row[::1] rows, double seconds)

@cython.locals(
    i=Py_ssize_t, job=Py_ssize_t, placed=cython.bint, active=cython.bint, until=int64_t
)
cpdef int64_t see(
    int64_t now, Row[::1] rows, const int32_t[:, ::1] paths, Py_ssize_t n_links,
    const int64_t[:, ::1] phases, double[:, ::1] seen,
)

@cython.locals(i=Py_ssize_t, n=Py_ssize_t)
cpdef Py_ssize_t overdue(Row[::1] rows, int64_t before, Py_ssize_t[::1] found)

@cython.locals(i=Py_ssize_t, settled=cython.bint)
cpdef bint all_settled(Row[::1] rows)

@cython.locals(i=Py_ssize_t)
cpdef bint unsettled(Row[::1] rows)

@cython.locals(p=Py_ssize_t, most=double)
cdef inline double commitment(Row[::1] rows, Py_ssize_t i)

@cython.locals(i=Py_ssize_t, rates=double[::1])
cpdef void commitments(Row[::1] rows, const int32_t[:, ::1] paths, double[::1] sums)

@cython.locals(
    i=Py_ssize_t, link=Py_ssize_t, last=Py_ssize_t, everywhere=double
)
cpdef void add_up(const int32_t[:, ::1] paths, const double[::1] rates, double[::1] sums)

@cython.locals(
    i=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t, n_links=Py_ssize_t, goal=double, small=double,
    goals=double[:, ::1], wanted=double[::1], found=double[::1], sums=double[::1],
)
cpdef void settle(
    Row[::1] rows, const int32_t[:, ::1] paths, const double[::1] target, int64_t since,
    const double[::1] capacity, double change_link, double change_rate,
)

cdef inline bint presses(Row[::1] rows, Py_ssize_t i)

@cython.locals(
    i=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t, last=Py_ssize_t, wished=double[::1],
    used=double[::1], grants=double[::1], first=double[::1], room=double, rest=double,
    enough=cython.bint,
)
cpdef void find_short(
    Row[::1] rows, const int32_t[:, ::1] paths, const uint8_t[::1] mute,
    const double[::1] limit, Py_ssize_t[::1] short,
)

@cython.locals(h=Py_ssize_t, last=Py_ssize_t)
cdef inline bint is_short(
    const int32_t[:, ::1] paths, Py_ssize_t i, const Py_ssize_t[::1] short
)

@cython.locals(i=Py_ssize_t, n=Py_ssize_t, slot=Py_ssize_t, more=cython.bint)
cpdef Py_ssize_t lower(
    int64_t now, Row[::1] rows, const int32_t[:, ::1] paths, const uint8_t[::1] mute,
    const Py_ssize_t[::1] short, int64_t seq, Py_ssize_t[::1] lowered,
)

cdef inline bint starved(Row[::1] rows, Py_ssize_t i)

@cython.locals(g=Py_ssize_t, i=Py_ssize_t, k=Py_ssize_t, turn=Py_ssize_t)
cdef void find_borrowers(
    Row[::1] rows, double[::1] wish, Py_ssize_t[::1] first, Py_ssize_t[::1] following
)

@cython.locals(
    i=Py_ssize_t, k=Py_ssize_t, group=Py_ssize_t, to=Py_ssize_t, rate=double, least=double,
    wish=double[::1], first=Py_ssize_t[::1], following=Py_ssize_t[::1],
)
cpdef void borrow(
    Row[::1] rows, Py_ssize_t n_groups, const Py_ssize_t[::1] lowered, double change_link,
    double change_rate, double[::1] gain,
)

@cython.locals(
    i=Py_ssize_t, k=Py_ssize_t, n=Py_ssize_t, sent=Py_ssize_t, last=Py_ssize_t, grant=double,
    goal=double, least=double, meant=cython.bint, link=Py_ssize_t, base=double[::1],
    room=double[::1],
)
cpdef Py_ssize_t find_raises(
    Row[::1] rows, const int32_t[:, ::1] paths, const uint8_t[::1] mute,
    const double[::1] gain, double change_link, double change_rate, const double[::1] free,
    bint pressing, Py_ssize_t[::1] raised, double[::1] rates,
)

cdef inline bint bare(Row[::1] rows, Py_ssize_t i)

@cython.locals(i=Py_ssize_t, k=Py_ssize_t, n=Py_ssize_t, waits=cython.bint)
cdef Py_ssize_t keep_room(
    Row[::1] rows, const int32_t[:, ::1] paths, Py_ssize_t[::1] raised, const double[::1] gain,
    const double[::1] room, double[::1] base, double[::1] rates,
)

@cython.locals(k=Py_ssize_t, raised=Py_ssize_t)
cpdef Py_ssize_t set_grants(
    Row[::1] rows, const Py_ssize_t[::1] at, const double[::1] rates, int64_t seq
)

@cython.locals(
    i=Py_ssize_t, k=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t, part=double, wished=double[::1]
)
cdef void share_out(
    Row[::1] rows, const int32_t[:, ::1] paths, const Py_ssize_t[::1] raised,
    const double[::1] base, double[::1] room, double[::1] rates, bint first,
)

@cython.locals(h=Py_ssize_t, link=Py_ssize_t, part=double)
cdef double least_part(
    const int32_t[:, ::1] paths, Py_ssize_t i, const double[::1] wished, const double[::1] room
)

@cython.locals(h=Py_ssize_t)
cdef inline bint owes(const int32_t[:, ::1] paths, Py_ssize_t i, const double[::1] room)
