/* SPDX-License-Identifier: Apache-2.0 */
/* standin_move.c - the stand-in's requests: what the control socket tells, and the lanes' pieces. */
#include "standin.h"

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>

/* Bytes moved, 0: later; notes an error. */
static size_t move(struct comm *comm, int fd, void *data, size_t size) {
    ssize_t n = comm->sending ? send(fd, data, size, MSG_NOSIGNAL) : recv(fd, data, size, 0);
    if (n > 0) return (size_t)n;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    comm->error = NET_REMOTE_ERROR;
    return 0;
}

/* True: pieces moved. Only one thread drives a lane. */
static bool drive_lane(struct comm *comm, struct lane *lane) {
    unsigned head = lane->head;
    bool moved = false;
    while (head != atomic_load_explicit(&lane->tail, memory_order_acquire)) {
        struct piece *piece = &lane->queue[head % QUEUE];
        size_t n = move(comm, lane->fd, piece->data, piece->left);
        if (n == 0) break;
        moved = true;
        piece->data += n;
        piece->left -= n;
        if (piece->left == 0) {
            lane->head = ++head;
            /* The last look at the request: its memory is the caller's from now on. */
            atomic_fetch_sub(&piece->request->left, 1);
        }
    }
    return moved;
}

static bool lanes_empty(const struct helper *helper) {
    struct comm *comm = helper->comm;
    int i;
    for (i = (int)(helper - comm->helper); i < comm->lanes; i += comm->helpers)
        if (comm->lane[i].head != comm->lane[i].tail) return false;
    return true;
}

void *standin_help(void *argument) {
    struct helper *helper = argument;
    struct comm *comm = helper->comm;
    int i, first = (int)(helper - comm->helper);
    while (!comm->stop) {
        bool moved = false;
        for (i = first; i < comm->lanes; i += comm->helpers)
            moved |= drive_lane(comm, &comm->lane[i]);
        if (moved) continue;
        pthread_mutex_lock(&helper->lock);
        while (!comm->stop && (lanes_empty(helper) || comm->error))
            pthread_cond_wait(&helper->filled, &helper->lock);
        pthread_mutex_unlock(&helper->lock);
        sched_yield();
    }
    return NULL;
}

/* Deals what the control socket does not carry to the lanes. */
static void deal(struct comm *comm, struct request *request) {
    size_t at = request->size < INLINE ? request->size : INLINE, rest = request->size - at, piece;
    if (comm->lanes == 0 || rest == 0) return;
    piece = (rest + (size_t)comm->lanes - 1) / (size_t)comm->lanes;
    if (piece < LEAST_PIECE) piece = LEAST_PIECE;
    request->left = (rest + piece - 1) / piece;
    while (at < request->size) {
        int number = comm->next;
        struct lane *lane = &comm->lane[number];
        unsigned tail = lane->tail;
        size_t size = request->size - at < piece ? request->size - at : piece;
        lane->queue[tail % QUEUE] = (struct piece){request, request->data + at, size};
        atomic_store_explicit(&lane->tail, tail + 1, memory_order_release);
        if (comm->helpers > 0) {
            struct helper *helper = &comm->helper[number % comm->helpers];
            pthread_mutex_lock(&helper->lock);
            pthread_cond_signal(&helper->filled);
            pthread_mutex_unlock(&helper->lock);
        }
        comm->next = (number + 1) % comm->lanes;
        at += size;
    }
}

/* The control socket's part of one message: its size, then what goes beside it. */
static bool tell(struct comm *comm, struct request *request) {
    const size_t header = sizeof(request->header);
    size_t inlined, n;
    while (request->moved < header) {
        n = move(comm, comm->control, (uint8_t *)&request->header + request->moved,
                 header - request->moved);
        if (n == 0) return false;
        request->moved += n;
        if (request->moved == header && request->header > request->size) {
            comm->error = NET_INVALID_ARGUMENT; /* more is sent than there is room for */
            return false;
        }
    }
    request->size = request->header;
    inlined = comm->lanes > 0 && request->size > INLINE ? INLINE : request->size;
    while (request->moved < header + inlined) {
        n = move(comm, comm->control, request->data + request->moved - header,
                 header + inlined - request->moved);
        if (n == 0) return false;
        request->moved += n;
    }
    return true;
}

static void drive(struct comm *comm) {
    int i;
    while (comm->told != comm->asked && !comm->error) {
        struct request *request = comm->order[comm->told % NET_REQUESTS];
        if (!tell(comm, request)) break;
        deal(comm, request);
        request->told = true;
        comm->told++;
    }
    for (i = 0; i < comm->lanes && comm->helpers == 0; i++) drive_lane(comm, &comm->lane[i]);
}

int standin_post(void *posted, void *data, size_t size, void **out) {
    struct comm *comm = posted;
    int i;
    *out = NULL;
    if (comm->error) return comm->error;
    if (size > UINT32_MAX) return NET_INVALID_ARGUMENT;
    for (i = 0; i < NET_REQUESTS; i++) {
        struct request *request = &comm->requests[i];
        if (request->used) continue;
        request->comm = comm;
        request->data = data;
        request->size = request->header = (uint32_t)size;
        request->moved = 0;
        request->told = false;
        request->left = 0;
        request->used = true;
        comm->order[comm->asked++ % NET_REQUESTS] = request;
        *out = request;
        return NET_OK;
    }
    return NET_OK;
}

int standin_test(void *tested, int *done, int *size) {
    struct request *request = tested;
    struct comm *comm = request->comm;
    *done = 0;
    if (!request->told || comm->helpers == 0) drive(comm);
    if (request->told && request->left == 0) {
        *done = 1;
        if (size != NULL) *size = (int)request->size;
        request->used = false;
        return NET_OK;
    }
    return comm->error;
}
