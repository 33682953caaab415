/* SPDX-License-Identifier: Apache-2.0 */
/* The tables that NCCL looks up. Each function here only turns one version's arguments into ours. */
#include "plugin.h"

#define EXPORT __attribute__((visibility("default")))
#define MOST_MESSAGE ((size_t)1 << 40)

static struct context *shared; /* of versions without contexts */
static pthread_mutex_t set_up = PTHREAD_MUTEX_INITIALIZER;

/* ---- Set-up ------------------------------------------------------------------------------ */

static int set_up_locked(net_log_fn *log) {
    options_read(log);
    if (infiniband_active() && !options_insist()) {
        inform("an InfiniBand port is active: NCCL's own transport is better there. "
               "NCCL_NET=flowslot or NCCL_IB_DISABLE=1 uses TCP all the same");
        return NET_INTERNAL_ERROR;
    }
    if (!devices_find()) return NET_INTERNAL_ERROR;
    inform("ready: job \"%s\", %d interfaces", options.job, device_count);
    return NET_OK;
}

static int init_context(void **context, uint64_t communicator, void *config, net_log_fn *log,
                        void *profiler) {
    int result;
    (void)config, (void)profiler;
    if (context == NULL) return NET_BAD_ARGUMENT;
    pthread_mutex_lock(&set_up);
    result = set_up_locked(log);
    if (result == NET_OK) {
        *context = context_new(communicator);
        if (*context == NULL) result = NET_SYSTEM_ERROR;
    }
    pthread_mutex_unlock(&set_up);
    return result;
}

static int init_profiler(net_log_fn *log, void *profiler) {
    int result;
    (void)profiler;
    pthread_mutex_lock(&set_up);
    result = set_up_locked(log);
    if (result == NET_OK && shared == NULL) shared = context_new(0);
    if (result == NET_OK && shared == NULL) result = NET_SYSTEM_ERROR;
    pthread_mutex_unlock(&set_up);
    return result;
}

static int init(net_log_fn *log) {
    return init_profiler(log, NULL);
}

static int finalize(void *context) {
    if (context == NULL) return NET_OK;
    setup_forget(context);
    iteration_forget(((struct context *)context)->id);
    context_drop(context);
    return NET_OK;
}

static int set_attributes(void *context, struct net_attributes *attributes) {
    struct context *of = context;
    if (of == NULL || attributes == NULL) return NET_OK;
    atomic_store(&of->algorithm, attributes->algorithm);
    atomic_store(&of->operation, attributes->operation);
    return NET_OK;
}

static int count_devices(int *count) {
    if (count == NULL) return NET_BAD_ARGUMENT;
    *count = device_count;
    return NET_OK;
}


/* ---- Properties -------------------------------------------------------------------------- */

static int properties_v12(int device, struct net_properties_v12 *to) {
    const struct device *from;
    if (device < 0 || device >= device_count || to == NULL) return NET_BAD_ARGUMENT;
    from = &devices[device];
    *to = (struct net_properties_v12){
        .name = (char *)from->name,
        .pci_path = from->pci_path,
        .guid = (uint64_t)device,
        .memory = NET_MEMORY_HOST,
        .speed = from->speed,
        .max_comms = 65536,
        .max_receives = 1,
        .parts = {1, {device}},
        .max_p2p_bytes = MOST_MESSAGE,
        .max_collective_bytes = MOST_MESSAGE,
        .max_multi_request = 1,
        .rail = -1,
        .plane = -1,
    };
    return NET_OK;
}

/* Fields that a version has under the same names. */
#define COPY_COMMON(to, from)              \
    do {                                   \
        (to)->name = (from).name;          \
        (to)->pci_path = (from).pci_path;  \
        (to)->guid = (from).guid;          \
        (to)->memory = (from).memory;      \
        (to)->speed = (from).speed;        \
        (to)->port = (from).port;          \
        (to)->max_comms = (from).max_comms; \
        (to)->max_receives = (from).max_receives; \
    } while (0)
