/* SPDX-License-Identifier: Apache-2.0 */
/*
 * iteration.c - in which iteration is what NCCL posts? All comms of a process are in the same.
 *
 * From the first of these that there is:
 *   1. flowslot_iteration() was called: the number that it was given;
 *   2. $FLOWSLOT_ITERATION_BYTES: the next begins when the process has posted so many bytes;
 *   3. the profiler tells of collectives: the next begins with one that the present one has had
 *      (flowslot_nccl.h);
 *   4. pauses: the next begins after one that is long. Where the last three had the same number of
 *      bytes, the next begins after so many, however short the pause, and not before.
 */
#include "plugin.h"

#define PAUSES 32
#define LEAST_PAUSE UINT64_C(10000000) /* ns: shorter ones mean nothing, */
#define SHORT_PAUSE UINT64_C(1000000)  /* but where the bytes are complete */
#define SAME 2

#define EXPORT __attribute__((visibility("default")))
EXPORT void flowslot_iteration(uint64_t iteration);
EXPORT int flowslot_collective(uint64_t communicator, uint64_t key, uint64_t size);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t present, bytes; /* number of the iteration, posted in it */
static bool told;
/* Collectives; its flows and its record are not used. Its iteration is the present one. */
static struct flowslot_nccl enqueued = {.lock = PTHREAD_MUTEX_INITIALIZER};
static uint64_t pauses[PAUSES], pause_count;
static _Atomic uint64_t usual = 3 * LEAST_PAUSE; /* pause between iterations, ns */
static uint64_t volume, same; /* bytes of the last iteration; how many before it had as many */
static _Atomic uint64_t moved;                 /* ns: when anything did last, */
static _Atomic uint64_t widest; /* and for how long nothing did, at most, since the last post */

void iteration_touch(uint64_t now) {
    uint64_t last = atomic_exchange_explicit(&moved, now, memory_order_relaxed);
    if (last != 0 && now > last &&
        now - last > atomic_load_explicit(&widest, memory_order_relaxed))
        atomic_store_explicit(&widest, now - last, memory_order_relaxed);
}

bool iteration_paused(uint64_t now, bool long_one) {
    uint64_t last = atomic_load_explicit(&moved, memory_order_relaxed);
    uint64_t limit = atomic_load_explicit(&usual, memory_order_relaxed) / (long_one ? 1 : 3);
    return now > last && now - last >= limit;
}

/* NCCL up to 2.27 does not say which communicator a comm is of: then a process's only one. */
static const struct flowslot_nccl_comm *find(uint64_t communicator) {
    const struct flowslot_nccl_comm *at = enqueued.comms;
    if (communicator == 0) return at != NULL && at->next == NULL ? at : NULL;
    while (at != NULL && at->id != communicator) at = at->next;
    return at;
}

uint64_t iteration_present(uint64_t communicator, struct flowslot_nccl_comm *tensors) {
    const struct flowslot_nccl_comm *found;
    uint64_t number;
    pthread_mutex_lock(&lock);
    number = present;
    found = find(communicator);
    *tensors = found != NULL ? *found : (struct flowslot_nccl_comm){0};
    pthread_mutex_unlock(&lock);
    return number;
}

void iteration_forget(uint64_t communicator) {
    pthread_mutex_lock(&lock);
    if (communicator != 0) flowslot_nccl_forget(&enqueued, communicator);
    pthread_mutex_unlock(&lock);
}

/* Between iterations jobs compute, for about the same time; within them pauses are far shorter. The
 * second longest of the last pauses is one between iterations: the longest may be a checkpoint. */
static void learn_pause(uint64_t pause) {
    uint64_t first = 0, second = 0;
    if (pause < LEAST_PAUSE) return;
    pauses[pause_count++ % PAUSES] = pause;
    for (int i = 0; i < PAUSES; i++) {
        if (pauses[i] > first) {
            second = first;
            first = pauses[i];
        } else if (pauses[i] > second) {
            second = pauses[i];
        }
    }
    atomic_store(&usual, second > 3 * LEAST_PAUSE ? second : 3 * LEAST_PAUSE);
}

static void begin(uint64_t number) {
    same = bytes == volume ? same + 1 : 0;
    volume = bytes;
    bytes = 0;
    present = number;
    if (enqueued.iteration != number) flowslot_nccl__next(&enqueued, number);
}

static bool is_next(uint64_t pause) {
    if (bytes == 0) return false;
    if (options.iteration_bytes > 0) return bytes >= options.iteration_bytes;
    if (same >= SAME && bytes == volume) return pause >= SHORT_PAUSE;
    return pause >= atomic_load(&usual) / (same >= SAME && bytes < volume ? 1 : 3);
}

uint64_t iteration_post(uint64_t more) {
    uint64_t pause, number;
    pthread_mutex_lock(&lock);
    /* Another rank's bytes may have come first: the pause is the one before these. */
    iteration_touch(now_ns());
    pause = atomic_exchange(&widest, 0);
    if (!told && enqueued.keyed < 2) { /* none of the collectives has come again yet */
        learn_pause(pause);
        if (is_next(pause)) begin(present + 1);
    }
    bytes += more;
    number = present;
    pthread_mutex_unlock(&lock);
    return number;
}

/* For the application, from any language: what is sent from now on belongs to this iteration. */
void flowslot_iteration(uint64_t iteration) {
    pthread_mutex_lock(&lock);
    told = true;
    if (iteration != present) begin(iteration);
    pthread_mutex_unlock(&lock);
}

/* For the profiler (../profiler): a collective of so many bytes was enqueued; `key` tells it from
 * others. Its part of what a comm sends in an iteration is ready then. 0: NCCL uses another transport. */
int flowslot_collective(uint64_t communicator, uint64_t key, uint64_t size) {
    pthread_mutex_lock(&lock);
    enqueued.told = told || options.iteration_bytes > 0;
    flowslot_nccl_enqueued(&enqueued, communicator, key, size);
    if (enqueued.iteration != present) begin(enqueued.iteration);
    pthread_mutex_unlock(&lock);
    watch_rouse();
    return setup_used();
}
