/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flowslot_nccl_hooks.h - what the patched NCCL tells flowslot; C++11. One flow for each socket that
 * carries data, of the end that sends. See flowslot_nccl.h.
 *
 *   Enqueued     the application has called a collective, or a send
 *   Connecting   this thread's next connection is that communicator's, to that rank
 *   Connected    it is there; Add: by this socket data go. Nothing, if it was not announced: then it
 *                is none that carries data (NCCL_OOB_NET_ENABLE)
 *   Posted       so many bytes are to go through a socket
 *   Done         the kernel has taken them
 *   Closed       its sockets are about to be closed
 *
 * Control sockets beside data sockets are no flows: Posted and Done do nothing with them.
 */
#ifndef FLOWSLOT_NCCL_HOOKS_H
#define FLOWSLOT_NCCL_HOOKS_H

#include "flowslot_nccl.h"

namespace flowslot_nccl_hooks {

/* It is never destroyed: NCCL's threads may outlive whatever exit() runs. */
inline struct flowslot_nccl *All() {
    static struct flowslot_nccl *all = [] {
        struct flowslot_nccl *made =
            static_cast<struct flowslot_nccl *>(calloc(1, sizeof(struct flowslot_nccl)));
        if (made != NULL) pthread_mutex_init(&made->lock, NULL);
        return made;
    }();
    return all;
}

struct Whose {
    const void *comm;
    int rank, peer, channel;
};

inline Whose &Next() {
    static thread_local Whose next = {NULL, -1, -1, -1};
    return next;
}

/* The sockets of one connection. */
struct Connection {
    enum { kMost = 64 };
    Whose whose;
    int count;
    int fds[kMost];
    struct flowslot_nccl_flow *flows[kMost];
};

inline void Enqueued(const void *comm, int function, const void *from, const void *to,
                     uint64_t bytes) {
    uint64_t key = flowslot_nccl_mix((uintptr_t)from, (uintptr_t)to);
    if (All() == NULL) return;
    flowslot_nccl_enqueued(All(), (uintptr_t)comm, flowslot_nccl_mix(key, (uint64_t)function), bytes);
}

inline void Connecting(const void *comm, int rank, int peer, int channel) {
    Next() = Whose{comm, rank, peer, channel};
}

inline Connection *Connected() {
    Whose whose = Next();
    Connection *made;
    Next() = Whose{NULL, -1, -1, -1};
    if (whose.comm == NULL) return NULL;
    made = static_cast<Connection *>(calloc(1, sizeof(Connection)));
    if (made != NULL) made->whose = whose;
    return made;
}

inline void Add(Connection *to, int fd) {
    if (to == NULL || All() == NULL || to->count == Connection::kMost) return;
    to->fds[to->count] = fd;
    to->flows[to->count++] = flowslot_nccl_open(All(), (uintptr_t)to->whose.comm, fd, to->whose.rank,
                                                to->whose.peer, to->whose.channel);
}

inline void Moved(Connection *by, int fd, uint64_t posted, uint64_t done) {
    for (int i = 0; by != NULL && i < by->count; i++)
        if (by->fds[i] == fd) return flowslot_nccl_moved(All(), by->flows[i], posted, done);
}

inline void Posted(Connection *by, int fd, uint64_t bytes) { Moved(by, fd, bytes, 0); }

inline void Done(Connection *by, int fd, uint64_t bytes) { Moved(by, fd, 0, bytes); }

inline void Closed(Connection *what) {
    for (int i = 0; what != NULL && i < what->count; i++) flowslot_nccl_close(All(), what->flows[i]);
    free(what);
}

}  // namespace flowslot_nccl_hooks

/* For the application: the iteration of this number begins. From then on only this counts. */
extern "C" __attribute__((visibility("default"), used)) inline void flowslot_iteration(
    uint64_t iteration) {
    if (flowslot_nccl_hooks::All() != NULL)
        flowslot_nccl_iteration(flowslot_nccl_hooks::All(), iteration);
}

#endif
