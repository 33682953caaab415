# SPDX-License-Identifier: Apache-2.0
# Types of shares.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from flowslotd.flows.rows cimport Row, remains, whole

cdef double _keep_ratio, _keep_slack, _full
cdef int64_t _kept_before, _kept_after, _never, _second, _stalled, _left

cpdef typed(Row[::1] rows)
cdef double size_of(Row[::1] rows, Py_ssize_t i)
@cython.locals(sent=double)
cdef double left(int64_t now, Row[::1] rows, Py_ssize_t i)
@cython.locals(size=double)
cpdef void add_up(
    int64_t now, Row[::1] rows, bint tops_up, int64_t[:, ::1] times, double[:, ::1] sizes,
)
@cython.locals(keep=cython.bint, weight=double[::1], sums=double[:, ::1])
cpdef void share_out(
    int64_t now, Row[::1] rows, const double[:, ::1] terms, uint8_t[::1] changed,
)
cpdef void hand_out(Row[::1] rows, const double[:, ::1] terms, uint8_t[::1] changed)
@cython.locals(coming=cython.bint)
cdef double weigh(int64_t now, Row[::1] rows, Py_ssize_t i, bint at_work)
@cython.locals(lasts=double)
cdef void fill(const Row[::1] rows, double[::1] weight, double[:, ::1] sums)
