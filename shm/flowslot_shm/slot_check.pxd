# SPDX-License-Identifier: Apache-2.0
# Types of slot_check.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int64_t

ctypedef int64_t[:, ::1] words_t
ctypedef const int64_t[:, ::1] given_t

cdef int64_t _taken, _torn, _strange, _max_bytes, _max_count, _max_period, _free, _idle, _active
cdef int64_t _state, _range, _order, _backward
cdef Py_ssize_t _family, _cookie, _iteration, _ready, _posted, _done, _total, _start, _update, _phases
cdef Py_ssize_t _period

cpdef Py_ssize_t changed(
    given_t live, const int64_t[::1] seen, Py_ssize_t[::1] at, int64_t[::1] seqs
)
@cython.locals(at=Py_ssize_t[::1], seqs=int64_t[::1], verdicts=int64_t[::1])
cpdef Py_ssize_t settle(
    given_t live, words_t words, words_t good, int64_t[::1] seen, int64_t[::1] faults, tuple found
)
cdef bint is_same(given_t words, Py_ssize_t i, given_t good, Py_ssize_t s)
@cython.locals(bits=int64_t, same=bint)
cpdef int64_t repair(words_t words, Py_ssize_t i, given_t good, Py_ssize_t s)
cdef int64_t force(words_t words, Py_ssize_t i, Py_ssize_t word, int64_t right)
