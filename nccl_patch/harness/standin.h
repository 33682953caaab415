/* SPDX-License-Identifier: Apache-2.0 */
/*
 * standin.h - a stand-in for NCCL's own socket transport, to compare with; our own code.
 *
 * The same split rule: a control socket carries each message's size (4 bytes) and its first 128
 * bytes, or all of it where there are no other sockets; the rest goes in pieces of
 * max(64 KiB, rest / sockets), dealt to the sockets in turn, whichever is free. Without helper
 * threads, everything is driven in test(); helpers busy-poll while there is something to do.
 * No keepalive, no timeout. NCCL_SOCKET_NTHREADS (0), NCCL_NSOCKS_PERTHREAD (0; 1 with threads),
 * NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY are honoured. Unlike NCCL, which has no data sockets
 * then, NCCL_NSOCKS_PERTHREAD counts without threads too: so that both can be compared.
 */
#ifndef STANDIN_H
#define STANDIN_H

#include "net.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum {
    MOST_LANES = 64,
    MOST_HELPERS = 16,
    INLINE = 128,
    LEAST_PIECE = 1 << 16,
    QUEUE = 2 * NET_REQUESTS, /* pieces per lane: at most one per request */
};

struct request {
    struct comm *comm;
    uint8_t *data;
    uint32_t size;       /* room; of a receive, once the header has come, what comes */
    uint32_t header;
    size_t moved;        /* of the header and what follows on the control socket */
    bool used, told;     /* told: the control socket's part is over */
    atomic_size_t left;  /* of the pieces */
};

struct piece {
    struct request *request;
    uint8_t *data;
    size_t left;
};

struct lane {
    int fd;
    struct piece queue[QUEUE];
    atomic_uint head, tail; /* taken by a helper (or test); filled by test */
};

struct helper {
    struct comm *comm;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t filled;
};

struct comm {
    bool sending;
    atomic_bool stop;
    int lanes, helpers, next, greeted;
    int control;
    atomic_int error;
    struct lane lane[MOST_LANES];
    struct helper helper[MOST_HELPERS];
    struct request requests[NET_REQUESTS];
    struct request *order[NET_REQUESTS]; /* of the control socket */
    unsigned asked, told;
};

/* standin_move.c: drives lanes until the comm stops; of a `struct helper`. */
void *standin_help(void *helper);

/* NET_ results; `handle`: NET_HANDLE bytes. */
int standin_init(void);
int standin_listen(void *handle, void **comm);
int standin_connect(void *handle, void **comm);
int standin_accept(void *listening, void **comm);
int standin_post(void *comm, void *data, size_t size, void **request); /* of either direction */
int standin_test(void *request, int *done, int *size);
int standin_close(void *comm);
int standin_close_listen(void *listening);
const char *standin_interface(void);

#endif