#define COPY_PARTS(to, from)                                      \
    do {                                                          \
        (to)->parts.count = (from).parts.count;                   \
        (to)->parts.devices[0] = (from).parts.devices[0];         \
        (to)->max_p2p_bytes = (from).max_p2p_bytes;               \
        (to)->max_collective_bytes = (from).max_collective_bytes; \
    } while (0)
#define PROPERTIES(n, more)                                                \
    static int properties_v##n(int device, struct net_properties_v##n *to) { \
        struct net_properties_v12 all;                                     \
        int result = properties_v12(device, &all);                         \
        if (result != NET_OK || to == NULL) return NET_BAD_ARGUMENT;       \
        memset(to, 0, sizeof(*to));                                        \
        COPY_COMMON(to, all);                                              \
        more;                                                              \
        return NET_OK;                                                     \
    }
PROPERTIES(6, (void)0)
PROPERTIES(7, (void)0)
PROPERTIES(8, (void)0)
PROPERTIES(9, COPY_PARTS(to, all))
PROPERTIES(11, COPY_PARTS(to, all); to->max_multi_request = all.max_multi_request)

/* ---- Connections ------------------------------------------------------------------------- */

static int listen_v6(int device, void *handle, void **listener) {
    return setup_listen(shared, device, handle, listener);
}

static int listen_v11(void *context, int device, void *handle, void **listener) {
    return setup_listen(context, device, handle, listener);
}

static int connect_v6(int device, void *handle, void **comm) {
    return setup_connect(shared, device, handle, comm);
}

static int connect_v7(int device, void *handle, void **comm, void **on_device) {
    if (on_device != NULL) *on_device = NULL;
    return setup_connect(shared, device, handle, comm);
}

static int connect_v10(int device, void *config, void *handle, void **comm, void **on_device) {
    (void)config;
    return connect_v7(device, handle, comm, on_device);
}

static int connect_v11(void *context, int device, void *handle, void **comm, void **on_device) {
    if (on_device != NULL) *on_device = NULL;
    return setup_connect(context, device, handle, comm);
}

static int accept_v7(void *listener, void **comm, void **on_device) {
    if (on_device != NULL) *on_device = NULL;
    return setup_accept(listener, comm);
}

static int close_comm(void *comm) {
    if (comm != NULL) comm_close(comm);
    return NET_OK;
}

/* ---- Memory: the kernel takes any of the host's ------------------------------------------ */

static int register_memory(void *comm, void *data, size_t size, int type, void **memory) {
    (void)comm, (void)data, (void)size;
    if (memory != NULL) *memory = NULL;
    return type == NET_MEMORY_HOST ? NET_OK : NET_INTERNAL_ERROR;
}

static int register_memory_v6(void *comm, void *data, int size, int type, void **memory) {
    return register_memory(comm, data, (size_t)size, type, memory);
}

static int register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                           void **memory) {
    (void)comm, (void)data, (void)size, (void)type, (void)offset, (void)fd, (void)memory;
    return NET_INTERNAL_ERROR;
}

static int deregister_memory(void *comm, void *memory) {
    (void)comm, (void)memory;
    return NET_OK;
}

static int device_memory(void *comm, void *memory, void **on_device) {
    (void)comm, (void)memory, (void)on_device;
    return NET_INTERNAL_ERROR;
}

static int flush(void *comm, int n, void **data, int *sizes, void **memory, void **request) {
    (void)comm, (void)n, (void)data, (void)sizes, (void)memory;
    if (request != NULL) *request = NULL; /* nothing to wait for: host memory only */
    return NET_OK;
}

/* ---- Transfers --------------------------------------------------------------------------- */

/* Without events NCCL does not tell its own set-up's messages from the job's. They are small. */
#define SET_UP_MOST 16384

static int send_v9(void *comm, void *data, size_t size, int tag, void *memory, void **request) {
    (void)memory;
    return send_post(comm, data, size, tag, size > SET_UP_MOST, request);
}

static int send_v6(void *comm, void *data, int size, int tag, void *memory, void **request) {
    if (size < 0) return NET_BAD_ARGUMENT;
    return send_v9(comm, data, (size_t)size, tag, memory, request);
}

