# SPDX-License-Identifier: Apache-2.0
# Types of fill.py, for the compiler.
cimport cython
from libc.stdint cimport int32_t

cdef double _inf

@cython.locals(i=Py_ssize_t, h=Py_ssize_t)
cpdef void link_sum(const int32_t[:, ::1] paths, const double[::1] rates, double[::1] sums)

cpdef void max_min(
    const int32_t[:, ::1] paths, const double[::1] capacity, const double[::1] limit,
    double[::1] rate,
)

@cython.locals(
    last=Py_ssize_t, n=Py_ssize_t, visits=Py_ssize_t, i=Py_ssize_t, link=Py_ssize_t,
    left=double[::1], sums=double[:, ::1], share=double[::1], taken=double[::1],
    wish=double[::1], counts=Py_ssize_t[:, ::1], users=Py_ssize_t[::1], tight=Py_ssize_t[::1],
    rows=Py_ssize_t[::1], levels=double[::1],
)
cpdef Py_ssize_t weighted(
    const int32_t[:, ::1] paths, const double[::1] capacity, const double[::1] limit,
    const double[::1] weight, double[::1] rate,
)

@cython.locals(last=Py_ssize_t, k=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t)
cdef void find_shares(
    const int32_t[:, ::1] paths, const Py_ssize_t[::1] rows, const double[::1] weight,
    const double[::1] left, Py_ssize_t[::1] users, double[::1] wish, double[::1] share,
)

@cython.locals(
    last=Py_ssize_t, i=Py_ssize_t, k=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t, level=double
)
cdef void find_levels(
    const int32_t[:, ::1] paths, const Py_ssize_t[::1] rows, const double[::1] limit,
    const double[::1] weight, const double[::1] share, const Py_ssize_t[::1] users,
    double[::1] levels, Py_ssize_t[::1] tight,
)

@cython.locals(
    others=Py_ssize_t, i=Py_ssize_t, k=Py_ssize_t, h=Py_ssize_t, link=Py_ssize_t
)
cdef Py_ssize_t settle(
    const int32_t[:, ::1] paths, Py_ssize_t[::1] rows, const double[::1] limit,
    const double[::1] weight, const double[::1] levels, const Py_ssize_t[::1] tight,
    double[::1] rate, double[::1] taken,
)

@cython.locals(h=Py_ssize_t)
cpdef bint crosses(const int32_t[:, ::1] paths, Py_ssize_t i, const Py_ssize_t[::1] links)
