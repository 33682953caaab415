# SPDX-License-Identifier: Apache-2.0
# Types of slot_check.py, for the compiler.
cimport cython
from libc.stdint cimport int64_t

cdef int64_t _taken, _torn, _strange, _max_bytes, _max_count, _idle, _active
cdef Py_ssize_t _family, _cookie, _iteration, _ready, _posted, _done, _total, _start, _update

@cython.locals(n=Py_ssize_t, s=Py_ssize_t, seq=int64_t)
cpdef Py_ssize_t changed(
    const int64_t[:, ::1] live, const int64_t[::1] seen, Py_ssize_t[::1] at, int64_t[::1] seqs
)

@cython.locals(
    i=Py_ssize_t, s=Py_ssize_t, left=Py_ssize_t, verdict=int64_t, at=Py_ssize_t[::1],
    seqs=int64_t[::1], verdicts=int64_t[::1],
)
cpdef Py_ssize_t settle(
    const int64_t[:, ::1] live, const int64_t[:, ::1] words, int64_t[:, ::1] good,
    int64_t[::1] seen, tuple found,
)

@cython.locals(state=int64_t)
cdef bint is_sound(
    const int64_t[:, ::1] words, Py_ssize_t i, const int64_t[:, ::1] good, Py_ssize_t s
)

@cython.locals(word=Py_ssize_t)
cdef bint is_same(
    const int64_t[:, ::1] words, Py_ssize_t i, const int64_t[:, ::1] good, Py_ssize_t s
)

@cython.locals(
    word=Py_ssize_t, most=int64_t, total=int64_t, ready=int64_t, in_order=cython.bint,
    in_time=cython.bint,
)
cdef bint is_true(
    const int64_t[:, ::1] words, Py_ssize_t i, const int64_t[:, ::1] good, Py_ssize_t s
)
