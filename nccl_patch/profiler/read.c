/* SPDX-License-Identifier: Apache-2.0 */
/* read.c - an event, as each version of NCCL's interface describes it. */
#include "profiler.h"

/* Bytes of an element: v1 has NCCL's number for its type. */
static uint64_t size_of_number(uint8_t type) {
    static const uint8_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type < sizeof(sizes) ? sizes[type] : 0;
}

/* Later ones its name; 8-bit integers are the smallest, and what NCCL has no name for. */
static uint64_t size_of(const char *type) {
    static const struct {
        const char *name;
        uint64_t size;
    } sizes[] = {{"ncclInt32", 4},   {"ncclUint32", 4},  {"ncclInt64", 8},   {"ncclUint64", 8},
                 {"ncclFloat16", 2}, {"ncclBfloat16", 2}, {"ncclFloat32", 4}, {"ncclFloat64", 8}};
    for (size_t i = 0; type != NULL && i < sizeof(sizes) / sizeof(sizes[0]); i++)
        if (strcmp(type, sizes[i].name) == 0) return sizes[i].size;
    return 1;
}

static uint64_t hash(const char *text) {
    uint64_t sum = 0;
    for (; text != NULL && *text != '\0'; text++) sum = flowslot_nccl_mix(sum, (uint8_t)*text);
    return sum;
}

static uint64_t key_of(uint64_t function, const void *from, const void *to) {
    return flowslot_nccl_mix(flowslot_nccl_mix(function, (uintptr_t)from), (uintptr_t)to);
}

#define SEND_OF_V1 6 /* ncclFuncSend; its name later */

/* What stands where depends on the version; what is called how does not. */
#define NAMED(event, described)                                                                 \
    if ((event).kind == KIND_COLLECTIVE) {                                                      \
        (event).key = key_of(hash((described)->collective.function),                            \
                             (described)->collective.from, (described)->collective.to);         \
        (event).bytes = (described)->collective.count * size_of((described)->collective.type);  \
    } else if ((event).kind == KIND_P2P) {                                                      \
        (event).sends = (described)->p2p.function != NULL &&                                    \
                        strcmp((described)->p2p.function, "Send") == 0;                         \
        (event).key = key_of((uint64_t)(described)->p2p.peer, (described)->p2p.buffer, NULL);   \
        (event).bytes = (described)->p2p.count * size_of((described)->p2p.type);                \
    }

static void read_1(struct event *event, const struct event_1 *from) {
    if (event->kind == KIND_COLLECTIVE) {
        event->key = key_of(from->collective.function, from->collective.from, from->collective.to);
        event->bytes = from->collective.count * size_of_number(from->collective.type);
    } else if (event->kind == KIND_P2P) {
        event->sends = from->p2p.function == SEND_OF_V1;
        event->key = key_of((uint64_t)from->p2p.peer, from->p2p.buffer, NULL);
        event->bytes = from->p2p.count * size_of_number(from->p2p.type);
    }
}

struct event read_event(int version, const void *from) {
    const struct event_1 *old = from; /* parent, rank and ProxyOps are the same in all */
    struct event event = {.parent = old->head.parent, .rank = old->head.rank};
    event.kind = version < 5 ? old->head.kind : ((const struct event_5 *)from)->head.kind;
    if (event.kind == KIND_PROXY_OP) {
        event.pid = old->op.pid;
        event.sends = old->op.sends != 0;
        if (old->op.steps > 0 && old->op.chunk > 0)
            event.bytes = (uint64_t)old->op.steps * (uint64_t)old->op.chunk;
    } else if (version == 1) {
        read_1(&event, old);
    } else if (version <= 3) {
        NAMED(event, (const struct event_2 *)from)
    } else {
        NAMED(event, (const struct event_5 *)from) /* v4 differs in its head alone */
    }
    return event;
}
