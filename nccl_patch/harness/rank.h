/* SPDX-License-Identifier: Apache-2.0 */
/* rank.h - one rank of the harness: what it was asked for, what it holds, what it found. */
#ifndef HARNESS_RANK_H
#define HARNESS_RANK_H

#include "net.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum {
    MOST_CHANNELS = 32,
    MOST_RANKS = 256,
    MOST_ROUNDS = 64,
    MOST_ITERATIONS = 4096,
    MOST_ERRORS = 8,
    GRACE_MS = 2000, /* how long a plugin has to notice that a rank is gone, which we know already */
};
#define MOST_BYTES ((uint64_t)1 << 34)
#define MOST_SLICE ((uint64_t)INT32_MAX)

/* ---- Options: options.c ---------------------------------------------------------------------- */

/* The first eight are the calls of a plugin. */
enum call { LISTEN, CONNECT, ACCEPT, REG, ISEND, IRECV, TEST, CLOSE, OTHER, RENDEZVOUS, LIMIT, CALLS };
extern const char *const call_names[CALLS];

struct options {
    const char *plugin, *root;
    int version, rank, ranks, device;
    int channels, trees, outstanding, rounds, iterations, compute_ms, idle_us, limit_s, strays;
    uint64_t bytes, slice;
    bool stream;       /* rank 0 sends to rank 1; otherwise a ring all-reduce */
    bool null_handles; /* no regions, no parents, in every other request */
    int orders;        /* channel c uses order c % orders */
    int order[MOST_CHANNELS][MOST_RANKS];
    enum call fault; /* CALLS: none */
    bool stall;      /* stop, instead of being killed */
    uint64_t fault_after;
};

/* Exits with status 2 and one line that names the option, where something is wrong. */
void options_read(struct options *options, int argc, char **argv);

/* ---- Rendezvous: rendezvous.c ---------------------------------------------------------------- */

struct rendezvous {
    int rank, ranks;
    int fds[MOST_RANKS]; /* root: of each other rank; others: [0], of the root; else -1 */
};

/* All of them: false when it fails, or takes longer than `limit_s`. */
bool rendezvous_open(struct rendezvous *meeting, const char *root, int rank, int ranks, int limit_s);
/* `all`: `ranks` times `size` bytes, by rank. */
bool rendezvous_gather(struct rendezvous *meeting, const void *mine, size_t size, void *all);
/* Somebody has gone. */
bool rendezvous_lost(const struct rendezvous *meeting);
void rendezvous_close(struct rendezvous *meeting);

/* ---- Strays: strays.c ------------------------------------------------------------------------ */

/* `many` connections to each listening socket of this process; how many of those there are. */
int strays_come(int many);
void strays_go(void);

/* ---- A rank ---------------------------------------------------------------------------------- */

/* One direction of a channel: a FIFO of slots of one slice each, used in turn as NCCL does. */
struct way {
    void *comm, *region;
    uint8_t *fifo;
    void *requests[NET_REQUESTS];
    uint64_t total, staged, posted, finished; /* slices of this iteration */
    uint64_t bytes;                           /* of this round, completed */
    uint64_t seen;                            /* slices of this round, completed */
};

struct channel {
    int position, before, after; /* in the ring; its neighbours' ranks */
    uint64_t bytes, slices;      /* of its part of the tensor; of a chunk of it */
    uint8_t *data;
    void *listening;
    char handle[NET_HANDLE]; /* of `after`; a plugin may keep state in it */
    struct way out, in;
    int64_t connect_ns;
    atomic_bool connected;
};

struct failure {
    enum call call;
    int result;
    const char *what;
    int64_t at, call_ns, since_progress_ns;
};

struct census { int descriptors, threads; };

/* What had been received in all channels, and when. */
struct point { int64_t at, bytes; };

struct round {
    uint64_t sent[MOST_CHANNELS], received[MOST_CHANNELS];
    int64_t connect_ns[MOST_CHANNELS];
    struct census after;
};

struct rank {
    struct options options;
    struct rendezvous meeting;
    struct net net;
    struct channel channels[MOST_CHANNELS];
    struct properties12 device;
    const char *name; /* the plugin's */

    pthread_mutex_t lock;
    pthread_cond_t progress_ended;
    bool ended;
    atomic_bool failed;
    int errors;
    struct failure error[MOST_ERRORS];

    /* Of each call. Each is made by one thread only. */
    atomic_uint_fast64_t calls[CALLS];
    _Atomic int64_t slowest[CALLS], began[CALLS];
    atomic_bool inside[CALLS];
    _Atomic int64_t progressed; /* when something was completed */

    struct point *trace; /* NULL: none is kept */
    size_t points, room;

    struct census before;
    struct round round[MOST_ROUNDS];
    int rounds;
    int iterations;
    int64_t iteration_ns[MOST_ITERATIONS];
    int64_t busy_cpu_ns, idle_cpu_ns, idle_ns, close_ns;
    bool sums_right, gpu_refused;
    uint32_t told; /* the algorithm, as a bit */
};

int64_t now_ns(void);
int64_t cpu_ns(void); /* of the process */

/* Around each call of the plugin: counts and times it, notes an error, plays the fault. */
void call_begin(struct rank *rank, enum call call);
int call_end(struct rank *rank, enum call call, int result);
#define CALL(rank, call, made) (call_begin(rank, call), call_end(rank, call, made))

/* The rank gives up: both its threads see `failed`. `what` may be NULL. */
void fail(struct rank *rank, enum call call, int result, const char *what);
/* The fault's own moment, where a plain count of calls does not tell it. */
void fault_now(struct rank *rank, enum call call);

/* progress.c: an all-reduce (or stream) of all channels. */
void iterate(struct rank *rank);
void *progress_thread(void *rank);
/* service.c: one init to one dlclose; its first half, up to where all channels are connected. */
bool service_round(struct rank *rank);
bool service_open(struct rank *rank);
bool ring_prepare(struct rank *rank);  /* ring.c: buffers and neighbours */
void ring_release(struct rank *rank);
void ring_fill(struct rank *rank, int iteration);
bool ring_right(const struct rank *rank, int iteration);
/* How many slices an iteration has each way. */
void ring_begin(const struct rank *rank, struct channel *channel);
bool ring_ready(const struct rank *rank, const struct channel *channel, uint64_t slice);
void ring_stage(const struct rank *rank, struct channel *channel, uint64_t slice, uint8_t *slot);
uint64_t ring_size_sent(const struct rank *rank, const struct channel *channel, uint64_t slice);
uint64_t ring_size(const struct rank *rank, const struct channel *channel, uint64_t slice);
/* False: not the slice that was to come (of a stream; a ring's sums show it). */
bool ring_consume(const struct rank *rank, struct channel *channel, uint64_t slice,
                  const uint8_t *slot);

struct census census_take(void); /* report.c */
/* Waits a moment for threads that have been joined to go from the kernel's list. */
struct census census_settled(struct census before);
void report_print(const struct rank *rank);

#endif
