# SPDX-License-Identifier: Apache-2.0
# Types of srsf_chunked.py, for the compiler, which infers those of variables not named here.
cimport cython

from flowslot.policy.gate cimport Gate, Transfers

cdef class ChunkedSrsf(Gate):
    cpdef bint admits(self, Transfers transfers, Py_ssize_t i, Py_ssize_t n)
    @cython.locals(at=Py_ssize_t)
    cpdef void decide(self, Transfers transfers, Py_ssize_t n)

@cython.locals(later=cython.bint)
cdef bint more(Transfers transfers, Py_ssize_t i, Py_ssize_t j)
