/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flowslot_nccl.h - what a process that runs NCCL has to send, told by its collectives; shared by the
 * patch (C++11) and the profiler (C99).
 *
 * NCCL knows a tensor's size when the application calls a collective; which connection carries how
 * much of it depends on the algorithm, the protocol, and which ranks share a host. That repeats in
 * every iteration. So a flow's share is what it sent in one of the last iterations, the least of them,
 * for each byte of tensors in the last one:
 *
 *   ready     so much of its share as tensors were enqueued, and at least what is posted
 *   posted    was handed to a socket
 *   done      the kernel has taken it
 *   expected  its share, if it was the same in the last three iterations; else not known
 *
 * The least, since NCCL deals pieces of messages out to a connection's sockets in turns: what was
 * announced and does not come would look like something left to be sent. In its first iteration a
 * flow's ready is what is posted.
 *
 * An iteration begins with a collective that the present one has had: the same communicator, function,
 * buffers and size. Frameworks keep gradients where they are. A new one counts one iteration behind, so
 * that one which is called twice at first begins none. Where that is not so, the application says when
 * an iteration begins; from then on only that counts. Bytes that are late, because the
 * application is ahead of the GPU, belong to the iteration in which they are sent.
 */
#ifndef FLOWSLOT_NCCL_H
#define FLOWSLOT_NCCL_H

#include "flowslot_shm.h"

#include <pthread.h>
#include <stdio.h>

#define FLOWSLOT_NCCL_FLOWS 1024   /* of a process; further ones go unreported */
#define FLOWSLOT_NCCL_KEYS 8192    /* different collectives, of which half are told apart */
#define FLOWSLOT_NCCL_LAST 4       /* iterations that a flow's share is told by */
#define FLOWSLOT_NCCL_TENSOR 65536 /* bytes; smaller ones (losses, norms) begin no iteration */

struct flowslot_nccl_key {
    uint64_t key;
    uint64_t iteration; /* in which it came last, or the one before; 0: free */
};

/* A communicator: its tensors go through its flows. */
struct flowslot_nccl_comm {
    struct flowslot_nccl_comm *next;
    uint64_t id;
    uint64_t tensors, before; /* bytes enqueued in this iteration, and in the last one */
};

struct flowslot_nccl_history { /* of a flow */
    uint64_t last[FLOWSLOT_NCCL_LAST]; /* posted in the last iterations, newest first */
    int known;                         /* how many they are */
    uint64_t share;                    /* the least of them; 0: none is known */
};

struct flowslot_nccl_flow {
    struct flowslot_nccl_flow *next;
    struct flowslot_nccl_comm *comm;
    struct flowslot_flow flow;
    uint64_t ready, posted; /* of this iteration */
    struct flowslot_nccl_history history;
    uint64_t under_way; /* posted and not done, of all iterations */
};

/* All of a process. Zero, but for the lock; it is held for some arithmetic, and for system calls
 * that do not wait. */
struct flowslot_nccl {
    pthread_mutex_t lock;
    struct flowslot job;
    int opened; /* 1: yes, -1: there is no memory to share */
    int told;   /* the application says when iterations begin */
    uint64_t iteration;
    uint64_t keyed; /* iterations as the keys tell them, from 1 */
    uint32_t taken; /* places of keys */
    uint32_t left_out; /* since the last iteration began: there was no place */
    struct flowslot_nccl_key *keys;
    struct flowslot_nccl_comm *comms;
    struct flowslot_nccl_flow *flows;
};

/* A name that all hosts of the job have: the first of $FLOWSLOT_JOB, $SLURM_JOB_ID,
 * $TORCHELASTIC_RUN_ID ("none" is torchrun's for no name), and where the master is. */
static inline void flowslot_nccl_name(char *to, size_t size) {
    static const char *const names[] = {"FLOWSLOT_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"};
    const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    size_t i;
    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const char *name = getenv(names[i]);
        if (name == NULL || name[0] == '\0' || (i == 2 && strcmp(name, "none") == 0)) continue;
        snprintf(to, size, "%s", name);
        return;
    }
    if (address != NULL && port != NULL) snprintf(to, size, "%s:%s", address, port);
    else snprintf(to, size, "nccl");
}

/* Bits of `value` mixed into a key. */
static inline uint64_t flowslot_nccl_mix(uint64_t key, uint64_t value) {
    key = (key * UINT64_C(0xD6E8FEB86659FD93) + value) * UINT64_C(0x9E3779B97F4A7C15);
    return key ^ (key >> 32);
}

