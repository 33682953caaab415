/* SPDX-License-Identifier: Apache-2.0 */
/* pair_net.h - pair.c's plugin: one version's table as one interface. */
#ifndef PAIR_NET_H
#define PAIR_NET_H

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../nccl_patch/plugin/layouts.h"

#define MOST 16

static int version, me, other; /* of the interface; this process's rank, and the other's */
static void *table, *library, *contexts[MOST];

static void fail(const char *what, int result) {
    fprintf(stderr, "pair: process %d: %s: result %d, %s\n", me, what, result, strerror(errno));
    _exit(3);
}

#define T(n) ((const struct net_table_v##n *)table)
#define ANY(call6, call7, call9, call10, call11) \
    (version == 6 ? (call6) : version < 9 ? (call7) : version == 9 ? (call9) : version == 10 ? (call10) : (call11))

static void log_line(int level, unsigned long flags, const char *file, int line,
                     const char *format, ...) {
    va_list values;
    (void)flags, (void)file, (void)line;
    if (level > NET_LOG_WARN && getenv("PAIR_VERBOSE") == NULL) return;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
}

static int net_init(int group) {
    return version < 10    ? T(6)->init(log_line)
           : version == 10 ? T(10)->init(log_line, NULL)
                           : T(11)->init(&contexts[group], 1 + (uint64_t)group, NULL, log_line, NULL);
}
static int net_listen(int group, void *handle, void **comm) {
    return version < 11 ? T(6)->listen(0, handle, comm) : T(11)->listen(contexts[group], 0, handle, comm);
}
static int net_connect(int group, void *handle, void **comm) {
    void *half;
    return ANY(T(6)->connect(0, handle, comm), T(7)->connect(0, handle, comm, &half),
               T(9)->connect(0, handle, comm, &half), T(10)->connect(0, NULL, handle, comm, &half),
               T(11)->connect(contexts[group], 0, handle, comm, &half));
}
static int net_accept(void *listener, void **comm) {
    void *half;
    return version == 6 ? T(6)->accept(listener, comm) : T(7)->accept(listener, comm, &half);
}
static int net_send(void *comm, void *data, size_t size, void **request) {
    return ANY(T(6)->send(comm, data, (int)size, me, NULL, request),
               T(7)->send(comm, data, (int)size, me, NULL, request),
               T(9)->send(comm, data, size, me, NULL, request),
               T(10)->send(comm, data, size, me, NULL, NULL, request),
               T(11)->send(comm, data, size, me, NULL, NULL, request));
}
static int net_receive(void *comm, void *data, size_t size, void **request) {
    int small = (int)size;
    void *memory = NULL, *event = NULL;
    *request = version > 8 ? (void *)1 : NULL;
    return ANY(T(6)->receive(comm, 1, &data, &small, &other, &memory, request),
               T(7)->receive(comm, 1, &data, &small, &other, &memory, request),
               T(9)->receive(comm, 1, &data, &size, &other, &memory, request),
               T(10)->receive(comm, 1, &data, &size, &other, &memory, &event, request),
               T(11)->receive(comm, 1, &data, &size, &other, &memory, &event, request));
}
static int net_done(void *request, int *done, int *size) {
    return T(6)->test(request, done, size);
}

static void load(const char *path) {
    char name[32];
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "pair: %s\n", dlerror());
        _exit(3);
    }
    snprintf(name, sizeof(name), "ncclNetPlugin_v%d", version);
    table = dlsym(library, name);
    if (table == NULL) fail(name, 0);
}

#endif
