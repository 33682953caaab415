# SPDX-License-Identifier: Apache-2.0
# Types of handover.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport uint8_t

from flowslotd.flows.rows cimport Row

cpdef typed(Row[::1] rows)
@cython.locals(
    at=Py_ssize_t[:, ::1], n_lenders=Py_ssize_t, n_borrowers=Py_ssize_t, fastest=double[::1],
    known=cython.bint, suppressed=cython.bint, ended=cython.bint,
)
cpdef tuple candidates(Row[::1] rows, bint all_suppressed, double wanting, Py_ssize_t paths)
@cython.locals(taken=uint8_t[::1])
cpdef void pair(
    Row[::1] rows, const Py_ssize_t[::1] lenders, const Py_ssize_t[::1] borrowers,
    Py_ssize_t[::1] next_lender,
)
