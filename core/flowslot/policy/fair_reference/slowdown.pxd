# SPDX-License-Identifier: Apache-2.0
# Types of slowdown.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from flowslot.policy.fair_reference.fluid cimport meets
from flowslot.policy.fill cimport floats_t, given_t, rows_t
from flowslot.policy.job_links cimport JobLinks

cdef double _second, _similar

@cython.locals(said=floats_t)
cpdef void shorten(const int64_t[:] job, given_t period, floats_t takes)
@cython.locals(alone=double)
cpdef void measure(
    JobLinks cells, given_t need, given_t goodput, given_t compute, given_t takes,
    double[:, ::1] found,
)
@cython.locals(
    slowdowns=double[::1], lengths=double[::1], uses=rows_t, total=double, n=Py_ssize_t, counts=cython.bint,
)
cpdef void spare(JobLinks cells, given_t need, double[:, ::1] found, uint8_t[::1] lags)
