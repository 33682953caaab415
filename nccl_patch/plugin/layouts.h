/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layouts.h - the binary interface of NCCL's network plugins, versions 6 to 12, declared from its
 * sizes, offsets and order of functions (x86-64; any LP64 platform has the same).
 *
 * NCCL looks up a table by name, ncclNetPlugin_vN, and calls its functions. All of them return one
 * of `enum net_result`. What a version changes against the one before is said beside it.
 */
#ifndef FLOWSLOT_NCCL_LAYOUTS_H
#define FLOWSLOT_NCCL_LAYOUTS_H

#include <stddef.h>
#include <stdint.h>

enum net_result {
    NET_OK = 0,
    NET_SYSTEM_ERROR = 2,   /* a system call failed */
    NET_INTERNAL_ERROR = 3, /* this is impossible, or nothing is there to use */
    NET_BAD_ARGUMENT = 4,
    NET_BAD_USAGE = 5,
    NET_REMOTE_ERROR = 6 /* the other end failed, or is gone */
};

enum net_level { NET_LOG_WARN = 2, NET_LOG_INFO = 3 };
#define NET_LOG_INIT 0x1u
#define NET_LOG_NET 0x10u
typedef void net_log_fn(int level, unsigned long flags, const char *file, int line,
                        const char *format, ...);

#define NET_MEMORY_HOST 1 /* kinds of memory, as in ptrSupport and regMr's type */
#define NET_NAME "flowslot"
#define NET_RING (1u << 1)    /* of algorithms, */
#define NET_COLLECTIVES 5     /* of operations the first so many; the others go from rank to rank */

/* ---- Properties of a device -------------------------------------------------------------- */

struct net_virtual4 { /* a device made of several */
    int count;
    int devices[4];
};
struct net_virtual8 {
    int count;
    int devices[8];
};

/* The first fields are those of all versions. */
#define NET_PROPERTIES_HEAD \
    char *name;             \
    char *pci_path;         \
    uint64_t guid;          \
    int memory; /* kinds of memory it can send from */
/* Versions 8 on have fields before the speed. */
#define NET_PROPERTIES_REST \
    int speed; /* Mbit/s */ \
    int port;               \
    float latency; /* us */ \
    int max_comms;          \
    int max_receives;       \
    int device_type;        \
    int device_version;

struct net_properties_v6 {
    NET_PROPERTIES_HEAD
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_receives;
};
struct net_properties_v7 {
    NET_PROPERTIES_HEAD
    NET_PROPERTIES_REST
};
struct net_properties_v8 {
    NET_PROPERTIES_HEAD
    int registration_is_global;
    NET_PROPERTIES_REST
};
struct net_properties_v9 { /* and v10 */
    NET_PROPERTIES_HEAD
    int registration_is_global;
    int force_flush;
    NET_PROPERTIES_REST
    struct net_virtual4 parts;
    size_t max_p2p_bytes;
    size_t max_collective_bytes;
};
struct net_properties_v11 {
    NET_PROPERTIES_HEAD
    int registration_is_global;
    int force_flush;
    NET_PROPERTIES_REST
    struct net_virtual4 parts;
    size_t max_p2p_bytes;
    size_t max_collective_bytes;
    int max_multi_request;
};
struct net_properties_v12 {
    NET_PROPERTIES_HEAD
    int registration_is_global;
    int force_flush;
    NET_PROPERTIES_REST
    struct net_virtual8 parts;
    size_t max_p2p_bytes;
    size_t max_collective_bytes;
    int max_multi_request;
    int16_t rail;
    int16_t plane;
};

/* ---- What a communicator is about to do (v11 on) ----------------------------------------- */

struct net_side {
    int32_t most_peers, least_peers; /* at a time; -1: not told */
    int32_t most_flows, least_flows; /* of one peer: channels */
};
struct net_attributes {
    struct net_side send, receive;
    uint32_t operation, algorithm, protocol; /* one bit each, or several; UINT32_MAX: not told */
};

/* ---- Functions --------------------------------------------------------------------------- */

