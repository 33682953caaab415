# SPDX-License-Identifier: Apache-2.0
# Types of adadual.py, for the compiler, which infers those of variables that are not named here.
cimport cython

from flowslot.policy.gate cimport Gate, Transfers

cdef double _inf

cdef class AdaDual(Gate):
    cdef readonly double b, eta
    cdef readonly Py_ssize_t ways
    cdef readonly bint every, on_equal
    cdef double[::1] running

    @cython.locals(most=Py_ssize_t, link=Py_ssize_t, begins=cython.bint)
    cpdef bint admits(self, Transfers transfers, Py_ssize_t i, Py_ssize_t n)
    @cython.locals(begins=cython.bint)
    cdef bint shorter(self, Transfers transfers, Py_ssize_t i, Py_ssize_t old)
    @cython.locals(m=Py_ssize_t, at=Py_ssize_t)
    cdef bint best_now(self, Transfers transfers, Py_ssize_t i, Py_ssize_t link, Py_ssize_t n)

cdef bint uses(Transfers transfers, Py_ssize_t i, Py_ssize_t link)
@cython.locals(best=Py_ssize_t, least=double, cost=double)
cpdef Py_ssize_t best_start(double b, double eta, const double[::1] left, double size)
@cython.locals(
    m=Py_ssize_t, k=Py_ssize_t, active=Py_ssize_t, now=double, total=double, sent=double,
    goal=double, each=double,
)
cpdef double total_ends(double b, double eta, const double[::1] left, double size, Py_ssize_t after)
