# SPDX-License-Identifier: Apache-2.0
# Types of top_up.py, for the compiler, which infers those of variables that are not named here.
cimport cython

cdef double _slowest, _fastest, _waiting, _alone, _fits_per_us, _burst_part, _least, _held_part
cdef double _noticed

@cython.locals(part=double)
cpdef double growth(double rate, double share, double path_share, double queue_us)
cpdef double burst(double share, double queue_us)
cpdef double highest(double rate, double ceiling, double share, double path_share)
@cython.locals(lowest=double)
cpdef double least(double share, double ceiling)
