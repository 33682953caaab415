# SPDX-License-Identifier: Apache-2.0
# Types of job_links.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int64_t

from flowslot.policy.fill cimport floats_t, given_t, paths_t, rows_t

cdef double _inf

cdef class JobLinks:
    cdef readonly Py_ssize_t count, links
    cdef readonly rows_t link, start, first, following
    cdef readonly Py_ssize_t[:, ::1] cell
    cdef rows_t latest

    @cython.locals(i=Py_ssize_t, count=Py_ssize_t)
    cpdef void find(self, paths_t paths, const int64_t[:] job)
    cdef void clear(self, floats_t sums)
    cdef void add(self, Py_ssize_t i, double amount, floats_t sums)
    cdef void contested(self, given_t need, rows_t links)
    @cython.locals(seconds=double)
    cdef double bottleneck(self, given_t need, Py_ssize_t job, given_t room, double least)

cpdef double lasts(double volume, double rate)
