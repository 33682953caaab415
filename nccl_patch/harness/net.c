/* SPDX-License-Identifier: Apache-2.0 */
#include "net.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As NCCL_DEBUG does: nothing, warnings (level 2), all. */
static void log_line(int level, unsigned long subsystems, const char *where, int line,
                     const char *format, ...) {
    const char *wanted = getenv("NCCL_DEBUG");
    char text[1024];
    va_list rest;
    (void)subsystems;
    if (wanted == NULL || (level > 2 && strcmp(wanted, "WARN") == 0)) return;
    va_start(rest, format);
    vsnprintf(text, sizeof(text), format, rest);
    va_end(rest);
    fprintf(stderr, "%s:%d: %s\n", where, line, text);
}

static int no_profiler(void **event, int kind, void *parent, int64_t plugin, void *data) {
    (void)event, (void)kind, (void)parent, (void)plugin, (void)data;
    return NET_OK;
}

const char *net_load(struct net *net, const char *path, int version) {
    static char why[512];
    char symbol[32];
    memset(net, 0, sizeof(*net));
    net->version = version;
    net->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (net->library == NULL) {
        snprintf(why, sizeof(why), "%s", dlerror());
        return why;
    }
    snprintf(symbol, sizeof(symbol), "ncclNetPlugin_v%d", version);
    net->table = dlsym(net->library, symbol);
    if (net->table != NULL) return NULL;
    snprintf(why, sizeof(why), "%s: has no %s", path, symbol);
    net_unload(net);
    return why;
}

void net_unload(struct net *net) {
    if (net->library != NULL) dlclose(net->library);
    net->library = NULL;
    net->table = NULL;
}

static struct net_config config = {INT_MIN}; /* traffic class: not set */

int net_init(struct net *net, uint64_t comm) {
    if (net->version >= 11)
        return net->table->init.v11(&net->context, comm, &config, log_line, no_profiler);
    if (net->version >= 10) return net->table->init.v10(log_line, no_profiler);
    return net->table->init.v6(log_line);
}

int net_finalize(struct net *net) {
    return net->version >= 11 ? net->table->finalize(net->context) : NET_OK;
}

/* What all versions have, by its name; `t`: the same struct in the version's own layout. */
#define COMMON(out, t)                         \
    (out)->name = (t).name;                    \
    (out)->pci_path = (t).pci_path;            \
    (out)->guid = (t).guid;                    \
    (out)->pointers = (t).pointers;            \
    (out)->speed = (t).speed;                  \
    (out)->port = (t).port;                    \
    (out)->latency = (t).latency;              \
    (out)->most_comms = (t).most_comms;        \
    (out)->most_receives = (t).most_receives
#define OFFLOAD(out, t)                        \
    (out)->device_type = (t).device_type;      \
    (out)->device_version = (t).device_version
#define PARTS(out, t)                                                                   \
    (out)->parts.count = (t).parts.count;                                               \
    memcpy((out)->parts.devices, (t).parts.devices, sizeof((t).parts.devices));         \
    (out)->most_p2p = (t).most_p2p;                                                     \
    (out)->most_collective = (t).most_collective

/* Bytes that a version leaves alone stay 0xA5 before and after its own: written past its end? */
int net_properties(const struct net *net, int device, struct properties12 *out) {
    union {
        struct properties6 v6;
        struct properties7 v7;
        struct properties8 v8;
        struct properties9 v9;
        struct properties11 v11;
        struct properties12 v12;
        unsigned char bytes[256];
    } in;
    static const size_t sizes[] = {48, 56, 64, 104, 104, 112, 128};
    size_t i, size = sizes[net->version - NET_OLDEST];
    int result;
    memset(in.bytes, 0, size);
    memset(in.bytes + size, 0xA5, sizeof(in.bytes) - size);
    result = net->table->properties(device, &in);
    if (result != NET_OK) return result;
    for (i = size; i < sizeof(in.bytes); i++)
        if (in.bytes[i] != 0xA5) return NET_INTERNAL_ERROR;
    memset(out, 0, sizeof(*out));
    out->rail = out->plane = -1;
    out->most_in_request = 1;
    out->parts.count = 1;
    out->parts.devices[0] = device;
    out->most_p2p = out->most_collective = 1;
    switch (net->version) {
    case 6: COMMON(out, in.v6); break;
    case 7: COMMON(out, in.v7); OFFLOAD(out, in.v7); break;
    case 8: COMMON(out, in.v8); OFFLOAD(out, in.v8); break;
    case 9:
    case 10: COMMON(out, in.v9); OFFLOAD(out, in.v9); PARTS(out, in.v9); break;
    case 11:
        COMMON(out, in.v11); OFFLOAD(out, in.v11); PARTS(out, in.v11);
        out->most_in_request = in.v11.most_in_request;
        break;
    default: *out = in.v12;
    }
    return NET_OK;
}

int net_listen(struct net *net, int device, void *handle, void **comm) {
    if (net->version >= 11) return net->table->listen.v11(net->context, device, handle, comm);
    return net->table->listen.v6(device, handle, comm);
}

int net_connect(struct net *net, int device, void *handle, void **comm) {
    void *offload = NULL;
    if (net->version >= 11)
        return net->table->connect.v11(net->context, device, handle, comm, &offload);
    if (net->version == 10)
        return net->table->connect.v10(device, &config, handle, comm, &offload);
    if (net->version >= 7) return net->table->connect.v7(device, handle, comm, &offload);
    return net->table->connect.v6(device, handle, comm);
}

int net_accept(struct net *net, void *listening, void **comm) {
    void *offload = NULL;
    if (net->version >= 7) return net->table->accept.v7(listening, comm, &offload);
    return net->table->accept.v6(listening, comm);
}

int net_reg(struct net *net, void *comm, void *data, size_t size, int type, void **region) {
    if (net->version >= 8) return net->table->reg.v8(comm, data, size, type, region);
    return net->table->reg.v6(comm, data, (int)size, type, region);
}

int net_isend(struct net *net, void *comm, void *data, size_t size, int tag, void *region,
              void *parent, void **request) {
    if (net->version >= 10)
        return net->table->isend.v10(comm, data, size, tag, region, parent, request);
    if (net->version == 9) return net->table->isend.v9(comm, data, size, tag, region, request);
    return net->table->isend.v6(comm, data, (int)size, tag, region, request);
}

int net_irecv(struct net *net, void *comm, void *data, size_t size, int tag, void *region,
              void **parents, void **request) {
    int small = (int)size;
    if (net->version >= 10)
        return net->table->irecv.v10(comm, 1, &data, &size, &tag, &region, parents, request);
    if (net->version == 9)
        return net->table->irecv.v9(comm, 1, &data, &size, &tag, &region, request);
    return net->table->irecv.v6(comm, 1, &data, &small, &tag, &region, request);
}

int net_consumed(struct net *net, void *comm, void *request) {
    if (net->version < 7 || net->table->consumed == NULL) return NET_OK;
    return net->table->consumed(comm, 1, request);
}

int net_set_attributes(struct net *net, struct net_attributes *attributes) {
    if (net->version < 11 || net->table->set_attributes == NULL) return NET_OK;
    return net->table->set_attributes(net->context, attributes);
}
