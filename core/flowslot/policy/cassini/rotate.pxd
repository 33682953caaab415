# SPDX-License-Identifier: Apache-2.0
# Types of rotate.py, for the compiler, which infers those of variables not named here.
cimport cython

cdef double _near

cdef class Search:
    cdef const double[:, ::1] demand
    cdef double[:, ::1] sums
    cdef double[::1] rest
    cdef const Py_ssize_t[::1] most
    cdef readonly Py_ssize_t[::1] best
    cdef Py_ssize_t[::1] chosen, twin
    cdef Py_ssize_t jobs, angles, left, spare
    cdef double capacity, floor, slack
    cdef readonly double least
    cdef readonly bint exact
    cdef bint equal(self, Py_ssize_t j, Py_ssize_t k)
    cpdef void go(self)
    @cython.locals(least=double, before=double, found=double)
    cdef double improve(self)
    @cython.locals(over=double, free=double, total=double, at=Py_ssize_t, start=Py_ssize_t)
    cdef void descend(self, Py_ssize_t j)
    cdef double beside(self, Py_ssize_t j, Py_ssize_t k)
    @cython.locals(last=Py_ssize_t, at=Py_ssize_t)
    cdef void others(self, Py_ssize_t j)
    @cython.locals(over=double, total=double, at=Py_ssize_t)
    cdef double excess(self, Py_ssize_t j, Py_ssize_t k)
    @cython.locals(most=Py_ssize_t, k=Py_ssize_t, before=Py_ssize_t, after=Py_ssize_t, least=double)
    cdef void centre(self, Py_ssize_t j)
