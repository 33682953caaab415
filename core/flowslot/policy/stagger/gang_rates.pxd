# SPDX-License-Identifier: Apache-2.0
# Types of gang_rates.py, for the compiler. `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from flowslot.policy.fill cimport crosses, link_sum, max_min

# struct Flow from flowslot.policy.stagger.gang_rates:FLOW
cdef packed struct Flow:
    int64_t job
    double remaining
    uint8_t stalled
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

@cython.locals(h=Py_ssize_t)
cdef inline void add(
    const int32_t[:, ::1] paths, Py_ssize_t i, double amount, double[:, ::1] sums, Py_ssize_t job
)

@cython.locals(link=Py_ssize_t, job=Py_ssize_t, jobs=Py_ssize_t)
cdef void contested(const double[:, ::1] need, Py_ssize_t[::1] links)

cdef inline double lasts(double volume, double rate)

@cython.locals(link=Py_ssize_t, seconds=double)
cdef double bottleneck(
    const double[:, ::1] need, Py_ssize_t job, const double[::1] room, double least
)

@cython.locals(i=Py_ssize_t, edge=double, first=double, starts=double, ends=double)
cpdef double next_edge(
    const double[:] remaining, const double[:] following, const double[:] due,
    const double[:] idle,
)

cdef class Sharing:
    cdef readonly object shape, rows, per_job
    cdef Flow[::1] flows
    cdef Job[:, ::1] jobs
    cdef double[:, :, ::1] need, hold
    cdef double[:, ::1] sums
    cdef double[::1] left, use, rates, most
    cdef readonly double[::1] seconds
    cdef Py_ssize_t[::1] links, meets
    cdef const int32_t[:, ::1] paths
    cdef const double[::1] capacity

    @cython.locals(i=Py_ssize_t, link=Py_ssize_t)
    cpdef void begin(self, const int32_t[:, ::1] paths, const double[::1] capacity)

    @cython.locals(job=Py_ssize_t, link=Py_ssize_t)
    cdef void clear(self, double[:, ::1] sums)

    @cython.locals(link=Py_ssize_t)
    cdef void take_away(self)

    @cython.locals(i=Py_ssize_t, link=Py_ssize_t)
    cdef void raise_to_fill(self)

    @cython.locals(link=Py_ssize_t)
    cdef bint fits(self, Py_ssize_t role, Py_ssize_t job)

    @cython.locals(
        i=Py_ssize_t, seconds=double, enough=double, keeps=cython.bint, rate=double
    )
    cdef void take(self, Py_ssize_t role, Py_ssize_t job)

    @cython.locals(i=Py_ssize_t, job=Py_ssize_t, found=cython.bint, settled=cython.bint)
    cpdef bint serve_uncontended(self)

    @cython.locals(
        i=Py_ssize_t, job=Py_ssize_t, link=Py_ssize_t, closed=cython.bint, following=double,
        volume=double, unknown=cython.bint,
    )
    cdef void find_uncontended(self)

    @cython.locals(i=Py_ssize_t, flow=Flow)
    cpdef void classify(self)

    @cython.locals(i=Py_ssize_t, k=Py_ssize_t, flow=Flow, job=Job)
    cpdef void sum_up(self, Py_ssize_t role)

    @cython.locals(i=Py_ssize_t, flow=Flow, job=Job, idle=cython.bint, near=cython.bint)
    cpdef void keep(self)

    @cython.locals(i=Py_ssize_t, job=Py_ssize_t, here=cython.bint)
    cpdef void find_coming(self)

    @cython.locals(job=Py_ssize_t, link=Py_ssize_t)
    cpdef void time_active(self)

    @cython.locals(i=Py_ssize_t, job=Py_ssize_t, whole=double)
    cpdef void time_whole(self)

    @cython.locals(i=Py_ssize_t, job=Py_ssize_t, link=Py_ssize_t, total=double, part=double)
    cpdef void lay_floors(self, const double[::1] parts)

    @cython.locals(
        i=Py_ssize_t, k=Py_ssize_t, job=Py_ssize_t, link=Py_ssize_t, fit=cython.bint
    )
    cpdef void serve(self, const Py_ssize_t[::1] order)

    @cython.locals(k=Py_ssize_t, job=Py_ssize_t, alone=double, seconds=double)
    cpdef void stand(self, Py_ssize_t role, const Py_ssize_t[::1] order)

    @cython.locals(i=Py_ssize_t)
    cpdef void top_up(self)
