# SPDX-License-Identifier: Apache-2.0
# Types of fluid.py, for the compiler. `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from flowslot.policy.fill cimport weighted

# struct Job from flowslot.policy.fair_reference.fluid:JOB
cdef packed struct Job:
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

@cython.locals(i=Py_ssize_t, h=Py_ssize_t)
cpdef void add_up(
    const int64_t[:] job, const int32_t[:, ::1] paths, const double[::1] volume,
    double[:, ::1] need,
)

@cython.locals(link=Py_ssize_t)
cdef bint meet(const double[:, ::1] need, Py_ssize_t j, Py_ssize_t k)

cdef class Run:
    cdef double slack, now
    cdef readonly object job_rows
    cdef Job[::1] jobs
    cdef double[::1] left, speed
    cdef const int64_t[:] job
    cdef const double[::1] volume

    cdef void keep_jobs(self, rows)

    @cython.locals(
        work=double[:, ::1], sends=double[::1], waits=double[::1], idles=double[::1],
        i=Py_ssize_t, j=Py_ssize_t,
    )
    cpdef void see(
        self, double now, const double[:, ::1] need, const int64_t[:] job,
        const double[::1] remaining, const double[::1] wait, const double[::1] idle,
    )

    @cython.locals(took=double)
    cdef void begin_anew(self, Py_ssize_t j, double at)

    @cython.locals(others=Py_ssize_t, k=Py_ssize_t)
    cdef void forgive(self, Py_ssize_t j, const double[:, ::1] need)

    cdef void restart(self, Py_ssize_t j)

    @cython.locals(
        then=double, left=double, stale=cython.bint, n=Py_ssize_t, limit=double[::1],
        rate=double[::1], sending=Py_ssize_t[::1], j=Py_ssize_t, k=Py_ssize_t, step=double,
    )
    cpdef void advance(
        self, double now, const int64_t[:] job, const int32_t[:, ::1] paths,
        const double[::1] goodput, const double[::1] volume, const double[::1] weight,
    )

    @cython.locals(known=Py_ssize_t[::1], i=Py_ssize_t, j=Py_ssize_t)
    cdef void count(self)

    @cython.locals(n=Py_ssize_t, i=Py_ssize_t, j=Py_ssize_t)
    cdef Py_ssize_t find_sending(self, Py_ssize_t[::1] sending, double[::1] limit)

    @cython.locals(k=Py_ssize_t, j=Py_ssize_t, step=double)
    cdef double until_next(self, const Py_ssize_t[::1] sending, double most)

    @cython.locals(k=Py_ssize_t, i=Py_ssize_t, j=Py_ssize_t, ended=cython.bint)
    cdef bint send(self, const Py_ssize_t[::1] sending, double step)

    cdef void end_iteration(self, Py_ssize_t j)

    @cython.locals(i=Py_ssize_t)
    cdef void start(self, Py_ssize_t j)
