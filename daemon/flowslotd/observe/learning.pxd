# SPDX-License-Identifier: Apache-2.0
# Types of learning.py, for the compiler.
cimport cython
from libc.stdint cimport int64_t, uint64_t

from flowslotd.flows.rows cimport Row, headers, whole

cdef double _smoothing
cdef int64_t _most_steps, _most_steps_rarely, _millisecond, _unreported, _active
cdef Py_ssize_t _iteration, _ready, _posted, _done, _total, _start

@cython.locals(beyond=int64_t, ended=cython.bint)
cdef void learn_unreported(Row[::1] rows, Py_ssize_t r)

@cython.locals(size=int64_t)
cdef int64_t reported(Row[::1] rows, Py_ssize_t r, int64_t sent, int64_t target)

@cython.locals(still=cython.bint)
cdef void supply(
    int64_t now, Row[::1] rows, Py_ssize_t r, int64_t ready, int64_t sent, int64_t remaining,
    bint began,
)

@cython.locals(low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t)
cdef Py_ssize_t find(const uint64_t[::1] cookies, uint64_t cookie)

@cython.locals(
    i=Py_ssize_t, r=Py_ssize_t, s=Py_ssize_t, place=Py_ssize_t, iteration=int64_t, ready=int64_t,
    posted=int64_t, done=int64_t, total=int64_t, working=cython.bint, kernel=cython.bint,
    counter=int64_t, seen=cython.bint, began=cython.bint, base=int64_t, most=int64_t,
    joined=cython.bint, over=cython.bint, end=int64_t, target=int64_t, sent=int64_t, remaining=int64_t,
    rarely=cython.bint, same=cython.bint, moved=Py_ssize_t,
)
cpdef Py_ssize_t advance(
    int64_t now, Row[::1] rows, const Py_ssize_t[::1] at, const int64_t[:, ::1] words,
    const Py_ssize_t[::1] slots, const uint64_t[::1] cookies, const int64_t[::1] acked,
    bint all_suppressed,
)

@cython.locals(
    onset=int64_t, start=int64_t, steps=int64_t, most=int64_t, sample=int64_t, weight=double
)
cdef void begin(int64_t now, Row[::1] rows, Py_ssize_t r, bint rarely, int64_t said)

cdef int64_t smooth(int64_t old, int64_t new, double weight)

@cython.locals(i=Py_ssize_t, r=Py_ssize_t, result=int)
cpdef int signs(Row[::1] rows, const Py_ssize_t[::1] at, bint all_suppressed, bint ends_are_reported)

@cython.locals(i=Py_ssize_t, n=Py_ssize_t, end=int64_t, heard=cython.bint)
cpdef Py_ssize_t watch(Row[::1] rows, bint all_suppressed, Py_ssize_t[::1] at)

@cython.locals(i=Py_ssize_t)
cpdef void drain(Row[::1] rows, const Py_ssize_t[::1] ended, int64_t[:, ::1] at_work)
