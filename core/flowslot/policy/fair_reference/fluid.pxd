# SPDX-License-Identifier: Apache-2.0
# Types of fluid.py, for the compiler. `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

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

# struct Group from flowslot.policy.fair_reference.fluid:GROUP
cdef packed struct Group:
    int64_t job
    double bytes
    double weight
    double left
    double speed
# end

cdef double _inf, _second, _rounding, _pause, _pause_ns, _least_ns, _smoothing
cdef int _most_work

@cython.locals(g=Py_ssize_t, h=Py_ssize_t)
cpdef void add_up(
    const Group[::1] groups, const int32_t[:, ::1] paths, double[:, ::1] need
)

@cython.locals(
    work=double[:, ::1], sends=double[::1], waits=double[::1], idles=double[::1], i=Py_ssize_t,
    j=Py_ssize_t,
)
cpdef void see(
    double now, Job[::1] jobs, Group[::1] groups, const double[:, ::1] need,
    const int64_t[:] job, const double[::1] remaining, const double[::1] wait,
    const double[::1] idle,
)

@cython.locals(took=double)
cdef void begin_anew(Job[::1] jobs, Group[::1] groups, Py_ssize_t j, double at)

@cython.locals(others=Py_ssize_t, k=Py_ssize_t)
cdef void forgive(Job[::1] jobs, Group[::1] groups, Py_ssize_t j, const double[:, ::1] need)

cdef void restart(Job[::1] jobs, Group[::1] groups, Py_ssize_t j)

@cython.locals(link=Py_ssize_t)
cdef bint meet(const double[:, ::1] need, Py_ssize_t j, Py_ssize_t k)

@cython.locals(
    work=double[:, ::1], rows=Py_ssize_t[:, ::1], now=double, left=double, stale=cython.bint,
    n=Py_ssize_t, j=Py_ssize_t, step=double,
)
cpdef void run(
    double begin, double end, Job[::1] jobs, Group[::1] groups, const int32_t[:, ::1] paths,
    const double[::1] goodput,
)

@cython.locals(known=Py_ssize_t[::1], j=Py_ssize_t, g=Py_ssize_t)
cdef void count(Job[::1] jobs, Group[::1] groups, double now)

@cython.locals(k=Py_ssize_t, g=Py_ssize_t, j=Py_ssize_t, step=double)
cdef double until_next(
    Job[::1] jobs, Group[::1] groups, const Py_ssize_t[::1] sending, double now, double most
)

@cython.locals(k=Py_ssize_t, g=Py_ssize_t, j=Py_ssize_t, ended=cython.bint)
cdef bint send(
    Job[::1] jobs, Group[::1] groups, const Py_ssize_t[::1] sending, double now, double step
)

cdef void end_iteration(Job[::1] jobs, Py_ssize_t j, double now)

@cython.locals(g=Py_ssize_t)
cdef void start(Job[::1] jobs, Group[::1] groups, Py_ssize_t j)

@cython.locals(n=Py_ssize_t, g=Py_ssize_t, j=Py_ssize_t)
cdef Py_ssize_t find_sending(Job[::1] jobs, Group[::1] groups, Py_ssize_t[::1] sending)

@cython.locals(
    left=double[::1], wish=double[::1], n=Py_ssize_t, k=Py_ssize_t, link=Py_ssize_t,
    level=double, step=double, visits=Py_ssize_t,
)
cdef Py_ssize_t find_speeds(
    Group[::1] groups, const int32_t[:, ::1] paths, const double[::1] goodput,
    const Py_ssize_t[::1] sending, Py_ssize_t[::1] rising, double[:, ::1] work,
)

@cython.locals(link=Py_ssize_t, k=Py_ssize_t, h=Py_ssize_t)
cdef void add_wishes(
    Group[::1] groups, const int32_t[:, ::1] paths, const Py_ssize_t[::1] rising,
    double[::1] wish,
)

@cython.locals(others=Py_ssize_t, k=Py_ssize_t, g=Py_ssize_t)
cdef Py_ssize_t settle(
    Group[::1] groups, const int32_t[:, ::1] paths, const double[::1] goodput,
    Py_ssize_t[::1] rising, const double[::1] left, double level,
)

@cython.locals(last=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t)
cdef bint crosses_full(
    const int32_t[:, ::1] paths, Py_ssize_t g, const double[::1] goodput,
    const double[::1] left,
)