typedef int net_init_v6(net_log_fn *log);
typedef int net_init_v10(net_log_fn *log, void *profiler);
typedef int net_init_v11(void **context, uint64_t communicator, void *config, net_log_fn *log,
                         void *profiler);
typedef int net_devices(int *count);
typedef int net_listen_v6(int device, void *handle, void **listen);
typedef int net_listen_v11(void *context, int device, void *handle, void **listen);
typedef int net_connect_v6(int device, void *handle, void **send);
typedef int net_connect_v7(int device, void *handle, void **send, void **on_device);
typedef int net_connect_v10(int device, void *config, void *handle, void **send, void **on_device);
typedef int net_connect_v11(void *context, int device, void *handle, void **send,
                            void **on_device);
typedef int net_accept_v6(void *listen, void **receive);
typedef int net_accept_v7(void *listen, void **receive, void **on_device);
typedef int net_register_v6(void *comm, void *data, int size, int type, void **memory);
typedef int net_register_v8(void *comm, void *data, size_t size, int type, void **memory);
typedef int net_register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset,
                                int fd, void **memory);
typedef int net_deregister(void *comm, void *memory);
typedef int net_send_v6(void *comm, void *data, int size, int tag, void *memory, void **request);
typedef int net_send_v9(void *comm, void *data, size_t size, int tag, void *memory,
                        void **request);
typedef int net_send_v10(void *comm, void *data, size_t size, int tag, void *memory, void *event,
                         void **request);
typedef int net_receive_v6(void *comm, int n, void **data, int *sizes, int *tags, void **memory,
                           void **request);
typedef int net_receive_v9(void *comm, int n, void **data, size_t *sizes, int *tags,
                           void **memory, void **request);
typedef int net_receive_v10(void *comm, int n, void **data, size_t *sizes, int *tags,
                            void **memory, void **events, void **request);
typedef int net_flush(void *comm, int n, void **data, int *sizes, void **memory, void **request);
typedef int net_test(void *request, int *done, int *sizes);
typedef int net_close(void *comm);
typedef int net_device_memory(void *comm, void *memory, void **on_device);
typedef int net_consumed(void *comm, int n, void *request);
typedef int net_make_device(int *device, void *parts);
typedef int net_finalize(void *context);
typedef int net_set_attributes(void *context, struct net_attributes *attributes);

/* ---- Tables ------------------------------------------------------------------------------ */

/* The middle of all tables, from accept on; versions differ in types only. */
#define NET_TABLE_MIDDLE(accept_type, register_type, send_type, receive_type) \
    accept_type *accept;                                                      \
    register_type *register_memory;                                           \
    net_register_dmabuf *register_dmabuf;                                     \
    net_deregister *deregister_memory;                                        \
    send_type *send;                                                          \
    receive_type *receive;                                                    \
    net_flush *flush;                                                         \
    net_test *test;                                                           \
    net_close *close_send;                                                    \
    net_close *close_receive;                                                 \
    net_close *close_listen;

