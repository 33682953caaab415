/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receive.c - pieces are put where their requests want them. A lane whose piece belongs to a request
 * that is not posted yet waits for it; all before it are posted, so others never wait for that lane.
 */
#include "plugin.h"

#include <sys/uio.h>

/* NCCL posts the first receives of a ring's channels in their order, on all ranks: when a send can be
 * posted depends on the GPU. */
static void number(struct comm *comm) {
    struct context *context = comm->context;
    bool ring;
    if (atomic_load_explicit(&comm->channel, memory_order_relaxed) != NO_CHANNEL) return;
    ring = context_ring(context);
    atomic_store(&comm->in_ring, ring);
    atomic_store(&comm->channel, context->first + atomic_fetch_add(&context->channels[!ring], 1) %
                                                      MOST_CHANNELS);
}

int receive_post(struct comm *comm, void *data, size_t size, int tag, bool event, void **to) {
    struct request *request;
    int result;
    if (comm == NULL || to == NULL || (data == NULL && size > 0)) return NET_BAD_ARGUMENT;
    *to = NULL;
    result = atomic_load(&comm->failed);
    if (result != NET_OK) return result;
    if (event || !options.bootstrap) {
        if (tag >= 0) atomic_store(&comm->peer_rank, tag);
        number(comm);
    }
    pthread_mutex_lock(&comm->lock);
    request = comm_post(comm, data, size);
    if (request != NULL) comm_wake(comm, MOST_THREADS); /* those with a piece that waited */
    pthread_mutex_unlock(&comm->lock);
    receive_tell(comm);
    *to = request;
    return NET_OK;
}

void receive_tell(struct comm *comm) {
    if (comm->told || atomic_load_explicit(&comm->context->rank, memory_order_relaxed) < 0) return;
    comm->told = true;
    watch_note(comm);
}

static struct request *find(struct comm *comm, uint32_t number) {
    for (int i = 0; i < MOST_REQUESTS; i++) {
        struct request *request = &comm->requests[i];
        if (request->used && !atomic_load(&request->done) && request->number == number)
            return request;
    }
    return NULL;
}

/* What is wrong with a piece, or NULL. All of it comes from the network. */
static const char *misfit(const struct request *request, uint64_t offset, uint64_t length,
                          uint64_t total) {
    if (!request->sized && total > request->size)
        return "a message is larger than the receive that is posted for it";
    if (request->sized && total != request->size) return "a message changed its size";
    if (length > total || offset > total - length) return "a piece lies outside of its message";
    if (length > total - request->next) return "a message's pieces overlap";
    if (length == 0 && total != 0) return "a piece is empty";
    return NULL;
}

/* A header has come as a whole: where does the piece go? False: the lane waits, or the comm failed. */
static bool place_piece(struct group *group, struct lane *lane) {
    struct comm *comm = group->comm;
    uint32_t number = le32toh(lane->header.request), length = le32toh(lane->header.length);
    uint64_t offset = le64toh(lane->header.offset), total = le64toh(lane->header.total);
    const char *wrong = NULL;
    struct request *request;
    if (le32toh(lane->header.magic) != WIRE_PIECE) {
        comm_fail(comm, NET_REMOTE_ERROR, "the other end speaks another protocol");
        return false;
    }
    pthread_mutex_lock(&comm->lock);
    request = find(comm, number);
    lane->waits = request == NULL && (int32_t)(number - comm->posted) >= 0;
    if (lane->waits)
        group->waiting = true;
    else if (request == NULL)
        wrong = "a piece came of a message that is complete";
    else
        wrong = misfit(request, offset, length, total);
    if (request != NULL && wrong == NULL) {
        request->sized = true;
        request->size = total;
        request->next += length;
        lane->request = request;
        lane->data = request->data + offset;
        lane->length = length;
        lane->left = length;
    }
    pthread_mutex_unlock(&comm->lock);
    if (wrong != NULL) comm_fail(comm, NET_REMOTE_ERROR, "%s", wrong);
    return request != NULL && wrong == NULL;
}

static void piece_done(struct comm *comm, struct lane *lane) {
    struct request *request = lane->request;
    lane->request = NULL;
    pthread_mutex_lock(&comm->lock);
    request->arrived += lane->length;
    if (request->arrived == request->size) request_done(request);
    pthread_mutex_unlock(&comm->lock);
}

/* The other end has closed this lane, which is as it should be between two pieces. */
static void lane_ended(struct comm *comm, struct lane *lane) {
    if (lane->request != NULL || lane->header_left < sizeof(lane->header)) {
        comm_fail(comm, NET_REMOTE_ERROR, "the other end closed the connection within a message");
        return;
    }
    lane->ended = true;
    atomic_fetch_add(&comm->ended, 1);
}

/* With a piece's bytes the next header is read at once. */
static ssize_t read_lane(struct lane *lane) {
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    parts[0].iov_base = lane->data;
    parts[0].iov_len = lane->request != NULL ? lane->left : 0;
    parts[1].iov_base = (char *)&lane->header + sizeof(lane->header) - lane->header_left;
    parts[1].iov_len = lane->header_left;
    return recvmsg(lane->fd, &message, MSG_DONTWAIT);
}

bool receive_lane(struct group *group, struct lane *lane) {
    struct comm *comm = group->comm;
    ssize_t n;
    size_t body;
    if (lane->request == NULL && lane->header_left == 0) {
        if (!place_piece(group, lane)) return false;
        lane->header_left = sizeof(lane->header);
        if (lane->left == 0) {
            piece_done(comm, lane);
            return true;
        }
    }
    n = read_lane(lane);
    if (n < 0 && errno == EINTR) return true;
    if (n < 0) {
        lane->open = false;
        if (errno != EAGAIN) comm_fail(comm, NET_REMOTE_ERROR, "%s", strerror(errno));
        return false;
    }
    if (n == 0) {
        lane_ended(comm, lane);
        return false;
    }
    body = lane->request == NULL ? 0 : (size_t)n < lane->left ? (size_t)n : lane->left;
    lane->data += body;
    lane->left -= body;
    lane->header_left -= (size_t)n - body;
    atomic_fetch_add_explicit(&lane->moved, body, memory_order_relaxed);
    iteration_touch(now_ns());
    if (lane->request != NULL && lane->left == 0) piece_done(comm, lane);
    return true;
}