/* Whether the next iteration begins with this collective. */
static inline int flowslot_nccl__begins(struct flowslot_nccl *all, uint64_t key) {
    struct flowslot_nccl_key *place;
    uint64_t at = key % FLOWSLOT_NCCL_KEYS;
    int begins;
    if (all->keys == NULL)
        all->keys = (struct flowslot_nccl_key *)calloc(FLOWSLOT_NCCL_KEYS, sizeof(*all->keys));
    if (all->keys == NULL) return 0;
    if (all->keyed == 0) all->keyed = 1;
    for (place = &all->keys[at]; place->iteration != 0 && place->key != key;
         place = &all->keys[at])
        at = (at + 1) % FLOWSLOT_NCCL_KEYS;
    if (place->iteration == 0 && all->taken == FLOWSLOT_NCCL_KEYS / 2) {
        if (++all->left_out < FLOWSLOT_NCCL_KEYS / 2) return 0;
        memset(all->keys, 0, FLOWSLOT_NCCL_KEYS * sizeof(*all->keys)); /* they come no more */
        all->taken = all->left_out = 0;
        place = &all->keys[key % FLOWSLOT_NCCL_KEYS];
    }
    all->taken += place->iteration == 0;
    begins = place->iteration == all->keyed;
    if (begins) all->left_out = 0;
    all->keyed += (uint64_t)begins;
    place->key = key;
    place->iteration++;
    if (place->iteration < all->keyed - 1) place->iteration = all->keyed - 1;
    return begins;
}

static inline struct flowslot_nccl_comm *flowslot_nccl__comm(struct flowslot_nccl *all, uint64_t id) {
    struct flowslot_nccl_comm *comm = all->comms;
    while (comm != NULL && comm->id != id) comm = comm->next;
    if (comm != NULL) return comm;
    comm = (struct flowslot_nccl_comm *)calloc(1, sizeof(*comm));
    if (comm == NULL) return NULL;
    comm->id = id;
    comm->next = all->comms;
    all->comms = comm;
    return comm;
}

/* A communicator that has no flow is of no more use. */
static inline void flowslot_nccl__forget(struct flowslot_nccl *all, struct flowslot_nccl_comm *comm) {
    struct flowslot_nccl_comm **at = &all->comms;
    const struct flowslot_nccl_flow *flow = all->flows;
    while (flow != NULL && flow->comm != comm) flow = flow->next;
    while (*at != NULL && *at != comm) at = &(*at)->next;
    if (flow != NULL || *at == NULL) return;
    *at = comm->next;
    free(comm);
}

static inline void flowslot_nccl__begin(struct flowslot_nccl *all, struct flowslot_nccl_flow *flow) {
    const struct flowslot_nccl_history *history = &flow->history;
    uint64_t expected = history->known >= 3 ? history->share : 0;
    int i;
    for (i = 0; i < history->known; i++)
        if (history->last[i] != history->share) expected = 0;
    if (expected != 0) expected += flow->under_way;
    flowslot_begin(&flow->flow, all->iteration, expected);
    if (flow->under_way != 0)
        flowslot_progress_add(&flow->flow, flow->under_way, flow->under_way, 0);
}

/* A flow's iteration is over, in which so much was posted. */
static inline void flowslot_nccl__remember(struct flowslot_nccl_history *history, uint64_t posted) {
    int i;
    if (history->known == 0 && posted == 0) return; /* it has not been used yet */
    if (history->known < FLOWSLOT_NCCL_LAST) history->known++;
    for (i = history->known - 1; i > 0; i--) history->last[i] = history->last[i - 1];
    history->last[0] = history->share = posted;
    for (i = 1; i < history->known; i++)
        if (history->last[i] < history->share) history->share = history->last[i];
}

/* So much of a flow's share as tensors were enqueued. */
static inline uint64_t flowslot_nccl__part(const struct flowslot_nccl_comm *comm, uint64_t share) {
    if (comm->before == 0) return 0;
    if (comm->tensors >= comm->before) return share;
    return (uint64_t)((double)share * ((double)comm->tensors / (double)comm->before));
}

static inline void flowslot_nccl__next(struct flowslot_nccl *all, uint64_t iteration) {
    struct flowslot_nccl_comm *comm;
    struct flowslot_nccl_flow *flow;
    all->iteration = iteration;
    for (comm = all->comms; comm != NULL; comm = comm->next) {
        comm->before = comm->tensors;
        comm->tensors = 0;
    }
    for (flow = all->flows; flow != NULL; flow = flow->next) {
        flowslot_nccl__remember(&flow->history, flow->posted);
        flow->ready = flow->posted = 0;
        flowslot_nccl__begin(all, flow);
    }
}

