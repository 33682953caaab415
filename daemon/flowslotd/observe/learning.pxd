# SPDX-License-Identifier: Apache-2.0
# Types of learning.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int64_t, uint64_t

from flowslotd.flows.rows cimport Row, headers, whole

cdef double SMOOTHING, WASTED, USED, ROOM, _inf, _second
cdef int WASTES
cdef int64_t MOST_PHASES, SHORTEST, _unreported, _active, _window
cdef Py_ssize_t _iteration, _ready, _posted, _done, _total, _start, _phases, _period

cpdef typed(Row[::1] rows)
@cython.locals(ended=bint)
@cython.locals(present=int64_t)
cdef bint missed(const Row[::1] rows, Py_ssize_t r, const int64_t[:, ::1] words, Py_ssize_t s)
cdef void learn_unreported(Row[::1] rows, Py_ssize_t r)
cdef int64_t reported(const Row[::1] rows, Py_ssize_t r, int64_t sent, int64_t target)
cdef void supply(int64_t now, Row[::1] rows, Py_ssize_t r, bint still, bint dry)
@cython.locals(elapsed=int64_t, rate=double)
cdef void measure(
    int64_t now, Row[::1] rows, Py_ssize_t r, int64_t counter, int64_t backlog, bint began,
    bint counted,
)
cdef void judge(Row[::1] rows, Py_ssize_t r, int64_t moved, double used, double rate)
cdef Py_ssize_t find(const uint64_t[::1] cookies, uint64_t cookie)
@cython.locals(
    working=bint, kernel=bint, began=bint, joined=bint, over=bint, same=bint, late=bint, still=bint,
    counted=bint, base=int64_t, way=int64_t,
)
cpdef Py_ssize_t advance(
    int64_t now, Row[::1] rows, const Py_ssize_t[::1] at, const int64_t[:, ::1] words,
    const Py_ssize_t[::1] slots, const uint64_t[::1] cookies, const int64_t[:, ::1] counters,
    bint all_late,
)
@cython.locals(phases=int64_t, weight=double)
cdef void begin(
    int64_t now, Row[::1] rows, Py_ssize_t r, bint late, int64_t said,
    int64_t period,
)
cdef int64_t smooth(int64_t old, int64_t new, double weight)
cpdef int signs(
    Row[::1] rows, const Py_ssize_t[::1] at, bint all_suppressed, bint ends_are_reported,
)
@cython.locals(heard=bint)
cpdef Py_ssize_t watch(Row[::1] rows, bint all_suppressed, Py_ssize_t[::1] at)
cpdef void drain(Row[::1] rows, const Py_ssize_t[::1] ended, int64_t[:, ::1] at_work)
