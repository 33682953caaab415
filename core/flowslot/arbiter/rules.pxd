# SPDX-License-Identifier: Apache-2.0
# Types of rules.py, for the compiler, which infers those of variables that are not named here.
# `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

from flowslot.policy.fill cimport chosen_t, crosses, floats_t, given_t, link_sum, paths_t, rows_t

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
    int64_t as_of
    double least
    double cap
    double sockets
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
    int64_t hold
    int64_t reported_hold
    double most
    double reported_most
    uint8_t standing
    uint8_t reported_standing
    uint8_t anticipated
    int64_t borrower
    double lent
    int64_t pending_seq[4]
    double pending_rate[4]
# end

cdef Py_ssize_t _pending
cdef int64_t _never, _together
cdef double _least_left, _pressing, _of_link, _of_rate, _rounding, _second, _inf

# A view of memory that need not be checked again.
@cython.locals(flows=Row[::1])
cpdef table(rows)
@cython.locals(size=double)
cpdef void report(
    int64_t now, Row[::1] rows, chosen_t at, const int64_t[:, ::1] said,
    const double[:, ::1] bounds, int64_t[:, ::1] phases,
)
@cython.locals(sent=double)
cpdef void progress(int64_t now, Row[::1] rows)
@cython.locals(seq=int64_t, rate=double)
cpdef void acknowledge(int64_t now, Row[::1] rows, chosen_t at, const int64_t[::1] upto)
@cython.locals(until=int64_t)
cpdef int64_t see(
    int64_t now, Row[::1] rows, paths_t paths, Py_ssize_t n_links, const int64_t[:, ::1] phases,
    double[:, ::1] seen,
)
cdef inline double commitment(Row[::1] rows, Py_ssize_t i)
@cython.locals(rates=floats_t)
cpdef void commitments(Row[::1] rows, paths_t paths, floats_t sums)
@cython.locals(everywhere=double)
cpdef void add_up(paths_t paths, given_t rates, floats_t sums)
cpdef set overdue(Row[::1] rows, chosen_t at, int64_t before)
cpdef void find_shares(
    Row[::1] rows, paths_t paths, chosen_t at, given_t goodput, const int64_t[:, ::1] crossing,
    floats_t shares,
)
cpdef bint unsettled(Row[::1] rows)
@cython.locals(told=cython.bint)
cdef inline bint less_told(Row[::1] rows, Py_ssize_t i)
@cython.locals(told=cython.bint)
cdef inline bint untold(Row[::1] rows, Py_ssize_t i)
@cython.locals(due=int64_t)
cpdef void find_due(
    int64_t now, Row[::1] rows, paths_t paths, Py_ssize_t n_links, given_t edges,
    const int64_t[::1] times, chosen_t part, int64_t[::1] look_at,
)
@cython.locals(
    goal=double, small=double, goals=double[:, ::1], wanted=floats_t, found=floats_t, sums=floats_t
)
cpdef void settle(Row[::1] rows, paths_t paths, given_t target, int64_t since, given_t capacity)
@cython.locals(grants=floats_t, used=floats_t, room=double, rest=double, enough=cython.bint)
cdef void find_short(
    Row[::1] rows, paths_t paths, const uint8_t[::1] mute, given_t limit, floats_t first,
    floats_t others,
)
@cython.locals(first=floats_t, short=floats_t)
cpdef void in_the_way(
    Row[::1] rows, paths_t paths, const uint8_t[::1] mute, given_t limit, uint8_t[::1] found,
)
cpdef Py_ssize_t lower(
    int64_t now, Row[::1] rows, const uint8_t[::1] may, int64_t seq, rows_t lowered
)
cdef inline bint starved(Row[::1] rows, Py_ssize_t i)
cdef void find_borrowers(Row[::1] rows, floats_t wish, rows_t first, rows_t following)
@cython.locals(wish=floats_t, first=rows_t, following=rows_t)
cpdef void borrow(
    Row[::1] rows, chosen_t slots, Py_ssize_t n_groups, chosen_t lowered, floats_t gain
)
@cython.locals(base=floats_t, room=floats_t, n=Py_ssize_t)
cpdef Py_ssize_t find_raises(
    Row[::1] rows, paths_t paths, const uint8_t[::1] mute, given_t gain, given_t free, bint pressing,
    rows_t raised, floats_t rates,
)
cdef inline bint bare(Row[::1] rows, Py_ssize_t i)
@cython.locals(n=Py_ssize_t, owing=rows_t)
cdef Py_ssize_t keep_room(
    Row[::1] rows, paths_t paths, rows_t raised, given_t gain, given_t room, floats_t base,
    floats_t rates,
)
@cython.locals(wished=floats_t, part=double)
cdef void share_out(
    Row[::1] rows, paths_t paths, chosen_t raised, given_t base, floats_t room, floats_t rates,
    bint first,
)
