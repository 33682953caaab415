# SPDX-License-Identifier: Apache-2.0
# Types of fluid.py, for the compiler, which infers those of variables that are not named here.
# `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from flowslot.policy.fill cimport chosen_t, floats_t, given_t, paths_t, rows_t, weighted

# struct Job from flowslot.policy.fair_reference.fluid:JOB
cdef packed struct Job:
    double now
    uint8_t runs
    int64_t lead
    uint8_t sends
    int64_t under_way
    double until
    double compute
    uint8_t active
    double ended_at
# end

cdef double _inf, _second, _rounding, _pause, _pause_ns, _least_ns, _smoothing
cdef int _most_work

@cython.locals(last=Py_ssize_t, busiest=floats_t, most=double)
cpdef void sum_up(
    paths_t paths, const int64_t[:] of, const int64_t[:] job, given_t size, given_t sockets,
    double[:, ::1] sums, rows_t member, double[:, ::1] need,
)
cdef bint meet(const double[:, ::1] need, Py_ssize_t j, Py_ssize_t k)

cdef class Run:
    cdef double slack, now
    cdef object all_jobs, all_left, numbers, aggregates, room, job_rows
    cdef Job[::1] typed, jobs
    cdef floats_t left, speed
    cdef const int64_t[:] job
    cdef given_t volume

    cdef void make_room(self, Py_ssize_t n)
    @cython.locals(work=double[:, ::1], sends=floats_t, waits=floats_t, idles=floats_t)
    cpdef void see(
        self, double now, const double[:, ::1] need, const int64_t[:] job, given_t remaining,
        given_t wait, given_t idle,
    )
    @cython.locals(took=double)
    cdef void begin_anew(self, Py_ssize_t j, double at)
    cdef void forgive(self, Py_ssize_t j, const double[:, ::1] need)
    cdef void restart(self, Py_ssize_t j)
    @cython.locals(
        left=double, before=double, stale=cython.bint, limit=floats_t, rate=floats_t, sending=rows_t, n=Py_ssize_t
    )
    cpdef void advance(
        self, double now, const int64_t[:] job, paths_t paths, given_t goodput, given_t volume,
        given_t weight,
    )
    cdef inline bint takes_part(self, Py_ssize_t j)
    cdef inline bint computes(self, Py_ssize_t j)
    @cython.locals(known=rows_t)
    cdef void count(self)
    @cython.locals(n=Py_ssize_t, sends=cython.bint)
    cdef Py_ssize_t find_sending(self, rows_t sending, floats_t limit)
    @cython.locals(step=double)
    cdef double until_next(self, chosen_t sending, double most)
    @cython.locals(ended=cython.bint)
    cdef bint send(self, chosen_t sending, double step)
    @cython.locals(now=double)
    cdef void end_iteration(self, Py_ssize_t j)
    cdef void start(self, Py_ssize_t j)
