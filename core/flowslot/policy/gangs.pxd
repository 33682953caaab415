# SPDX-License-Identifier: Apache-2.0
# Types of gangs.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int32_t

ctypedef const int32_t[:, ::1] paths_t
ctypedef double[::1] floats_t
ctypedef const double[::1] given_t
ctypedef const Py_ssize_t[::1] chosen_t

cdef double _inf

@cython.locals(need=floats_t)
cpdef void time_gangs(
    paths_t paths, chosen_t rows, chosen_t starts, given_t volume, given_t room, floats_t seconds,
)
@cython.locals(need=floats_t, gang=chosen_t, seconds=double)
cpdef void serve(
    paths_t paths, chosen_t rows, chosen_t starts, given_t volume, given_t cap, floats_t left,
    floats_t rates,
)
@cython.locals(seconds=double, each=double)
cdef double slowest(paths_t paths, chosen_t gang, given_t volume, given_t room, floats_t need)
