# SPDX-License-Identifier: Apache-2.0
# Types of fluid.py, for the compiler, which infers those of variables that are not named here.
# `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

# struct Row from flowslot_sim.fluid:FLOW
cdef packed struct Row:
    uint8_t active
    double size
    int64_t begun
    double total
    double goal
    double sent
    double holds
    double own
    double head
    double reserved
    double ceiling
    double rate
    double limit
    uint8_t bound
# end

ctypedef Row[::1] rows_t
ctypedef const Py_ssize_t[::1] chosen_t
ctypedef const int32_t[:, ::1] paths_t
ctypedef const double[::1] given_t
ctypedef double[::1] floats_t
ctypedef double[:, ::1] work_t

cdef double _inf, _near, _eps, _rounding
cdef int _rounds, _free, _fed, _dry

cpdef double brought(rows_t rows, Py_ssize_t i, Py_ssize_t p)
cdef double forwarded(rows_t rows, Py_ssize_t i)

@cython.locals(came=double, own=double)
cdef int stage(rows_t rows, Py_ssize_t i, Py_ssize_t p)

@cython.locals(n=Py_ssize_t)
cdef Py_ssize_t find_bound(rows_t rows, chosen_t live, chosen_t first, chosen_t preds)

@cython.locals(least=double)
cdef double supply(rows_t rows, chosen_t first, chosen_t preds, Py_ssize_t i)

@cython.locals(changed=cython.bint, too_fast=cython.bint, held_up=cython.bint)
cdef bint follow(rows_t rows, chosen_t live, chosen_t first, chosen_t preds)

@cython.locals(reserved=cython.bint, most=floats_t, got=floats_t, left=floats_t)
cdef void allot(rows_t rows, chosen_t live, paths_t small, given_t capacity, work_t work)

@cython.locals(changed=cython.bint)
cpdef void share(
    rows_t rows, chosen_t live, paths_t small, given_t capacity, chosen_t first, chosen_t preds, work_t work,
)

@cython.locals(
    soonest=double, rate=double, gap=double, lack=double, came=double, own=double,
)
cpdef double until_next(rows_t rows, chosen_t live, chosen_t first, chosen_t preds)

@cython.locals(n=Py_ssize_t, sent=double)
cpdef Py_ssize_t advance(
    rows_t rows, chosen_t live, double seconds, paths_t paths, floats_t carried, Py_ssize_t[::1] at,
)

@cython.locals(n=Py_ssize_t)
cpdef Py_ssize_t arrive(rows_t rows, chosen_t live, Py_ssize_t[::1] at)