static int send_v10(void *comm, void *data, size_t size, int tag, void *memory, void *event,
                    void **request) {
    (void)memory;
    return send_post(comm, data, size, tag, event != NULL, request);
}

static int receive_v10(void *comm, int n, void **data, size_t *sizes, int *tags, void **memory,
                       void **events, void **request) {
    int tag = tags != NULL ? tags[0] : NO_RANK;
    (void)memory;
    if (n != 1 || data == NULL || sizes == NULL) return NET_BAD_ARGUMENT;
    return receive_post(comm, data[0], sizes[0], tag, events != NULL, request);
}

static int receive_v9(void *comm, int n, void **data, size_t *sizes, int *tags, void **memory,
                      void **request) {
    void *none = NULL, **events = sizes != NULL && sizes[0] > SET_UP_MOST ? &none : NULL;
    return receive_v10(comm, n, data, sizes, tags, memory, events, request);
}

static int receive_v6(void *comm, int n, void **data, int *sizes, int *tags, void **memory,
                      void **request) {
    size_t size;
    if (n != 1 || sizes == NULL || sizes[0] < 0) return NET_BAD_ARGUMENT;
    size = (size_t)sizes[0];
    return receive_v10(comm, n, data, &size, tags, memory, NULL, request);
}

static int test(void *request, int *done, int *sizes) {
    return request_test(request, done, sizes);
}

/* ---- Tables ------------------------------------------------------------------------------ */

#define REST(accept_, register_, send_, receive_)                                                \
    .accept = accept_, .register_memory = register_, .register_dmabuf = register_dmabuf,         \
    .deregister_memory = deregister_memory, .send = send_, .receive = receive_, .flush = flush,  \
    .test = test, .close_send = close_comm, .close_receive = close_comm,                         \
    .close_listen = setup_close_listen
#define HEAD(init_, properties_, listen_, connect_)                                           \
    .name = NET_NAME, .init = init_, .devices = count_devices, .properties = properties_,     \
    .listen = listen_, .connect = connect_
/* irecvConsumed is NULL: NCCL calls it after every receive where it is not, and an error ends the
 * job. makeVDevice would have to join devices; NULL says that we do not. */
#define ON_DEVICE .device_memory = device_memory

EXPORT const struct net_table_v6 ncclNetPlugin_v6 = {
    HEAD(init, properties_v6, listen_v6, connect_v6),
    REST(setup_accept, register_memory_v6, send_v6, receive_v6),
};
EXPORT const struct net_table_v7 ncclNetPlugin_v7 = {
    HEAD(init, properties_v7, listen_v6, connect_v7),
    REST(accept_v7, register_memory_v6, send_v6, receive_v6),
    ON_DEVICE,
};
EXPORT const struct net_table_v8 ncclNetPlugin_v8 = {
    HEAD(init, properties_v8, listen_v6, connect_v7),
    REST(accept_v7, register_memory, send_v6, receive_v6),
    ON_DEVICE,
};
EXPORT const struct net_table_v9 ncclNetPlugin_v9 = {
    HEAD(init, properties_v9, listen_v6, connect_v7),
    REST(accept_v7, register_memory, send_v9, receive_v9),
    ON_DEVICE,
};
EXPORT const struct net_table_v10 ncclNetPlugin_v10 = {
    HEAD(init_profiler, properties_v9, listen_v6, connect_v10),
    REST(accept_v7, register_memory, send_v10, receive_v10),
    ON_DEVICE,
};
EXPORT const struct net_table_v11 ncclNetPlugin_v11 = {
    HEAD(init_context, properties_v11, listen_v11, connect_v11),
    REST(accept_v7, register_memory, send_v10, receive_v10),
    ON_DEVICE,
    .finalize = finalize,
    .set_attributes = set_attributes,
};
EXPORT const struct net_table_v12 ncclNetPlugin_v12 = {
    HEAD(init_context, properties_v12, listen_v11, connect_v11),
    REST(accept_v7, register_memory, send_v10, receive_v10),
    ON_DEVICE,
    .finalize = finalize,
    .set_attributes = set_attributes,
};
