# SPDX-License-Identifier: Apache-2.0
# Types of slot_check.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int64_t

ctypedef const int64_t[:, ::1] words_t

cdef int64_t _taken, _torn, _strange, _max_bytes, _max_count, _idle, _active
cdef Py_ssize_t _family, _cookie, _iteration, _ready, _posted, _done, _total, _start, _update

cpdef Py_ssize_t changed(
    words_t live, const int64_t[::1] seen, Py_ssize_t[::1] at, int64_t[::1] seqs
)
@cython.locals(at=Py_ssize_t[::1], seqs=int64_t[::1], verdicts=int64_t[::1])
cpdef Py_ssize_t settle(
    words_t live, words_t words, int64_t[:, ::1] good, int64_t[::1] seen, tuple found
)
cdef bint is_sound(words_t words, Py_ssize_t i, words_t good, Py_ssize_t s)
cdef bint is_same(words_t words, Py_ssize_t i, words_t good, Py_ssize_t s)
@cython.locals(in_order=bint, in_time=bint)
cdef bint is_true(words_t words, Py_ssize_t i, words_t good, Py_ssize_t s)
