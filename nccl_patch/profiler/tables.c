/* SPDX-License-Identifier: Apache-2.0 */
/* tables.c - what NCCL calls. Nothing here ever fails: training goes on without us. */
#include "profiler.h"

#define EXPORT __attribute__((visibility("default")))
#define OURS (KIND_COLLECTIVE | KIND_P2P | KIND_PROXY_OP | KIND_PROXY_STEP)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over which are live */
static struct comm comms[MOST_COMMS];
static int *asked; /* NCCL's mask of events, which may change at any time */

/* The other profiler hears of a communicator, as it would from NCCL. */
static void chain_open(struct comm *comm, const char *name, int nodes, nccl_log log) {
    struct profiler *other = chain_get(comm->version);
    int *mask = chain_mask_at(), failed;
    if (other == NULL) return;
    if (comm->version <= 3)
        failed = ((init_1)(void *)other->init)(&comm->theirs, mask);
    else if (comm->version == 4)
        failed = ((init_4)(void *)other->init)(&comm->theirs, mask, name, comm->id, nodes,
                                               comm->ranks, comm->rank, log);
    else
        failed = ((init_5)(void *)other->init)(&comm->theirs, comm->id, mask, name, nodes,
                                               comm->ranks, comm->rank, log);
    comm->chained = failed == 0;
    if (failed)
        fprintf(stderr, "flowslot: FLOWSLOT_NCCL_PROFILER: %s: init failed with %d\n", other->name,
                failed);
}

static void ask(void) {
    int *to = __atomic_load_n(&asked, __ATOMIC_RELAXED), wanted = OURS | chain_mask();
    if (to != NULL && __atomic_load_n(to, __ATOMIC_RELAXED) != wanted)
        __atomic_store_n(to, wanted, __ATOMIC_RELAXED);
}

static int open_comm(int version, void **context, int *mask, const char *name, uint64_t id,
                     int nodes, int ranks, int rank, nccl_log log) {
    struct comm *comm = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_COMMS && comm == NULL; i++)
        if (!comms[i].live) comm = &comms[i];
    if (comm != NULL) {
        *comm = (struct comm){.version = version, .id = id, .ranks = ranks, .rank = rank};
        if (version < 4) comm->id = (uint64_t)(comm - comms) + 1;
        account_open(comm);
        chain_open(comm, name, nodes, log);
        __atomic_store_n(&comm->live, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    *context = comm;
    __atomic_store_n(&asked, mask, __ATOMIC_RELAXED); /* all communicators have the same */
    ask();
    return 0;
}

/* NULL: none of ours. It may be another process's (PXN), and is not followed before that is known. */
static struct comm *comm_of(const void *context) {
    uintptr_t at = (uintptr_t)context - (uintptr_t)comms;
    struct comm *comm = &comms[at / sizeof(comms[0]) % MOST_COMMS];
    if (at >= sizeof(comms) || at % sizeof(comms[0]) != 0) return NULL;
    return __atomic_load_n(&comm->live, __ATOMIC_ACQUIRE) ? comm : NULL;
}

static int start(int version, void *context, void **handle, void *from) {
    struct event event = read_event(version, from);
    struct comm *comm;
    *handle = NULL;
    /* Of an operation of another process nothing is known; its steps have no parent. */
    if (event.kind == KIND_PROXY_OP && event.pid != getpid()) return 0;
    if (event.kind == KIND_PROXY_STEP && account_comm(event.parent) == NULL) return 0;
    comm = comm_of(context);
    if (comm == NULL) return 0;
    ask();
    *handle = account_start(comm, &event);
    if (comm->chained && (chain_mask() & (int)event.kind))
        chain_start(comm, *handle, &event, from);
    return 0;
}

static int stop(void *handle) {
    void *theirs = account_find_theirs(handle);
    account_stop(handle);
    if (theirs != NULL) chain_stop(theirs);
    return 0;
}

static int record(void *handle, int state, struct state_args *args) {
    void *theirs = account_find_theirs(handle);
    account_record(handle, state, args);
    if (theirs != NULL) chain_record(theirs, state, args);
    return 0;
}

static int finalize(void *context) {
    struct comm *comm = comm_of(context);
    if (comm == NULL) return 0;
    if (comm->chained) (void)chain_get(comm->version)->finalize(comm->theirs);
    pthread_mutex_lock(&lock);
    account_close(comm);
    __atomic_store_n(&comm->live, false, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int open_1(int version, void **context, int *mask) {
    return open_comm(version, context, mask, NULL, 0, 0, 0, -1, NULL);
}
static int open_v1(void **context, int *mask) { return open_1(1, context, mask); }
static int open_v2(void **context, int *mask) { return open_1(2, context, mask); }
static int open_v3(void **context, int *mask) { return open_1(3, context, mask); }
static int open_v4(void **context, int *mask, const char *name, uint64_t comm, int nodes, int ranks,
                   int rank, nccl_log log) {
    return open_comm(4, context, mask, name, comm, nodes, ranks, rank, log);
}
static int open_v5(void **context, uint64_t comm, int *mask, const char *name, int nodes, int ranks,
                   int rank, nccl_log log) {
    return open_comm(5, context, mask, name, comm, nodes, ranks, rank, log);
}
static int open_v6(void **context, uint64_t comm, int *mask, const char *name, int nodes, int ranks,
                   int rank, nccl_log log) {
    return open_comm(6, context, mask, name, comm, nodes, ranks, rank, log);
}

#define TABLE(version)                                                                            \
    static int start_v##version(void *context, void **handle, void *event) {                      \
        return start(version, context, handle, event);                                            \
    }                                                                                             \
    extern const struct profiler ncclProfiler_v##version;                                         \
    EXPORT const struct profiler ncclProfiler_v##version = {                                      \
        "flowslot", (int (*)(void))(void *)open_v##version, start_v##version, stop, record, finalize};

TABLE(1)
TABLE(2)
TABLE(3)
TABLE(4)
TABLE(5)
TABLE(6)
