/* SPDX-License-Identifier: Apache-2.0 */
/*
 * account.c - what a process has to send, and has sent, by NCCL's events.
 *
 *   ready   a collective's tensor, or a send's, when it is enqueued
 *   posted  bytes of slices that were given to the network, of any kind (InfiniBand as well)
 *   done    it has taken them
 *
 * Where flowslot's network plugin is in this process it is told of collectives, by its function
 * flowslot_collective(communicator, key, bytes), and says whether NCCL uses it: NCCL keeps one that has
 * declined. A plugin that is used reports by itself: it knows its sockets. Elsewhere each
 * communicator that uses the network is a flow without a socket in a progress record: it is seen, and
 * not paced.
 *
 * ProxyOps say how much is sent at most; that less was sent is checked. With $FLOWSLOT_TOTALS=1 a
 * communicator's totals are printed when it ends.
 */
#include "profiler.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>

#define EVENTS 32768 /* of which NCCL may still speak, steps and others: its own last for some thousands */
#define NETWORK_PLUGIN "libnccl-net-flowslot.so"

struct known {
    uint64_t number; /* 0: free; otherwise its handle */
    struct comm *comm;
    void *theirs;
    void *parent;
    uint64_t kind, most, sent;
    uint64_t base; /* v1 to v3: what its operation is said to have sent before it began */
    bool sends, begun;
};

typedef int (*told)(uint64_t comm, uint64_t key, uint64_t bytes);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over all of this */
static struct known events[2][EVENTS]; /* steps apart: an operation may have more of them than places */
static uint64_t started[2];
static struct flowslot_nccl all = {.lock = PTHREAD_MUTEX_INITIALIZER};
static bool looked, beside; /* whether the plugin is used here */
static told tell;

static struct known *find(void *handle) {
    uint64_t number = (uintptr_t)handle;
    struct known *found = &events[number % 2][number / 2 % EVENTS];
    return number != 0 && found->number == number ? found : NULL;
}

/* ---- The network plugin ------------------------------------------------------------------ */

static int is_plugin(struct dl_phdr_info *info, size_t size, void *path) {
    const char *name = strrchr(info->dlpi_name, '/');
    (void)size;
    if (strcmp(name != NULL ? name + 1 : info->dlpi_name, NETWORK_PLUGIN) != 0) return 0;
    snprintf(path, PATH_MAX, "%s", info->dlpi_name);
    return 1;
}

/* NCCL loads it for itself alone, and before the first collective. */
static void look_for_plugin(void) {
    char path[PATH_MAX] = "";
    void *library;
    if (looked) return;
    looked = true;
    if (!dl_iterate_phdr(is_plugin, path)) return;
    library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL) *(void **)&tell = dlsym(library, "flowslot_collective");
}

/* ---- Bytes ------------------------------------------------------------------------------- */

static void enqueued(struct comm *comm, const struct event *event) {
    look_for_plugin();
    comm->collectives++;
    comm->tensors += event->bytes;
    if (tell != NULL && tell(comm->id, event->key, event->bytes) != 0) beside = true;
    if (!beside) flowslot_nccl_enqueued(&all, comm->id, event->key, event->bytes);
}

static void moved(struct comm *comm, uint64_t posted, uint64_t done) {
    comm->sent += posted;
    if (beside) return;
    if (comm->flow == NULL) comm->flow = flowslot_nccl_open(&all, comm->id, -1, comm->rank, -1, -1);
    flowslot_nccl_moved(&all, comm->flow, posted, done);
}

static void sent(struct known *event, uint64_t posted, uint64_t done) {
    struct known *operation = event->kind == KIND_PROXY_STEP ? find(event->parent) : NULL;
    moved(event->comm, posted, done);
    event->sent += posted;
    if (operation != NULL) operation->sent += posted;
}

/* ---- Events ------------------------------------------------------------------------------ */

