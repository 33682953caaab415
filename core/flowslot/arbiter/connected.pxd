# SPDX-License-Identifier: Apache-2.0
# Types of connected.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int64_t

from flowslot.policy.fill cimport paths_t, rows_t

cdef int64_t _free

@cython.locals(root=rows_t, number=rows_t, everywhere=cython.bint, at=Py_ssize_t, n=Py_ssize_t)
cpdef Py_ssize_t parts(
    const int64_t[:] session, const int64_t[:] job, paths_t paths, Py_ssize_t n_links,
    Py_ssize_t n_jobs, rows_t label,
)
cdef Py_ssize_t find(rows_t root, Py_ssize_t i)
cdef void join(rows_t root, Py_ssize_t i, Py_ssize_t j)
