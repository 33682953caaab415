/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net.h - NCCL's network-plugin interface as its caller sees it, v6 to v12 (symbols
 * ncclNetPlugin_vN, x86-64 and aarch64).
 *
 * Declared in words of our own from documented sizes and offsets, and on purpose not shared with
 * the plugin: where the two differ, one of them is wrong, and the harness shows it.
 */
#ifndef HARNESS_NET_H
#define HARNESS_NET_H

#include <stddef.h>
#include <stdint.h>

enum {
    NET_OLDEST = 6,
    NET_NEWEST = 12,
    NET_HANDLE = 128,     /* bytes of a listen handle */
    NET_REQUESTS = 32,    /* outstanding per comm, at most */
    NET_HOST_MEMORY = 1,  /* a region's type, and the bit in ptrSupport */
    NET_GPU_MEMORY = 2,
    NET_OPTIONAL = 1,     /* *request on entry of irecv: completion need not be told (v9 on) */
};

/* Results of calls. */
enum {
    NET_OK = 0,
    NET_SYSTEM_ERROR = 2,
    NET_INTERNAL_ERROR = 3,
    NET_INVALID_ARGUMENT = 4,
    NET_REMOTE_ERROR = 6,
};

/* ---- Properties of a device ---------------------------------------------------------------- */

struct several4 { int count, devices[4]; };
struct several8 { int count, devices[8]; };

struct properties6 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, speed, port;
    float latency;
    int most_comms, most_receives;
};
struct properties7 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, speed, port;
    float latency;
    int most_comms, most_receives, device_type, device_version;
};
struct properties8 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, global_registration, speed, port;
    float latency;
    int most_comms, most_receives, device_type, device_version;
};
struct properties9 { /* and v10 */
    char *name, *pci_path;
    uint64_t guid;
    int pointers, global_registration, force_flush, speed, port;
    float latency;
    int most_comms, most_receives, device_type, device_version;
    struct several4 parts;
    size_t most_p2p, most_collective;
};
struct properties11 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, global_registration, force_flush, speed, port;
    float latency;
    int most_comms, most_receives, device_type, device_version;
    struct several4 parts;
    size_t most_p2p, most_collective;
    int most_in_request;
};
struct properties12 {
    char *name, *pci_path;
    uint64_t guid;
    int pointers, global_registration, force_flush, speed, port;
    float latency;
    int most_comms, most_receives, device_type, device_version;
    struct several8 parts;
    size_t most_p2p, most_collective;
    int most_in_request;
    int16_t rail, plane;
};

