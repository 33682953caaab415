# SPDX-License-Identifier: Apache-2.0
# Types of learning.py, for the compiler. `make pxd` writes the structs.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

# struct Row from flowslotd.observe.progress:ROW
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
    int64_t inc
    int64_t counter
    int64_t origin
    int64_t target
    int64_t remaining
    int64_t unreported
    int64_t unreported_last
    int64_t ready
    int64_t supplied
    int64_t expected
    int64_t onset
    int64_t onset_inc
    int64_t onset_iteration
    int64_t period
    int64_t watched
    uint8_t announced
    uint8_t quiet
    double rate
    double ceiling
    double share
    double own_share
    int64_t queue_us
    int64_t lender
# end

cdef double _smoothing, _keep_ratio, _keep_slack, _full
cdef int64_t _most_steps, _most_steps_quiet, _soon, _late, _never, _millisecond, _second, _stalled
cdef int64_t _unreported, _trailing
cdef int64_t _active
cdef Py_ssize_t _iteration, _ready, _posted, _done, _total, _start

@cython.locals(beyond=int64_t, ended=cython.bint)
cdef void learn_unreported(Row[::1] rows, Py_ssize_t r)

@cython.locals(known=int64_t)
cdef int64_t headers(Row[::1] rows, Py_ssize_t r, int64_t target)

cdef int64_t whole(Row[::1] rows, Py_ssize_t r, int64_t target)

@cython.locals(size=int64_t)
cdef int64_t reported(Row[::1] rows, Py_ssize_t r, int64_t sent, int64_t target)

@cython.locals(still=cython.bint)
cdef void supply(
    int64_t now, Row[::1] rows, Py_ssize_t r, int64_t ready, int64_t sent, int64_t remaining,
    bint began,
)

@cython.locals(low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t)
cdef Py_ssize_t find(const uint64_t[::1] cookies, uint64_t cookie)

@cython.locals(
    i=Py_ssize_t, r=Py_ssize_t, s=Py_ssize_t, place=Py_ssize_t, iteration=int64_t, ready=int64_t,
    posted=int64_t, done=int64_t, total=int64_t, working=cython.bint, kernel=cython.bint,
    counter=int64_t, seen=cython.bint, began=cython.bint, base=int64_t, most=int64_t,
    joined=cython.bint, over=cython.bint, end=int64_t, target=int64_t, sent=int64_t, remaining=int64_t,
    quiet=cython.bint, same=cython.bint, moved=Py_ssize_t,
)
cpdef Py_ssize_t advance(
    int64_t now, Row[::1] rows, const Py_ssize_t[::1] at, const int64_t[:, ::1] words,
    const Py_ssize_t[::1] slots, const uint64_t[::1] cookies, const int64_t[::1] acked,
    bint all_quiet,
)

@cython.locals(
    onset=int64_t, start=int64_t, steps=int64_t, most=int64_t, sample=int64_t, weight=double
)
cdef void begin(int64_t now, Row[::1] rows, Py_ssize_t r, bint quiet, int64_t told)

cdef int64_t smooth(int64_t old, int64_t new, double weight)

@cython.locals(i=Py_ssize_t, r=Py_ssize_t, result=int)
cpdef int signs(Row[::1] rows, const Py_ssize_t[::1] at, bint all_quiet, bint ends_are_told)

@cython.locals(i=Py_ssize_t, n=Py_ssize_t, end=int64_t, heard=cython.bint)
cpdef Py_ssize_t watch(Row[::1] rows, bint all_quiet, Py_ssize_t[::1] at)

@cython.locals(i=Py_ssize_t)
cpdef void drain(Row[::1] rows, const Py_ssize_t[::1] ended, int64_t[:, ::1] at_work)

@cython.locals(i=Py_ssize_t, d=Py_ssize_t, ended=cython.bint)
cpdef void keep(Row[::1] rows, bint all_quiet)

@cython.locals(
    i=Py_ssize_t, n_donors=Py_ssize_t, n_heirs=Py_ssize_t, donors=Py_ssize_t[::1],
    heirs=Py_ssize_t[::1], known=cython.bint, quiet=cython.bint,
)
cpdef tuple candidates(
    Row[::1] rows, bint all_quiet, double wanting, double[::1] fastest, tuple found,
)

@cython.locals(
    i=Py_ssize_t, at=Py_ssize_t, job=int32_t, path=int32_t, taken=uint8_t[::1],
)
cpdef void pair(
    Row[::1] rows, const Py_ssize_t[::1] donors, const Py_ssize_t[::1] heirs,
    Py_ssize_t[::1] next_donor,
)

@cython.locals(size=int64_t, expected=double)
cdef double size_of(Row[::1] rows, Py_ssize_t i)

@cython.locals(more=double, target=int64_t, sent=double, remains=double)
cdef double left(int64_t now, Row[::1] rows, Py_ssize_t i)

@cython.locals(i=Py_ssize_t, b=Py_ssize_t, onset=int64_t, period=int64_t)
cpdef void add_up(
    int64_t now, Row[::1] rows, int64_t[:, ::1] times, double[:, ::1] sizes,
)

@cython.locals(i=Py_ssize_t, size=double, due=int64_t, coming=cython.bint)
cpdef void weigh(
    int64_t now, Row[::1] rows, const int64_t[::1] at_work, double[::1] weight,
)

@cython.locals(
    n=Py_ssize_t, i=Py_ssize_t, b=Py_ssize_t, size=double, flows=double, used=double,
    lasts=double, keep=cython.bint, sums=double[:, ::1],
)
cpdef void split(
    const Row[::1] rows, const double[::1] rate, const double[::1] weight, double[::1] parts,
)

@cython.locals(i=Py_ssize_t, b=Py_ssize_t, present=double, lasts=double)
cdef void fill(const Row[::1] rows, const double[::1] weight, double[:, ::1] sums)
