# SPDX-License-Identifier: Apache-2.0
# Types of fill.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int32_t

ctypedef const int32_t[:, ::1] paths_t
ctypedef double[::1] floats_t
ctypedef const double[::1] given_t
ctypedef Py_ssize_t[::1] rows_t
ctypedef const Py_ssize_t[::1] chosen_t

cdef double _inf

cpdef void link_sum(paths_t paths, given_t rates, floats_t sums)
cpdef void max_min(paths_t paths, given_t capacity, given_t limit, floats_t rate)
@cython.locals(
    work=floats_t, left=floats_t, share=floats_t, taken=floats_t, wish=floats_t, levels=floats_t,
    counts=rows_t, users=rows_t, tight=rows_t, rows=rows_t, n=Py_ssize_t,
)
cpdef Py_ssize_t weighted(paths_t paths, given_t capacity, given_t limit, given_t weight, floats_t rate)
cdef void find_shares(
    paths_t paths, chosen_t rows, given_t weight, given_t left, rows_t users, floats_t wish, floats_t share,
)
@cython.locals(level=double)
cdef void find_levels(
    paths_t paths, chosen_t rows, given_t limit, given_t weight, given_t share, chosen_t users,
    floats_t levels, rows_t tight,
)
cdef Py_ssize_t settle(
    paths_t paths, rows_t rows, given_t limit, given_t weight, given_t levels, chosen_t tight,
    floats_t rate, floats_t taken,
)
cpdef bint crosses(paths_t paths, Py_ssize_t i, chosen_t links)
