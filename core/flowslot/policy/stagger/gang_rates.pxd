# SPDX-License-Identifier: Apache-2.0
# Types of gang_rates.py, for the compiler, which infers those of variables that are not named here.
# `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from flowslot.policy.fill cimport crosses, floats_t, given_t, link_sum, weighted, paths_t, rows_t, chosen_t
from flowslot.policy.job_links cimport JobLinks, lasts
from flowslot.policy.stagger.packing cimport pack

# struct Flow from flowslot.policy.stagger.gang_rates:FLOW
cdef packed struct Flow:
    int64_t job
    double remaining
    double cap
    double wait
    double period
    double due
    double next
    double idle
    double goal
    int64_t role
    uint8_t alone
    uint8_t uncontended
    double volume
    double rate
# end

# struct Job from flowslot.policy.stagger.gang_rates:JOB
cdef packed struct Job:
    uint8_t present
    uint8_t fresh
    uint8_t holds
    double lasts
    double wait
    double period
    double due
# end

cdef double _keep_ratio, _keep_slack, _near, _near_overdue, _overdue, _worthwhile, _full
cdef double _rounding, _inf
cdef int64_t _out, _active, _idle, _kept, _coming

cdef double earlier(double first, double edge)

cdef class Sharing:
    cdef readonly object rows, per_job
    cdef readonly JobLinks cells
    cdef Flow[::1] flows
    cdef Job[:, ::1] jobs
    cdef double[:, ::1] need, hold
    cdef floats_t sums, left, use, rates, most
    cdef readonly double[::1] seconds
    cdef rows_t links, meets
    cdef paths_t paths
    cdef given_t capacity, sockets

    @cython.locals(i=Py_ssize_t)
    cpdef void begin(self, paths_t paths, const int64_t[:] job, given_t capacity, given_t sockets)
    cdef void take_away(self)
    cdef void raise_to_fill(self)
    cdef bint fits(self, Py_ssize_t role, Py_ssize_t job)
    @cython.locals(seconds=double, rate=double, keeps=cython.bint, i=Py_ssize_t)
    cdef void take(self, Py_ssize_t role, Py_ssize_t job)
    @cython.locals(found=cython.bint, settled=cython.bint)
    cpdef bint serve_uncontended(self)
    @cython.locals(volume=double, unknown=cython.bint)
    cdef void find_uncontended(self)
    @cython.locals(flow=Flow)
    cpdef void classify(self)
    @cython.locals(flow=Flow, job=Job)
    cpdef void sum_up(self, Py_ssize_t role)
    @cython.locals(flow=Flow, job=Job, idle=cython.bint, near=cython.bint)
    cpdef void keep(self)
    @cython.locals(here=cython.bint)
    cpdef void find_coming(self)
    cpdef void time_active(self)
    cpdef void time_whole(self)
    cpdef void pack(self, rows_t order, given_t worth)
    @cython.locals(part=double)
    cpdef void lay_floors(self, given_t parts)
    @cython.locals(fit=cython.bint, i=Py_ssize_t)
    cpdef void serve(self, chosen_t order)
    cpdef void stand(self, Py_ssize_t role, chosen_t order)
    @cython.locals(more=double)
    cpdef void top_up(self, bint everyone)
    @cython.locals(flow=Flow, edge=double)
    cpdef void find_edges(self, floats_t first)
