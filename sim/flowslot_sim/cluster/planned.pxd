# SPDX-License-Identifier: Apache-2.0
# Types of planned.py, for the compiler, which infers those of variables that are not named here.
from flowslot_sim.cluster.sharing cimport Sharing

cdef class Planned(Sharing):
    cdef readonly double[::1] base
    cpdef void enter(self, Py_ssize_t i)
    cpdef void reserve(self, Py_ssize_t i, double rate)
    cpdef void refresh(self)
    cpdef Py_ssize_t share(self)
