# SPDX-License-Identifier: Apache-2.0
# Types of shares.py, for the compiler.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from flowslotd.flows.rows cimport Row, whole

cdef double _keep_ratio, _keep_slack, _full
cdef int64_t _kept_before, _kept_after, _never, _second, _stalled

@cython.locals(size=int64_t)
cdef double size_of(Row[::1] rows, Py_ssize_t i)

@cython.locals(more=double, target=int64_t, sent=double, remains=double)
cdef double left(int64_t now, Row[::1] rows, Py_ssize_t i)

@cython.locals(i=Py_ssize_t, b=Py_ssize_t, onset=int64_t, period=int64_t)
cpdef void add_up(
    int64_t now, Row[::1] rows, int64_t[:, ::1] times, double[:, ::1] sizes,
)

@cython.locals(
    i=Py_ssize_t, b=Py_ssize_t, before=double, size=double, flows=double, used=double,
    lasts=double, keep=cython.bint, part=double, weight=double[::1], sums=double[:, ::1],
)
cpdef void share_out(
    int64_t now, Row[::1] rows, const double[::1] rate, const uint8_t[::1] at_work,
    uint8_t[::1] changed,
)

@cython.locals(size=double, due=int64_t, coming=cython.bint)
cdef double weigh(int64_t now, Row[::1] rows, Py_ssize_t i, bint at_work)

@cython.locals(i=Py_ssize_t, b=Py_ssize_t, present=double, lasts=double)
cdef void fill(const Row[::1] rows, double[::1] weight, double[:, ::1] sums)