void *account_start(struct comm *comm, const struct event *event) {
    struct known *made, *parent;
    bool sends = event->sends, step = event->kind == KIND_PROXY_STEP;
    uint64_t number;
    pthread_mutex_lock(&lock);
    if (comm->version < 4 && (event->kind == KIND_COLLECTIVE || event->kind == KIND_P2P))
        comm->rank = event->rank; /* init does not tell it; groups say 0 */
    if (event->kind == KIND_COLLECTIVE || (event->kind == KIND_P2P && sends)) enqueued(comm, event);
    parent = find(event->parent);
    if (step) sends = parent != NULL && parent->sends;
    if (event->kind == KIND_PROXY_OP && sends) comm->most += event->bytes;
    number = ++started[step] * 2 + step;
    made = &events[step][number / 2 % EVENTS];
    *made = (struct known){.number = number, .comm = comm, .parent = event->parent,
                           .kind = event->kind, .most = event->bytes, .sends = sends};
    pthread_mutex_unlock(&lock);
    return (void *)(uintptr_t)number;
}

void account_theirs(void *handle, void *theirs) {
    struct known *event;
    pthread_mutex_lock(&lock);
    event = find(handle);
    if (event != NULL) event->theirs = theirs;
    pthread_mutex_unlock(&lock);
}

void *account_find_theirs(void *handle) {
    struct known *event;
    void *theirs;
    pthread_mutex_lock(&lock);
    event = find(handle);
    theirs = event != NULL ? event->theirs : NULL;
    pthread_mutex_unlock(&lock);
    return theirs;
}

struct comm *account_comm(void *handle) {
    struct known *event;
    struct comm *comm;
    pthread_mutex_lock(&lock);
    event = find(handle);
    comm = event != NULL ? event->comm : NULL;
    pthread_mutex_unlock(&lock);
    return comm;
}

void account_stop(void *handle) {
    struct known *event;
    pthread_mutex_lock(&lock);
    event = find(handle);
    if (event != NULL && event->sends) {
        if (event->kind == KIND_PROXY_STEP) sent(event, 0, event->sent);
        if (event->kind == KIND_PROXY_OP && event->sent > event->most) event->comm->beyond++;
        event->sends = false; /* whatever is said of it from now on */
    }
    pthread_mutex_unlock(&lock);
}

/* From v4 on a step tells its bytes, once. Before, an operation tells what it has sent so far, first of
 * all when nothing is sent; NCCL never sets that number back, and uses it for other operations, too. */
void account_record(void *handle, int state, const struct state_args *args) {
    struct known *event;
    pthread_mutex_lock(&lock);
    event = find(handle);
    if (event != NULL && event->sends && args != NULL) {
        bool old = event->comm->version < 4 && event->kind == KIND_PROXY_OP;
        uint64_t bytes = args->bytes;
        if (old && !event->begun) event->base = bytes;
        event->begun = true;
        bytes -= event->base < bytes ? event->base : bytes;
        if (old && bytes > event->sent && (state == STATE_OP_SENT || state == STATE_OP_DONE))
            sent(event, bytes - event->sent, bytes - event->sent);
        if (event->comm->version >= 4 && event->kind == KIND_PROXY_STEP && event->sent == 0 &&
            state == STATE_STEP_SENT)
            sent(event, bytes, 0);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- Communicators ----------------------------------------------------------------------- */

void account_open(struct comm *comm) {
    pthread_mutex_lock(&lock);
    comm->flow = NULL;
    comm->collectives = comm->tensors = comm->most = comm->sent = comm->beyond = 0;
    pthread_mutex_unlock(&lock);
}

void account_close(struct comm *comm) {
    const char *totals = getenv("FLOWSLOT_TOTALS");
    uint64_t i;
    pthread_mutex_lock(&lock);
    for (i = 0; i < 2 * EVENTS; i++)
        if (events[i % 2][i / 2].comm == comm) events[i % 2][i / 2].number = 0; /* may be another's */
    flowslot_nccl_close(&all, comm->flow);
    flowslot_nccl_forget(&all, comm->id);
    comm->flow = NULL;
    if (totals != NULL && *totals == '1')
        fprintf(stderr,
                "flowslot: rank %d: %llu collectives, %llu bytes ready, at most %llu to send, "
                "%llu sent, %llu operations sent more than they said\n",
                comm->rank, (unsigned long long)comm->collectives,
                (unsigned long long)comm->tensors, (unsigned long long)comm->most,
                (unsigned long long)comm->sent, (unsigned long long)comm->beyond);
    pthread_mutex_unlock(&lock);
}