struct net_table_v6 {
    const char *name;
    net_init_v6 *init;
    net_devices *devices;
    int (*properties)(int device, struct net_properties_v6 *properties);
    net_listen_v6 *listen;
    net_connect_v6 *connect;
    NET_TABLE_MIDDLE(net_accept_v6, net_register_v6, net_send_v6, net_receive_v6)
};
struct net_table_v7 { /* connect and accept may name a device's half; two functions for that */
    const char *name;
    net_init_v6 *init;
    net_devices *devices;
    int (*properties)(int device, struct net_properties_v7 *properties);
    net_listen_v6 *listen;
    net_connect_v7 *connect;
    NET_TABLE_MIDDLE(net_accept_v7, net_register_v6, net_send_v6, net_receive_v6)
    net_device_memory *device_memory;
    net_consumed *consumed;
};
struct net_table_v8 { /* register_memory takes a size_t */
    const char *name;
    net_init_v6 *init;
    net_devices *devices;
    int (*properties)(int device, struct net_properties_v8 *properties);
    net_listen_v6 *listen;
    net_connect_v7 *connect;
    NET_TABLE_MIDDLE(net_accept_v7, net_register_v8, net_send_v6, net_receive_v6)
    net_device_memory *device_memory;
    net_consumed *consumed;
};
struct net_table_v9 { /* so do send and receive; virtual devices */
    const char *name;
    net_init_v6 *init;
    net_devices *devices;
    int (*properties)(int device, struct net_properties_v9 *properties);
    net_listen_v6 *listen;
    net_connect_v7 *connect;
    NET_TABLE_MIDDLE(net_accept_v7, net_register_v8, net_send_v9, net_receive_v9)
    net_device_memory *device_memory;
    net_consumed *consumed;
    net_make_device *make_device;
};
struct net_table_v10 { /* profiler events; connect takes a configuration */
    const char *name;
    net_init_v10 *init;
    net_devices *devices;
    int (*properties)(int device, struct net_properties_v9 *properties);
    net_listen_v6 *listen;
    net_connect_v10 *connect;
    NET_TABLE_MIDDLE(net_accept_v7, net_register_v8, net_send_v10, net_receive_v10)
    net_device_memory *device_memory;
    net_consumed *consumed;
    net_make_device *make_device;
};
/* A context for each communicator. v12 has larger properties, and is the same otherwise. */
#define NET_TABLE_V11(properties_type)                                          \
    const char *name;                                                           \
    net_init_v11 *init;                                                         \
    net_devices *devices;                                                       \
    int (*properties)(int device, properties_type *properties);                 \
    net_listen_v11 *listen;                                                     \
    net_connect_v11 *connect;                                                   \
    NET_TABLE_MIDDLE(net_accept_v7, net_register_v8, net_send_v10, net_receive_v10) \
    net_device_memory *device_memory;                                           \
    net_consumed *consumed;                                                     \
    net_make_device *make_device;                                               \
    net_finalize *finalize;                                                     \
    net_set_attributes *set_attributes;
struct net_table_v11 {
    NET_TABLE_V11(struct net_properties_v11)
};
struct net_table_v12 {
    NET_TABLE_V11(struct net_properties_v12)
};

#define NET_TABLE_SIZE(n, size) \
    _Static_assert(sizeof(struct net_table_v##n) == (size), "size of the table v" #n)
#define NET_PROPERTIES_SIZE(n, size) \
    _Static_assert(sizeof(struct net_properties_v##n) == (size), "size of the properties v" #n)
#define NET_AT(n, field, at)                                           \
    _Static_assert(offsetof(struct net_properties_v##n, field) == (at), \
                   "offset of " #field " in the properties v" #n)
NET_TABLE_SIZE(6, 136);
NET_TABLE_SIZE(7, 152);
NET_TABLE_SIZE(8, 152);
NET_TABLE_SIZE(9, 160);
NET_TABLE_SIZE(10, 160);
NET_TABLE_SIZE(11, 176);
NET_TABLE_SIZE(12, 176);
NET_PROPERTIES_SIZE(6, 48);
NET_PROPERTIES_SIZE(7, 56);
NET_PROPERTIES_SIZE(8, 64);
NET_PROPERTIES_SIZE(9, 104);
NET_PROPERTIES_SIZE(11, 112);
NET_PROPERTIES_SIZE(12, 128);
NET_AT(6, speed, 28);
NET_AT(6, latency, 36);
NET_AT(6, max_receives, 44);
NET_AT(7, device_type, 48);
NET_AT(8, registration_is_global, 28);
NET_AT(8, speed, 32);
NET_AT(9, force_flush, 32);
NET_AT(9, speed, 36);
NET_AT(9, parts, 64);
NET_AT(9, max_p2p_bytes, 88);
NET_AT(11, max_multi_request, 104);
NET_AT(12, max_p2p_bytes, 104);
NET_AT(12, max_multi_request, 120);
NET_AT(12, rail, 124);
NET_AT(12, plane, 126);
_Static_assert(sizeof(struct net_attributes) == 44, "size of the attributes");

#endif
