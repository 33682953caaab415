# SPDX-License-Identifier: Apache-2.0
# Types of fleet.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int32_t, int64_t

ctypedef const int32_t[:, ::1] paths_t
ctypedef double[::1] floats_t
ctypedef const double[::1] given_t
ctypedef double[:, ::1] table_t
ctypedef Py_ssize_t[::1] rows_t

cdef double _dust, _digits

@cython.locals(
    free=floats_t, cost=floats_t, best=floats_t, rank=rows_t, i=Py_ssize_t, slots=Py_ssize_t,
)
cpdef void plan_all(
    paths_t paths, const Py_ssize_t[::1] order, given_t need, given_t line, given_t limit,
    table_t load, table_t old, table_t new, bint rhs, bint atomic,
)
@cython.locals(link=Py_ssize_t, last=Py_ssize_t)
cdef void add(paths_t paths, Py_ssize_t i, table_t rates, double sign, table_t load)
@cython.locals(taken=double, link=Py_ssize_t, last=Py_ssize_t, times=Py_ssize_t)
cdef void look(
    paths_t paths, Py_ssize_t i, double line, given_t limit, table_t load, floats_t free, floats_t cost,
)
@cython.locals(least=double, total=double, value=double, chosen=Py_ssize_t, slots=Py_ssize_t)
cpdef void plan_one(double need, floats_t free, floats_t cost, rows_t rank, floats_t best, bint rhs)
@cython.locals(at=Py_ssize_t, spent=double)
cdef double fill(double need, Py_ssize_t n, floats_t free, floats_t cost, rows_t rank, floats_t best)
@cython.locals(whole=int64_t)
cdef double rounded(double x)
