# SPDX-License-Identifier: Apache-2.0
# Types of rows.py, for the compiler. `make pxd` writes the struct, and it is declared only here.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

# struct Row from flowslotd.flows.rows:ROW
cdef packed struct Row:
    uint64_t cookie
    int32_t job
    int32_t path
    int32_t aggregate
    uint8_t seen
    int64_t looked
    uint8_t active
    uint8_t drained
    uint8_t kernel
    int64_t iteration
    int64_t phases
    int64_t inc
    int64_t counter
    int64_t origin
    int64_t target
    int64_t remaining
    int64_t unreported
    int64_t unreported_last
    int64_t ready
    int64_t supplied
    double usable
    int64_t window_at
    int64_t window_from
    int64_t window_left
    double window_rate
    uint8_t wastes
    int64_t moved
    int64_t expected
    int64_t onset
    int64_t onset_inc
    int64_t onset_phases
    int64_t period
    int64_t watched
    uint8_t announced
    uint8_t suppressed
    double rate
    double ceiling
    double share
    double path_share
    double own_share
    int64_t queue_us
    double line
    int64_t uplink
    int64_t lender
# end

cdef int64_t _unreported, _trailing
cdef double _unknown

cpdef int64_t headers(int64_t unreported, int64_t target)

cpdef int64_t whole(int64_t unreported, int64_t target)

@cython.locals(more=double)
cpdef double remains(Row[::1] rows, Py_ssize_t i)

cpdef typed(Row[::1] rows)

@cython.locals(i=Py_ssize_t)
cpdef void bytes_of(Row[::1] rows, const Py_ssize_t[::1] at, double[::1] left, double[::1] sent)
