# SPDX-License-Identifier: Apache-2.0
# Types of handover.py, for the compiler.
cimport cython
from libc.stdint cimport int32_t, uint8_t

from flowslotd.flows.rows cimport Row

@cython.locals(
    i=Py_ssize_t, d=Py_ssize_t, at=Py_ssize_t[:, ::1], n_lenders=Py_ssize_t, n_borrowers=Py_ssize_t,
    fastest=double[::1], known=cython.bint, suppressed=cython.bint, ended=cython.bint,
)
cpdef tuple candidates(Row[::1] rows, bint all_suppressed, double wanting, Py_ssize_t paths)

@cython.locals(
    i=Py_ssize_t, at=Py_ssize_t, job=int32_t, path=int32_t, taken=uint8_t[::1],
)
cpdef void pair(
    Row[::1] rows, const Py_ssize_t[::1] lenders, const Py_ssize_t[::1] borrowers,
    Py_ssize_t[::1] next_lender,
)