#define AT(type, field, offset) \
    _Static_assert(offsetof(struct type, field) == (offset), #type "." #field)
#define SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type)
SIZE(properties6, 48);
AT(properties6, guid, 16);
AT(properties6, pointers, 24);
AT(properties6, speed, 28);
AT(properties6, port, 32);
AT(properties6, latency, 36);
AT(properties6, most_comms, 40);
AT(properties6, most_receives, 44);
SIZE(properties7, 56);
AT(properties7, most_receives, 44);
AT(properties7, device_type, 48);
AT(properties7, device_version, 52);
SIZE(properties8, 64);
AT(properties8, global_registration, 28);
AT(properties8, speed, 32);
SIZE(properties9, 104);
AT(properties9, force_flush, 32);
AT(properties9, speed, 36);
AT(properties9, parts, 64);
AT(properties9, most_p2p, 88);
AT(properties9, most_collective, 96);
SIZE(properties11, 112);
AT(properties11, most_in_request, 104);
SIZE(properties12, 128);
AT(properties12, parts, 64);
AT(properties12, most_p2p, 104);
AT(properties12, most_collective, 112);
AT(properties12, most_in_request, 120);
AT(properties12, rail, 124);
AT(properties12, plane, 126);

/* ---- The table: one row per function; where its signature changed, one member per version --- */

typedef void net_log(int level, unsigned long subsystems, const char *where, int line,
                     const char *format, ...);
typedef int net_profiler(void **event, int kind, void *parent, int64_t plugin, void *data);

struct net_config { int traffic_class; };

struct net_side { int32_t most_peers, least_peers, most_flows, least_flows; };
struct net_attributes { /* operation, algorithm and protocol: one bit each */
    struct net_side send, receive;
    uint32_t operation, algorithm, protocol;
};

struct net_table {
    const char *name;
    union {
        int (*v6)(net_log *);
        int (*v10)(net_log *, net_profiler *);
        int (*v11)(void **context, uint64_t comm, struct net_config *, net_log *, net_profiler *);
    } init;
    int (*devices)(int *count);
    int (*properties)(int device, void *out);
    union {
        int (*v6)(int device, void *handle, void **comm);
        int (*v11)(void *context, int device, void *handle, void **comm);
    } listen;
    union {
        int (*v6)(int device, void *handle, void **comm);
        int (*v7)(int device, void *handle, void **comm, void **offload);
        int (*v10)(int device, struct net_config *, void *handle, void **comm, void **offload);
        int (*v11)(void *context, int device, void *handle, void **comm, void **offload);
    } connect;
    union {
        int (*v6)(void *listening, void **comm);
        int (*v7)(void *listening, void **comm, void **offload);
    } accept;
    union {
        int (*v6)(void *comm, void *data, int size, int type, void **region);
        int (*v8)(void *comm, void *data, size_t size, int type, void **region);
    } reg;
    int (*reg_dmabuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                      void **region);
    int (*dereg)(void *comm, void *region);
    union {
        int (*v6)(void *comm, void *data, int size, int tag, void *region, void **request);
        int (*v9)(void *comm, void *data, size_t size, int tag, void *region, void **request);
        int (*v10)(void *comm, void *data, size_t size, int tag, void *region, void *parent,
                   void **request);
    } isend;
    union {
        int (*v6)(void *comm, int n, void **data, int *sizes, int *tags, void **regions,
                  void **request);
        int (*v9)(void *comm, int n, void **data, size_t *sizes, int *tags, void **regions,
                  void **request);
        int (*v10)(void *comm, int n, void **data, size_t *sizes, int *tags, void **regions,
                   void **parents, void **request);
    } irecv;
    int (*iflush)(void *comm, int n, void **data, int *sizes, void **regions, void **request);
    int (*test)(void *request, int *done, int *sizes);
    int (*close_send)(void *comm);
    int (*close_receive)(void *comm);
    int (*close_listen)(void *comm);
    /* v7 */
    int (*device_region)(void *comm, void *region, void **device_region);
    int (*consumed)(void *comm, int n, void *request);
    /* v9 */
    int (*make_device)(int *device, void *parts);
    /* v11 */
    int (*finalize)(void *context);
    int (*set_attributes)(void *context, struct net_attributes *);
};

/* Where v6, v7 (v8) and v9 (v10) end, and the whole of v11 and v12. */
AT(net_table, device_region, 136);
AT(net_table, make_device, 152);
AT(net_table, finalize, 160);
SIZE(net_table, 176);
AT(net_table, listen, 32);
AT(net_table, reg, 56);
AT(net_table, isend, 80);
AT(net_table, irecv, 88);
AT(net_table, test, 104);
AT(net_table, close_listen, 128);

/* ---- A loaded plugin: the same calls for every version ------------------------------------- */

struct net {
    int version;
    void *library;
    const struct net_table *table;
    void *context;
};

/* NULL, or what is wrong. */
const char *net_load(struct net *net, const char *path, int version);
void net_unload(struct net *net);

int net_init(struct net *net, uint64_t comm);
int net_finalize(struct net *net);
int net_properties(const struct net *net, int device, struct properties12 *out);
int net_listen(struct net *net, int device, void *handle, void **comm);
int net_connect(struct net *net, int device, void *handle, void **comm);
int net_accept(struct net *net, void *listening, void **comm);
int net_reg(struct net *net, void *comm, void *data, size_t size, int type, void **region);
int net_isend(struct net *net, void *comm, void *data, size_t size, int tag, void *region,
              void *parent, void **request);
int net_irecv(struct net *net, void *comm, void *data, size_t size, int tag, void *region,
              void **parents, void **request);
/* A receive is done, and its bytes are used; NCCL says so of each, from 2.19 on. */
int net_consumed(struct net *net, void *comm, void *request);
int net_set_attributes(struct net *net, struct net_attributes *attributes);

#endif
