# SPDX-License-Identifier: Apache-2.0
# Types of loops.py, for the compiler. Job: the fields of JOB, in the same order; that they are the
# same is checked when arrays of them are made.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

cdef packed struct Job:
    uint8_t runs
    int64_t lead
    double left
    double until
    double compute
    double weight
    double most
    double speed
    uint8_t active
    double ended_at

cdef double _inf, _second, _rounding, _pause, _pause_ns, _least_ns, _smoothing
cdef int _most_steps

@cython.locals(i=Py_ssize_t, h=Py_ssize_t)
cpdef void add_up(
    const int32_t[:, ::1] paths, const int64_t[:] job, const double[::1] volume,
    double[:, ::1] need, double[:, ::1] flows,
)

@cython.locals(
    work=double[:, ::1], sends=double[::1], waits=double[::1], idles=double[::1], i=Py_ssize_t,
    j=Py_ssize_t,
)
cpdef void see(
    double now, Job[::1] jobs, const double[:, ::1] need, const int64_t[:] job,
    const double[::1] remaining, const double[::1] wait, const double[::1] idle,
)

@cython.locals(took=double)
cdef void begin_anew(Job[::1] jobs, Py_ssize_t j, double at)

@cython.locals(others=Py_ssize_t, k=Py_ssize_t)
cdef void forgive(Job[::1] jobs, Py_ssize_t j, const double[:, ::1] need)

@cython.locals(link=Py_ssize_t)
cdef bint meet(const double[:, ::1] need, Py_ssize_t j, Py_ssize_t k)

@cython.locals(
    work=double[:, ::1], now=double, stale=cython.bint, j=Py_ssize_t, step=double
)
cpdef void run(
    double begin, double end, Job[::1] jobs, const double[:, ::1] need,
    const double[:, ::1] flows, const double[::1] goodput,
)

@cython.locals(j=Py_ssize_t, link=Py_ssize_t)
cdef void find_most(Job[::1] jobs, const double[:, ::1] need, const double[:, ::1] flows)

@cython.locals(j=Py_ssize_t, step=double)
cdef double until_next(Job[::1] jobs, double now, double most)

@cython.locals(j=Py_ssize_t, link=Py_ssize_t)
cdef void add_wishes(Job[::1] jobs, const double[:, ::1] need, double[::1] wish)

cdef bint advance(Job[::1] jobs, Py_ssize_t j, double now, double step)

@cython.locals(
    left=double[::1], wish=double[::1], waiting=Py_ssize_t, j=Py_ssize_t, link=Py_ssize_t,
    level=double, step=double,
)
cdef void find_speeds(
    Job[::1] jobs, const double[:, ::1] need, const double[::1] goodput, double[:, ::1] work
)

@cython.locals(
    left=double[::1], wish=double[::1], n=Py_ssize_t, j=Py_ssize_t, link=Py_ssize_t,
    full=cython.bint,
)
cdef Py_ssize_t settle(
    Job[::1] jobs, const double[:, ::1] need, const double[::1] goodput, double[:, ::1] work,
    double level,
)
