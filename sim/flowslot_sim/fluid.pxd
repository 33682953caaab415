# SPDX-License-Identifier: Apache-2.0
# Types of fluid.py, for the compiler. `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int32_t, uint8_t

# struct Row from flowslot_sim.fluid:FLOW
cdef packed struct Row:
    uint8_t active
    uint8_t ended
    double total
    double sent
    double own
    double head
    double reserved
    double ceiling
    double rate
    double limit
    uint8_t bound
# end

cdef double _inf, _near, _eps, _rounding
cdef int _rounds, _free, _fed, _dry

cdef inline int stage(Row[::1] rows, Py_ssize_t i, Py_ssize_t p)

@cython.locals(k=Py_ssize_t, h=Py_ssize_t, m=Py_ssize_t, pad=Py_ssize_t, link=Py_ssize_t)
cpdef Py_ssize_t compact(
    const int32_t[:, ::1] paths, const Py_ssize_t[::1] live, const double[::1] capacity,
    int32_t[::1] numbers, int32_t[:, ::1] small, double[::1] capacities,
)

@cython.locals(n=Py_ssize_t, i=Py_ssize_t, j=Py_ssize_t, k=Py_ssize_t, state=int)
cdef Py_ssize_t find_bound(
    Row[::1] rows, const Py_ssize_t[::1] live, const Py_ssize_t[::1] first,
    const Py_ssize_t[::1] preds,
)

@cython.locals(k=Py_ssize_t, state=int, least=double)
cdef double supply(
    Row[::1] rows, const Py_ssize_t[::1] first, const Py_ssize_t[::1] preds, Py_ssize_t i
)

@cython.locals(
    i=Py_ssize_t, j=Py_ssize_t, changed=cython.bint, least=double, too_fast=cython.bint,
    held_up=cython.bint,
)
cdef bint follow(
    Row[::1] rows, const Py_ssize_t[::1] live, const Py_ssize_t[::1] first,
    const Py_ssize_t[::1] preds,
)

@cython.locals(
    i=Py_ssize_t, k=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t, reserved=cython.bint,
    most=double[::1], got=double[::1], left=double[::1],
)
cdef void allot(
    Row[::1] rows, const Py_ssize_t[::1] live, const int32_t[:, ::1] small,
    const double[::1] capacity, double[:, ::1] work,
)

@cython.locals(i=Py_ssize_t, j=Py_ssize_t, bound=Py_ssize_t, changed=cython.bint, least=double)
cpdef void share(
    Row[::1] rows, const Py_ssize_t[::1] live, const int32_t[:, ::1] small,
    const double[::1] capacity, const Py_ssize_t[::1] first, const Py_ssize_t[::1] preds,
    double[:, ::1] work,
)

@cython.locals(
    soonest=double, rate=double, gap=double, lack=double, i=Py_ssize_t, j=Py_ssize_t,
    k=Py_ssize_t, p=Py_ssize_t
)
cpdef double until_next(
    Row[::1] rows, const Py_ssize_t[::1] live, const Py_ssize_t[::1] first,
    const Py_ssize_t[::1] preds,
)

@cython.locals(
    i=Py_ssize_t, j=Py_ssize_t, h=Py_ssize_t, k=Py_ssize_t, n=Py_ssize_t, sent=double
)
cpdef Py_ssize_t advance(
    Row[::1] rows, const Py_ssize_t[::1] live, double seconds, const int32_t[:, ::1] paths,
    double[::1] carried, Py_ssize_t[::1] at,
)
