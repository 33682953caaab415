/* SPDX-License-Identifier: Apache-2.0 */
/*
 * send.c - a request is cut into pieces, and a piece goes to whichever lane is free. A lane is free
 * while its kernel holds little that it has not sent: so a slow one gets less.
 */
#include "plugin.h"

#include <netinet/tcp.h>
#include <sys/uio.h>

#define LEAST_PIECE ((size_t)16 << 10)
#define MOST_PIECE ((size_t)256 << 10)
#define ONLY_PIECE ((size_t)1 << 20) /* where there is one lane */
#define LEAST_UNSENT (16 << 10)      /* bytes that a lane's kernel may hold: */
#define MOST_UNSENT (4 << 20)
#define UNSENT_PER_S 512 /* what it sends in 1/512 s, between these */
#define EASY 16          /* pieces that a kernel took without being full: it is not a slow lane's */
#define MEASURE_NS UINT64_C(10000000)

void send_limit(struct lane *lane, uint64_t rate) {
    int limit = LEAST_UNSENT;
    while (limit < MOST_UNSENT && (uint64_t)limit * UNSENT_PER_S < rate) limit *= 2;
    if (limit == lane->limit) return;
    lane->limit = limit;
    (void)setsockopt(lane->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &limit, sizeof(limit));
}

/* The kernel takes no more. If there was always something to send since it last said so, what it has
 * taken meanwhile is what it has sent: TCP's own measure has bursts in it. */
static void lane_full(struct lane *lane) {
    uint64_t now = now_ns(), moved = atomic_load_explicit(&lane->moved, memory_order_relaxed);
    lane->open = false;
    lane->easy = 0;
    if (lane->limit == 0) return;
    if (lane->full_at != 0 && now - lane->full_at < MEASURE_NS) return;
    if (lane->full_at != 0) {
        uint64_t rate =
            (moved - lane->full_with) * UINT64_C(1000000) / ((now - lane->full_at) / 1000);
        send_limit(lane, rate < lane->rate ? rate : lane->rate); /* one may be a burst */
        lane->rate = rate;
    }
    lane->full_at = now;
    lane->full_with = moved;
}

/* Of a message of `size` bytes. */
static size_t piece_size(const struct comm *comm, size_t size) {
    size_t share = (size + (size_t)comm->lane_count - 1) / (size_t)comm->lane_count;
    if (comm->lane_count == 1) return ONLY_PIECE;
    return share < LEAST_PIECE ? LEAST_PIECE : share > MOST_PIECE ? MOST_PIECE : share;
}

int send_post(struct comm *comm, void *data, size_t size, int tag, bool event, void **to) {
    struct request *request;
    int result;
    if (comm == NULL || to == NULL || (data == NULL && size > 0)) return NET_BAD_ARGUMENT;
    *to = NULL;
    result = atomic_load(&comm->failed);
    if (result != NET_OK) return result;
    pthread_mutex_lock(&comm->lock);
    request = comm_post(comm, data, size);
    if (request != NULL) {
        int at = (comm->queue_from + comm->queued++) % MOST_REQUESTS;
        comm->queue[at] = (int)(request - comm->requests);
        report_posted(comm, size, tag, event);
        comm_wake(comm, (int)(size / piece_size(comm, size)) + 1);
    }
    pthread_mutex_unlock(&comm->lock);
    if (request != NULL && !comm->threaded) comm_advance(comm);
    *to = request;
    return NET_OK;
}

/* Gives the next piece to a lane that has none; false: there is none. */
static bool take_piece(struct group *group, struct lane *lane) {
    struct comm *comm = group->comm;
    struct request *request = NULL;
    size_t length, most;
    if (!comm->threaded && comm->queued == 0) return false;
    pthread_mutex_lock(&comm->lock);
    if (comm->queued == 0) {
        group->waiting = true;
        pthread_mutex_unlock(&comm->lock);
        return false;
    }
    request = &comm->requests[comm->queue[comm->queue_from]];
    most = piece_size(comm, request->size);
    if (lane->easy < EASY && lane->limit != 0) { /* a piece that a slow lane has nobody else can send */
        if (most > (size_t)lane->limit) most = (size_t)lane->limit;
        lane->easy++;
    }
    length = request->size - request->next;
    if (length > most) length = most;
    lane->header = (struct wire_piece){
        .magic = htole32(WIRE_PIECE),
        .request = htole32(request->number),
        .offset = htole64(request->next),
        .total = htole64(request->size),
        .length = htole32((uint32_t)length),
    };
    lane->header_left = sizeof(lane->header);
    lane->data = request->data + request->next;
    lane->left = length;
    lane->length = (uint32_t)length;
    lane->request = request;
    request->next += length;
    request->pieces++;
    if (request->next == request->size) {
        comm->queue_from = (comm->queue_from + 1) % MOST_REQUESTS;
        comm->queued--;
    }
    atomic_fetch_add_explicit(&lane->assigned, length, memory_order_relaxed);
    pthread_mutex_unlock(&comm->lock);
    return true;
}

static void piece_done(struct comm *comm, struct lane *lane) {
    struct request *request = lane->request;
    lane->request = NULL;
    pthread_mutex_lock(&comm->lock);
    if (--request->pieces == 0 && request->next == request->size) request_done(request);
    pthread_mutex_unlock(&comm->lock);
}

bool send_lane(struct group *group, struct lane *lane) {
    struct comm *comm = group->comm;
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t n;
    size_t head;
    if (lane->request == NULL && !take_piece(group, lane)) {
        lane->full_at = 0;
        return false;
    }
    parts[0].iov_base = (char *)&lane->header + sizeof(lane->header) - lane->header_left;
    parts[0].iov_len = lane->header_left;
    parts[1].iov_base = lane->data;
    parts[1].iov_len = lane->left;
    n = sendmsg(lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
        if (errno == EINTR) return true;
        if (errno == EAGAIN)
            lane_full(lane);
        else
            comm_fail(comm, NET_REMOTE_ERROR, "%s", strerror(errno));
        return false;
    }
    head = (size_t)n < lane->header_left ? (size_t)n : lane->header_left;
    lane->header_left -= head;
    lane->left -= (size_t)n - head;
    lane->data += (size_t)n - head;
    atomic_fetch_add_explicit(&lane->moved, (size_t)n - head, memory_order_relaxed);
    iteration_touch(now_ns());
    if (lane->header_left == 0 && lane->left == 0) piece_done(comm, lane);
    return true;
}

/* Nothing is ever said on a lane but that it ends: as it should, unless more is to be sent. */
void send_heard(struct comm *comm, struct lane *lane) {
    char byte;
    ssize_t n = recv(lane->fd, &byte, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) {
        comm_fail(comm, NET_REMOTE_ERROR, "the other end speaks another protocol");
    } else if (lane->request != NULL) {
        comm_fail(comm, NET_REMOTE_ERROR, "the other end closed the connection");
    } else if (!lane->ended) { /* what this lane had was sent; others say so of theirs */
        lane->ended = true;
        atomic_fetch_add(&comm->ended, 1);
    }
}
