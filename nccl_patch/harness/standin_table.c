/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's tables: one per version of the interface. */
#include "net.h"
#include "standin.h"

#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

static int init_v6(net_log *log) {
    (void)log;
    return standin_init();
}

static int init_v10(net_log *log, net_profiler *profiler) {
    (void)log, (void)profiler;
    return standin_init();
}

static int init_v11(void **context, uint64_t comm, struct net_config *config, net_log *log,
                    net_profiler *profiler) {
    static int nothing;
    (void)comm, (void)config, (void)log, (void)profiler;
    *context = &nothing;
    return standin_init();
}

static int devices(int *count) {
    *count = 1;
    return NET_OK;
}

/* All versions' fields by their names, which are the same; what a version lacks is set apart. */
#define COMMON(out)                                                       \
    memset(out, 0, sizeof(*(out)));                                       \
    (out)->name = (char *)standin_interface();                            \
    (out)->pci_path = NULL;                                               \
    (out)->pointers = NET_HOST_MEMORY;                                    \
    (out)->speed = 10000;                                                 \
    (out)->most_comms = 65536;                                            \
    (out)->most_receives = 1
#define PARTS(out)                                      \
    (out)->parts.count = 1;                             \
    (out)->parts.devices[0] = device;                   \
    (out)->most_p2p = (out)->most_collective = 1 << 30
#define PROPERTIES(version, more)                              \
    static int properties_v##version(int device, void *given) { \
        struct properties##version *out = given;               \
        (void)device;                                          \
        COMMON(out);                                           \
        more;                                                  \
        return NET_OK;                                         \
    }
PROPERTIES(6, )
PROPERTIES(7, )
PROPERTIES(8, )
PROPERTIES(9, PARTS(out))
PROPERTIES(11, PARTS(out); out->most_in_request = 1)
PROPERTIES(12, PARTS(out); out->most_in_request = 1; out->rail = out->plane = -1)

static int listen_v6(int device, void *handle, void **comm) {
    (void)device;
    return standin_listen(handle, comm);
}

static int listen_v11(void *context, int device, void *handle, void **comm) {
    (void)context, (void)device;
    return standin_listen(handle, comm);
}

static int connect_v6(int device, void *handle, void **comm) {
    (void)device;
    return standin_connect(handle, comm);
}

static int connect_v7(int device, void *handle, void **comm, void **offload) {
    (void)device, (void)offload;
    return standin_connect(handle, comm);
}

static int connect_v10(int device, struct net_config *config, void *handle, void **comm,
                       void **offload) {
    (void)device, (void)config, (void)offload;
    return standin_connect(handle, comm);
}

static int connect_v11(void *context, int device, void *handle, void **comm, void **offload) {
    (void)context, (void)device, (void)offload;
    return standin_connect(handle, comm);
}

static int accept_v6(void *listening, void **comm) {
    return standin_accept(listening, comm);
}

static int accept_v7(void *listening, void **comm, void **offload) {
    (void)offload;
    return standin_accept(listening, comm);
}

static int reg_v8(void *comm, void *data, size_t size, int type, void **region) {
    (void)data, (void)size;
    *region = comm;
    return type == NET_HOST_MEMORY ? NET_OK : NET_INTERNAL_ERROR;
}

static int reg_v6(void *comm, void *data, int size, int type, void **region) {
    return reg_v8(comm, data, (size_t)size, type, region);
}

static int dereg(void *comm, void *region) {
    (void)comm, (void)region;
    return NET_OK;
}

static int send_v6(void *comm, void *data, int size, int tag, void *region, void **request) {
    (void)tag, (void)region;
    return standin_post(comm, data, (size_t)size, request);
}

static int send_v9(void *comm, void *data, size_t size, int tag, void *region, void **request) {
    (void)tag, (void)region;
    return standin_post(comm, data, size, request);
}

static int send_v10(void *comm, void *data, size_t size, int tag, void *region, void *parent,
                    void **request) {
    (void)tag, (void)region, (void)parent;
    return standin_post(comm, data, size, request);
}

static int receive_v6(void *comm, int n, void **data, int *sizes, int *tags, void **regions,
                      void **request) {
    (void)tags, (void)regions;
    return n == 1 ? standin_post(comm, data[0], (size_t)sizes[0], request) : NET_INTERNAL_ERROR;
}

static int receive_v9(void *comm, int n, void **data, size_t *sizes, int *tags, void **regions,
                      void **request) {
    (void)tags, (void)regions;
    return n == 1 ? standin_post(comm, data[0], sizes[0], request) : NET_INTERNAL_ERROR;
}

static int receive_v10(void *comm, int n, void **data, size_t *sizes, int *tags, void **regions,
                       void **parents, void **request) {
    (void)tags, (void)regions, (void)parents;
    return n == 1 ? standin_post(comm, data[0], sizes[0], request) : NET_INTERNAL_ERROR;
}

static int flush(void *comm, int n, void **data, int *sizes, void **regions, void **request) {
    (void)comm, (void)n, (void)data, (void)sizes, (void)regions, (void)request;
    return NET_INTERNAL_ERROR;
}

static int finalize(void *context) {
    (void)context;
    return NET_OK;
}

static int set_attributes(void *context, struct net_attributes *attributes) {
    (void)context, (void)attributes;
    return NET_OK;
}

/* `of`: the version that introduced the signature of this one. */
#define TABLE(version, of_init, of_properties, of_listen, of_connect, of_accept, of_reg, of_send)  \
    EXPORTED extern const struct net_table ncclNetPlugin_v##version;                               \
    const struct net_table ncclNetPlugin_v##version = {                                            \
        .name = "Socket stand-in",                                                                 \
        .init.v##of_init = init_v##of_init,                                                        \
        .devices = devices,                                                                        \
        .properties = properties_v##of_properties,                                                 \
        .listen.v##of_listen = listen_v##of_listen,                                                \
        .connect.v##of_connect = connect_v##of_connect,                                            \
        .accept.v##of_accept = accept_v##of_accept,                                                \
        .reg.v##of_reg = reg_v##of_reg,                                                            \
        .dereg = dereg,                                                                            \
        .isend.v##of_send = send_v##of_send,                                                       \
        .irecv.v##of_send = receive_v##of_send,                                                    \
        .iflush = flush,                                                                           \
        .test = standin_test,                                                                      \
        .close_send = standin_close,                                                               \
        .close_receive = standin_close,                                                            \
        .close_listen = standin_close_listen,                                                      \
        .finalize = finalize,                                                                      \
        .set_attributes = set_attributes,                                                          \
    }
TABLE(6, 6, 6, 6, 6, 6, 6, 6);
TABLE(7, 6, 7, 6, 7, 7, 6, 6);
TABLE(8, 6, 8, 6, 7, 7, 8, 6);
TABLE(9, 6, 9, 6, 7, 7, 8, 9);
TABLE(10, 10, 9, 6, 10, 7, 8, 10);
TABLE(11, 11, 11, 11, 11, 7, 8, 10);
TABLE(12, 11, 12, 11, 11, 7, 8, 10);
