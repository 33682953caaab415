/* SPDX-License-Identifier: Apache-2.0 */
/* setup.h - what listen, connect and accept share. */
#ifndef FLOWSLOT_NCCL_SETUP_H
#define FLOWSLOT_NCCL_SETUP_H

#include "plugin.h"

/* Who does not connect gives no sign of life: accept waits for so many timeouts. */
#define PATIENCE 10
#define SILENT_S 10        /* a connection must have said hello by then */
#define MOST_STRANGERS 128 /* connections of which the hello has not come as a whole */
#define MOST_PARTIES 8     /* comms of which not all lanes have come */

#pragma GCC visibility push(hidden)

struct stranger {
    int fd;
    struct sockaddr_storage address;
    size_t have;
    uint64_t until;
    struct wire_hello hello;
};

struct party {
    uint64_t connection; /* 0: free */
    int came;
    struct sockaddr_storage address;
    int fds[MOST_LANES + 1];
};

struct listener {
    struct listener *next; /* watch.c's */
    pthread_mutex_t lock;  /* over the rest: accept and watch.c use it */
    struct context *context;
    int fd, lanes, threads;
    uint64_t until; /* ns: the next comm must be there by then; 0: nobody asked for it */
    uint8_t key[WIRE_KEY];
    int stranger_count;
    bool complained;
    struct stranger strangers[MOST_STRANGERS];
    struct party parties[MOST_PARTIES];
};

void setup_socket(int fd);

#pragma GCC visibility pop
#endif