/* The application says which iteration begins, or that it goes on. */
static inline void flowslot_nccl_iteration(struct flowslot_nccl *all, uint64_t iteration) {
    pthread_mutex_lock(&all->lock);
    if (!all->told || all->iteration != iteration) flowslot_nccl__next(all, iteration);
    all->told = 1;
    pthread_mutex_unlock(&all->lock);
}

/* A collective was enqueued, of so many bytes; `key` tells it from others. */
static inline void flowslot_nccl_enqueued(struct flowslot_nccl *all, uint64_t id, uint64_t key,
                                          uint64_t bytes) {
    struct flowslot_nccl_comm *comm;
    struct flowslot_nccl_flow *flow;
    pthread_mutex_lock(&all->lock);
    (void)flowslot_poll(&all->job); /* a daemon that answers, has come, or has gone */
    if (!all->told && bytes >= FLOWSLOT_NCCL_TENSOR &&
        flowslot_nccl__begins(all, flowslot_nccl_mix(flowslot_nccl_mix(key, id), bytes)))
        flowslot_nccl__next(all, all->iteration + 1);
    comm = flowslot_nccl__comm(all, id);
    if (comm != NULL) comm->tensors += bytes;
    for (flow = all->flows; flow != NULL && comm != NULL; flow = flow->next) {
        uint64_t share;
        if (flow->comm != comm) continue;
        share = flowslot_nccl__part(comm, flow->history.share);
        if (share <= flow->ready) continue;
        flowslot_ready(&flow->flow, share - flow->ready);
        flow->ready = share;
    }
    pthread_mutex_unlock(&all->lock);
}

/* More bytes were handed to the flow's socket, or taken from there by the kernel. NULL: nothing. */
static inline void flowslot_nccl_moved(struct flowslot_nccl *all, struct flowslot_nccl_flow *flow,
                                       uint64_t posted, uint64_t done) {
    if (flow == NULL) return;
    pthread_mutex_lock(&all->lock);
    if (FLOWSLOT_GET(all->job.link) != FLOWSLOT_REGISTERED) (void)flowslot_poll(&all->job);
    flow->posted += posted;
    if (flow->ready < flow->posted) flow->ready = flow->posted;
    flow->under_way += posted;
    if (done > flow->under_way) done = flow->under_way;
    flow->under_way -= done;
    flowslot_progress_add(&flow->flow, 0, posted, done);
    pthread_mutex_unlock(&all->lock);
}

/* What a communicator sends to `peer` through this connected socket (-1: no socket is known). NULL:
 * there is no memory, and the flow goes unreported. */
static inline struct flowslot_nccl_flow *flowslot_nccl_open(struct flowslot_nccl *all, uint64_t id,
                                                            int fd, int rank, int peer,
                                                            int channel) {
    struct flowslot_nccl_flow *flow = (struct flowslot_nccl_flow *)calloc(1, sizeof(*flow));
    if (flow == NULL) return NULL;
    pthread_mutex_lock(&all->lock);
    if (all->opened == 0) {
        char name[1024];
        flowslot_nccl_name(name, sizeof(name));
        all->opened = flowslot_open(&all->job, NULL, name, rank, FLOWSLOT_NCCL_FLOWS) == 0 ? 1 : -1;
    }
    flow->comm = flowslot_nccl__comm(all, id);
    (void)flowslot_flow_open(&all->job, &flow->flow, fd, peer, channel, FLOWSLOT_RING);
    flowslot_nccl__begin(all, flow);
    flow->next = all->flows;
    all->flows = flow;
    pthread_mutex_unlock(&all->lock);
    return flow;
}

/* Before its socket is closed. */
static inline void flowslot_nccl_close(struct flowslot_nccl *all, struct flowslot_nccl_flow *flow) {
    struct flowslot_nccl_flow **at = &all->flows;
    if (flow == NULL) return;
    pthread_mutex_lock(&all->lock);
    while (*at != NULL && *at != flow) at = &(*at)->next;
    if (*at != NULL) *at = flow->next;
    flowslot_flow_close(&flow->flow);
    flowslot_nccl__forget(all, flow->comm);
    pthread_mutex_unlock(&all->lock);
    free(flow);
}

/* A communicator has ended. */
static inline void flowslot_nccl_forget(struct flowslot_nccl *all, uint64_t id) {
    struct flowslot_nccl_comm *comm;
    pthread_mutex_lock(&all->lock);
    for (comm = all->comms; comm != NULL && comm->id != id;) comm = comm->next;
    flowslot_nccl__forget(all, comm);
    pthread_mutex_unlock(&all->lock);
}

#endif
