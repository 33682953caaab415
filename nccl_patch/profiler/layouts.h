/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layouts.h - NCCL's profiler interface, versions 1 to 6, on x86-64 and aarch64, as far as it is used
 * here. Every version describes an event by a head and, from byte 24 on, what belongs to its kind.
 *
 *   v1 2.23   v2 2.24, 2.25   v3 2.26   v4 2.27   v5 2.28   v6 from 2.29.2 on
 *
 * Version 7 is not known to be the same everywhere; NCCL takes version 6 where there is no other.
 */
#ifndef FLOWSLOT_PROFILER_LAYOUTS_H
#define FLOWSLOT_PROFILER_LAYOUTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PROFILER_VERSIONS 6

enum kind { /* of events: bits of a mask */
    KIND_GROUP = 1 << 0,
    KIND_COLLECTIVE = 1 << 1,
    KIND_P2P = 1 << 2,
    KIND_PROXY_OP = 1 << 3,
    KIND_PROXY_STEP = 1 << 4
};

enum state {             /* of events, as far as they tell bytes */
    STATE_OP_SENT = 2,   /* v1 to v3, of a ProxyOp: bytes so far, but for the last slice */
    STATE_OP_DONE = 3,   /* the same, all */
    STATE_STEP_SENT = 9, /* from v4 on, of a ProxyStep: its bytes */
};

struct head_1 { /* v1 to v4 */
    uint8_t kind;
    void *parent;
    int rank;
};
struct head_5 {
    uint64_t kind;
    void *parent;
    int rank;
};

struct collective_1 {
    const char *name;
    uint64_t comm, number;
    uint8_t function;
    const void *from;
    void *to;
    size_t count;
    int root;
    uint8_t type;
    uint32_t operation;
    size_t traffic;
    uint8_t channels, warps, algorithm, protocol;
    int collnet, nvls;
};
struct collective_2 { /* v3 lacks `traffic`, which nothing here reads; what follows has moved */
    const char *name;
    uint64_t comm, number;
    const char *function;
    const void *from;
    void *to;
    size_t count;
    int root;
    const char *type;
    size_t traffic;
    uint8_t channels, warps;
    const char *algorithm, *protocol;
};
struct collective_4 {
    uint64_t number;
    const char *function;
    const void *from;
    void *to;
    size_t count;
    int root;
    const char *type;
    uint8_t channels, warps;
    const char *algorithm, *protocol;
    void *group; /* from v5 on */
};

struct p2p_1 {
    const char *name;
    uint64_t comm;
    uint8_t function;
    void *buffer;
    uint8_t type;
    size_t count;
    int peer;
};
struct p2p_2 { /* and v3 */
    const char *name;
    uint64_t comm;
    const char *function;
    void *buffer;
    const char *type;
    size_t count;
    int peer;
};
struct p2p_4 {
    const char *function;
    void *buffer;
    const char *type;
    size_t count;
    int peer;
    uint8_t channels;
    void *group; /* from v5 on */
};

struct proxy_op {
    pid_t pid; /* of the process whose operation it is */
    uint8_t channel;
    int peer;
    int steps, chunk; /* at most so many, of at most so many bytes */
    int sends;
};

struct state_args {
    size_t bytes; /* see enum state */
};

struct event_1 {
    struct head_1 head;
    union {
        struct collective_1 collective;
        struct p2p_1 p2p;
        struct proxy_op op;
    };
};
struct event_2 {
    struct head_1 head;
    union {
        struct collective_2 collective;
        struct p2p_2 p2p;
        struct proxy_op op;
    };
};
struct event_4 {
    struct head_1 head;
    union {
        struct collective_4 collective;
        struct p2p_4 p2p;
        struct proxy_op op;
    };
};
struct event_5 {
    struct head_5 head;
    union {
        struct collective_4 collective;
        struct p2p_4 p2p;
        struct proxy_op op;
    };
};

/* Bytes of an event's whole description, by version. */
static const size_t event_size[PROFILER_VERSIONS + 1] = {0, 120, 128, 120, 104, 112, 112};

_Static_assert(sizeof(void *) == 8, "64 bits");
_Static_assert(offsetof(struct event_1, collective) == 24, "v1");
_Static_assert(offsetof(struct event_5, collective) == 24, "v5");
_Static_assert(offsetof(struct head_5, parent) == 8 && offsetof(struct head_5, rank) == 16, "head");
_Static_assert(offsetof(struct head_1, parent) == 8 && offsetof(struct head_1, rank) == 16, "head");
_Static_assert(sizeof(struct event_1) == 120, "v1");
_Static_assert(sizeof(struct event_2) == 128, "v2");
_Static_assert(sizeof(struct event_5) == 112, "v5");

/* What a library exports as ncclProfiler_vN; init has other arguments in v1, v4 and v5. Results: 0 or
 * NCCL's error. */
struct profiler {
    const char *name;
    int (*init)(void);
    int (*start)(void *context, void **handle, void *event);
    int (*stop)(void *handle);
    int (*record)(void *handle, int state, struct state_args *args);
    int (*finalize)(void *context);
};
_Static_assert(sizeof(struct profiler) == 48, "profiler");

typedef void (*nccl_log)(int level, unsigned long flags, const char *file, int line,
                         const char *format, ...);
typedef int (*init_1)(void **context, int *mask);
typedef int (*init_4)(void **context, int *mask, const char *name, uint64_t comm, int nodes,
                      int ranks, int rank, nccl_log log);
typedef int (*init_5)(void **context, uint64_t comm, int *mask, const char *name, int nodes,
                      int ranks, int rank, nccl_log log);

#endif
