# SPDX-License-Identifier: Apache-2.0
# Types of srsf.py, for the compiler.
from flowslot.policy.gate cimport Gate, Transfers

cdef class Srsf(Gate):
    cdef readonly Py_ssize_t ways
    cpdef bint admits(self, Transfers transfers, Py_ssize_t i, Py_ssize_t n)
