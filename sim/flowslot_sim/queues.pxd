# SPDX-License-Identifier: Apache-2.0
# Types of queues.py, for the compiler, which infers those of variables that are not named here.
# `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from flowslot_sim.fluid cimport (
    arrive, brought, chosen_t, floats_t, given_t, paths_t, rows_t, work_t,
)

# struct Kernel from flowslot_sim.queues:KERNEL
cdef packed struct Kernel:
    uint8_t limited
    double most
    double growth
    double burst
    double least
    double buffer
    double longest
    double extra
    double paced
    double credit
    double wait
    double wait_before
    double epoch
    double has
    double sends
    double way
    double near
    double idle
# end

# struct Queue from flowslot_sim.queues:QUEUE
cdef packed struct Queue:
    double buffer
    double waiting
    int64_t head
    int64_t count
    double reserved
# end

ctypedef Kernel[::1] kernel_t
ctypedef Queue[::1] line_t

cdef double _inf, _eps, _burst_part, _epoch, _gap, _refill, _ahead, _segment, _small
cdef double _least_rtt, _least_window, _taken

@cython.locals(
    first=chosen_t, preds=chosen_t, may=double, up=Py_ssize_t, wait=double, n=Py_ssize_t, end=Py_ssize_t,
)
cpdef Py_ssize_t step(
    rows_t rows, kernel_t kernel, chosen_t live, paths_t paths, given_t capacity, tuple supply,
    line_t line, paths_t hops, floats_t coming, work_t batches, work_t sums, floats_t carried,
    double now, double seconds, Py_ssize_t[::1] at,
)
cdef void claim(
    rows_t rows, kernel_t kernel, chosen_t live, paths_t paths, chosen_t first, chosen_t preds,
    line_t line,
)
@cython.locals(link=Py_ssize_t, c=Py_ssize_t, size=double, space=double, part=double)
cdef void come(
    kernel_t kernel, line_t line, paths_t hops, floats_t coming, work_t batches, work_t sums,
    Py_ssize_t n, Py_ssize_t end, double room,
)
@cython.locals(link=Py_ssize_t, c=Py_ssize_t, room=double, part=double, goes=double)
cdef void go(
    rows_t rows, kernel_t kernel, line_t line, paths_t hops, floats_t coming, work_t batches,
    work_t sums, floats_t carried, Py_ssize_t n, Py_ssize_t end, given_t capacity, double seconds,
)
@cython.locals(most=double, before=double, part=double, came=double, whole=int64_t)
cdef double ready(rows_t rows, kernel_t kernel, chosen_t first, chosen_t preds, Py_ssize_t i)
@cython.locals(reserved=double, may=double, most=double, credit=double, rate=double, near=double)
cdef double pace(
    rows_t rows, kernel_t kernel, Py_ssize_t i, double line, double taken, double now, double seconds,
)
@cython.locals(gap=double)
cdef void wake(kernel_t kernel, Py_ssize_t i, double now)
@cython.locals(least=double, slower=double, room=double, up=double)
cdef void steer(
    rows_t rows, kernel_t kernel, Py_ssize_t i, double wait, double now, double seconds,
)
@cython.locals(rtt=double, window=double)
cdef void hold(rows_t rows, kernel_t kernel, Py_ssize_t i, double wait)
