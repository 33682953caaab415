# SPDX-License-Identifier: Apache-2.0
# Types of fluid.py, for the compiler, which infers those of variables that are not named here.
# `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from flowslot.policy.fill cimport chosen_t, floats_t, given_t, paths_t, rows_t, weighted
from flowslot.policy.job_links cimport JobLinks

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
    uint8_t anew
    double counted
    double takes
# end

ctypedef const int64_t[::1] turns_t

cdef double _inf, _second, _rounding, _pause, _pause_ns, _least_ns, _smoothing, _same
cdef int _most_work

# A view of memory that need not be checked again.
@cython.locals(same=Job[::1])
cdef Job[::1] typed(rows)
@cython.locals(end=Py_ssize_t)
cpdef Py_ssize_t end_of(chosen_t numbers)
@cython.locals(numbers=chosen_t, now=turns_t, n=Py_ssize_t)
cpdef Py_ssize_t find_new(keys, int64_t[::1] turns, uint8_t[::1] new)
@cython.locals(most=double, size=double)
cpdef void sum_up(
    JobLinks cells, const int64_t[:] of, const int64_t[:] job, given_t remaining,
    given_t following, given_t sockets, double[:, ::1] sums, rows_t member, floats_t need,
)
cpdef bint meets(JobLinks cells, given_t need, Py_ssize_t k, rows_t uses)

cdef class Run:
    cdef double slack, now
    cdef object all_rows
    cdef chosen_t numbers, aggregates
    cdef Job[::1] all_jobs, unknown, room, jobs
    cdef floats_t all_left, floats, left, speed, limit, rate, begun, ended, over, rests
    cdef double[:, ::1] all_real
    cdef rows_t sending
    cdef const int64_t[:] job
    cdef given_t volume

    @cython.locals(n=Py_ssize_t)
    cpdef void begin(
        self, double now, jobs, const uint8_t[::1] gone, const uint8_t[::1] others, aggregates,
        const uint8_t[::1] new,
    )
    cpdef void end(self, uint8_t[::1] lags)
    cpdef void tell(self, floats_t compute, floats_t takes)
    @cython.locals(work=double[:, ::1], sends=floats_t, waits=floats_t, idles=floats_t)
    cpdef void see(
        self, double now, JobLinks cells, given_t need, const int64_t[:] of, given_t remaining,
        given_t wait, given_t idle,
    )
    cdef void overlap(self, Py_ssize_t k, double begun)
    @cython.locals(took=double, before=double)
    cdef void end_real(self, Py_ssize_t k, double at)
    @cython.locals(found=Py_ssize_t[:, ::1], over=rows_t, missing=rows_t)
    cdef rows_t find_over(self)
    @cython.locals(found=Py_ssize_t[:, ::1], over=rows_t, going=rows_t, begins=cython.bint)
    cdef rows_t find_sat_out(self, given_t sends)
    @cython.locals(took=double, before=double, weight=double)
    cdef void count_real(self, double now, rows_t over)
    @cython.locals(least=double)
    cdef double shortest(self, Py_ssize_t j)
    @cython.locals(rest=floats_t, found=Py_ssize_t[:, ::1], first=rows_t, anew=rows_t)
    cdef void begin_real(self, double now, given_t sends, given_t waits, JobLinks cells, given_t need)
    @cython.locals(known=cython.bint, first=cython.bint, paused=cython.bint, took=double)
    cdef bint begins_anew(self, Py_ssize_t k, double rest)
    @cython.locals(uses=rows_t)
    cdef void forgive(self, Py_ssize_t j, JobLinks cells, given_t need)
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
