/* SPDX-License-Identifier: Apache-2.0 */
/*
 * profiler.h - between NCCL's calls (tables.c), what is made of them (account.c), and another profiler
 * that is to hear them too (chain.c). Functions of account.c and chain.c may run on any thread.
 */
#ifndef FLOWSLOT_PROFILER_H
#define FLOWSLOT_PROFILER_H

#include "flowslot_nccl.h"

#include "layouts.h"

#pragma GCC visibility push(hidden)

#define MOST_COMMS 256 /* at a time; further ones go unreported */

/* A communicator of this process. */
struct comm {
    bool live;   /* read and written atomically */
    int version; /* of the interface */
    uint64_t id; /* the same on all ranks from v4 on */
    int ranks, rank;
    void *theirs; /* the other profiler's context */
    bool chained; /* it hears of this one */
    struct flowslot_nccl_flow *flow;
    uint64_t collectives, tensors;           /* number, bytes */
    uint64_t most, sent, beyond;             /* ProxyOps: at most, in fact; how many sent more */
};

/* An event as all versions tell it. */
struct event {
    uint64_t kind;
    void *parent;
    int rank;
    bool sends; /* a send, or a ProxyOp that sends */
    pid_t pid;
    uint64_t key;   /* of a collective or send: tells it from others */
    uint64_t bytes; /* of a collective or send: the tensor's; of a ProxyOp: at most */
};

struct event read_event(int version, const void *from);

/* account.c. Handles are numbers, so that one of another process (PXN) is never followed. */
void account_open(struct comm *comm);
void account_close(struct comm *comm);
void *account_start(struct comm *comm, const struct event *event);
void account_theirs(void *handle, void *theirs);
void *account_find_theirs(void *handle); /* NULL: unknown */
struct comm *account_comm(void *handle); /* NULL: unknown */
void account_stop(void *handle);
void account_record(void *handle, int state, const struct state_args *args);

/* chain.c. */
struct profiler *chain_get(int version); /* NULL: there is none */
void chain_start(struct comm *comm, void *handle, const struct event *event, const void *from);
void chain_stop(void *theirs);
void chain_record(void *theirs, int state, struct state_args *args);
int chain_mask(void); /* of events that it wants */
int *chain_mask_at(void);

#pragma GCC visibility pop
#endif
