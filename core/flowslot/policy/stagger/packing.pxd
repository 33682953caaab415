# SPDX-License-Identifier: Apache-2.0
# Types of packing.py, for the compiler, which infers those of variables that are not named here.
cimport cython

from flowslot.policy.fair_reference.fluid cimport meets
from flowslot.policy.fill cimport floats_t, given_t, rows_t
from flowslot.policy.job_links cimport JobLinks

cdef double _packs
cdef Py_ssize_t _reach

@cython.locals(
    room=floats_t, speeds=floats_t, uses=rows_t, job=Py_ssize_t, other=Py_ssize_t, at=Py_ssize_t, i=Py_ssize_t,
)
cpdef void pack(JobLinks cells, given_t need, given_t capacity, given_t worth, rows_t order)
cdef double both(
    JobLinks cells, given_t need, given_t worth, Py_ssize_t first, Py_ssize_t then, floats_t room,
)
cdef double speed(JobLinks cells, given_t need, Py_ssize_t job, floats_t room)
cdef void hand(JobLinks cells, given_t need, Py_ssize_t job, double rate, floats_t room)
cdef void mark(JobLinks cells, given_t need, Py_ssize_t job, rows_t uses, Py_ssize_t value)
