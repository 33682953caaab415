/* SPDX-License-Identifier: Apache-2.0 */
/* context.c - a communicator: what its comms have in common. */
#include "plugin.h"

static struct context *contexts;
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;

/* Channels of a process's first communicator are plain numbers. Those of another begin at one that its
 * ranks have in common. The lock is held. */
static int first_channel(uint64_t id) {
    uint64_t number = flowslot_nccl_mix(0, id) % ((INT32_MAX + 1u) / MOST_CHANNELS - 1) + 1;
    if (contexts == NULL) return 0;
    for (const struct context *at = contexts; at != NULL; at = at->next)
        if (at->id == id) return at->first; /* another rank of this process */
    return (int)number * MOST_CHANNELS;
}

struct context *context_new(uint64_t id) {
    struct context *context = calloc(1, sizeof(*context));
    if (context == NULL) return NULL;
    context->id = id;
    pthread_mutex_lock(&contexts_lock);
    context->first = first_channel(id);
    context->next = contexts;
    contexts = context;
    pthread_mutex_unlock(&contexts_lock);
    atomic_init(&context->users, 1);
    atomic_init(&context->rank, NO_RANK);
    atomic_init(&context->algorithm, UINT32_MAX);
    atomic_init(&context->operation, UINT32_MAX);
    return context;
}

void context_drop(struct context *context) {
    struct context **at;
    if (atomic_fetch_sub(&context->users, 1) != 1) return;
    pthread_mutex_lock(&contexts_lock);
    for (at = &contexts; *at != context;) at = &(*at)->next;
    *at = context->next;
    pthread_mutex_unlock(&contexts_lock);
    free(context);
}

void context_rank(struct context *context, int rank) {
    int known = NO_RANK;
    if (rank < 0 || atomic_load_explicit(&context->rank, memory_order_relaxed) == rank) return;
    if (!atomic_compare_exchange_strong(&context->rank, &known, rank) && known != rank)
        atomic_store(&context->rank, MANY_RANKS);
}

uint32_t context_collective(struct context *context) {
    unsigned int bits = atomic_load_explicit(&context->operation, memory_order_relaxed);
    uint32_t operation = 0;
    if (bits == 0 || (bits & (bits - 1)) != 0) return 0;
    while (bits >>= 1) operation++;
    return operation < NET_COLLECTIVES ? operation + 1 : FLOWSLOT_SEND; /* in the same order */
}

bool context_ring(struct context *context) {
    unsigned int algorithm = atomic_load_explicit(&context->algorithm, memory_order_relaxed);
    if (context_collective(context) == FLOWSLOT_SEND) return false;
    return algorithm == UINT32_MAX || (algorithm & NET_RING) != 0;
}
