# SPDX-License-Identifier: Apache-2.0
# Types of gate.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

cdef class Transfers:
    cdef readonly int32_t[:, ::1] paths
    cdef readonly Py_ssize_t[::1] ready, asked, order, count, holder
    cdef readonly double[::1] size, left
    cdef readonly int64_t[::1] service
    cdef readonly uint8_t[::1] sends

    cpdef void clear(self)
    cpdef void occupy(self, Py_ssize_t i)
    @cython.locals(k=Py_ssize_t)
    cpdef Py_ssize_t most(self, Py_ssize_t i)

cdef class Gate:
    cpdef bint admits(self, Transfers transfers, Py_ssize_t i, Py_ssize_t n)
    @cython.locals(waiting=Py_ssize_t)
    cpdef void decide(self, Transfers transfers, Py_ssize_t n)

@cython.locals(k=Py_ssize_t)
cdef Py_ssize_t insert(Transfers transfers, Py_ssize_t n, Py_ssize_t i)
@cython.locals(later=cython.bint)
cdef bint after(Transfers transfers, Py_ssize_t i, Py_ssize_t j)
