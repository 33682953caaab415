/* SPDX-License-Identifier: Apache-2.0 */
/* The service thread: listen, connect, accept, regMr and close, beside the progress thread. */
#include "rank.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CHURN = 32, SPARE = 1 << 16 };

/* What NCCL requires or takes for granted; NULL: fine. */
static const char *wrong_property(const struct net *net, const struct properties12 *p) {
    if (p->name == NULL) return "name: must be set";
    if ((p->pointers & NET_HOST_MEMORY) == 0) return "ptrSupport: must have host memory";
    if ((p->pointers & NET_GPU_MEMORY) != 0) return "ptrSupport: must not have GPU memory";
    if (p->speed <= 0) return "speed: must be positive";
    if (p->most_comms < 1) return "maxComms: must be positive";
    if (p->most_receives != 1) return "maxRecvs: must be 1";
    if (p->device_type != 0) return "netDeviceType: must be 0";
    if (p->parts.count != 1 || p->parts.devices[0] != 0) return "vProps: must be the device itself";
    if (p->most_p2p < 1 || p->most_p2p > (size_t)1 << 40) return "maxP2pBytes: must be in 1 to 1 TiB";
    if (p->most_in_request != 1) return "maxMultiRequestSize: must be 1";
    if (p->rail != -1 || p->plane != -1) return "railId, planeId: must be -1";
    if (net->version >= 9 && net->table->make_device != NULL) return "makeVDevice: must be null";
    return NULL;
}

static bool start(struct rank *rank) {
    const struct options *o = &rank->options;
    struct net *net = &rank->net;
    const char *wrong = net_load(net, o->plugin, o->version);
    int devices = 0;
    if (wrong != NULL) {
        fail(rank, OTHER, NET_SYSTEM_ERROR, wrong);
        return false;
    }
    rank->name = net->table->name;
    if (CALL(rank, OTHER, net_init(net, 0x464c4f57534c4f54u)) != NET_OK) return false;
    if (CALL(rank, OTHER, net->table->devices(&devices)) != NET_OK) return false;
    if (o->device >= devices) {
        fail(rank, OTHER, NET_INVALID_ARGUMENT, "there are fewer devices");
        return false;
    }
    if (CALL(rank, OTHER, net_properties(net, o->device, &rank->device)) != NET_OK) return false;
    rank->device.parts.devices[0] -= o->device;
    wrong = wrong_property(net, &rank->device);
    if (wrong != NULL) fail(rank, OTHER, NET_OK, wrong);
    return wrong == NULL;
}

/* All channels listen before anybody connects; handles go by rank and channel. */
static bool listen_all(struct rank *rank) {
    static char all[MOST_RANKS][MOST_CHANNELS][NET_HANDLE]; /* of this process's only service thread */
    static char mine[MOST_CHANNELS][NET_HANDLE];
    const struct options *o = &rank->options;
    int c;
    memset(mine, 0, sizeof(mine));
    for (c = 0; c < o->channels; c++)
        if (CALL(rank, LISTEN,
                 net_listen(&rank->net, o->device, mine[c], &rank->channels[c].listening)) != NET_OK)
            return false;
    if (o->strays > 0 && strays_come(o->strays) < o->channels) {
        fail(rank, OTHER, NET_OK, "strays: a channel does not listen");
        return false;
    }
    if (!rendezvous_gather(&rank->meeting, mine, sizeof(mine), all)) {
        fail(rank, RENDEZVOUS, NET_OK, "somebody is gone before handles were exchanged");
        return false;
    }
    for (c = 0; c < o->channels; c++)
        memcpy(rank->channels[c].handle, all[rank->channels[c].after][c], NET_HANDLE);
    fault_now(rank, LISTEN);
    return true;
}

/* Notes what the plugin can't know. True: go on. */
static bool still_on(struct rank *rank, int64_t began, int64_t *lost) {
    int64_t now = now_ns();
    if (rank->failed) return false;
    if (*lost == 0 && rendezvous_lost(&rank->meeting)) *lost = now;
    if (*lost != 0 && now - *lost > GRACE_MS * INT64_C(1000000))
        fail(rank, RENDEZVOUS, NET_OK, "somebody is gone, and no call told it");
    if (now - began > rank->options.limit_s * INT64_C(1000000000))
        fail(rank, LIMIT, NET_OK, "took longer than --limit");
    return !rank->failed;
}

static bool connect_one(struct rank *rank, int c, int64_t began, int64_t *lost) {
    struct channel *channel = &rank->channels[c];
    uint64_t bytes = rank->options.slice * (uint64_t)rank->options.outstanding;
    int64_t from = now_ns();
    while (channel->out.comm == NULL || channel->in.comm == NULL) {
        if (channel->out.comm == NULL &&
            CALL(rank, CONNECT,
                 net_connect(&rank->net, rank->options.device, channel->handle,
                             &channel->out.comm)) != NET_OK)
            return false;
        if (channel->in.comm == NULL &&
            CALL(rank, ACCEPT, net_accept(&rank->net, channel->listening, &channel->in.comm)) !=
                NET_OK)
            return false;
        if (!still_on(rank, began, lost)) return false;
        if (channel->out.comm == NULL || channel->in.comm == NULL) usleep(50);
    }
    channel->connect_ns = now_ns() - from;
    if (CALL(rank, CLOSE, rank->net.table->close_listen(channel->listening)) != NET_OK) return false;
    channel->listening = NULL;
    if (CALL(rank, REG, net_reg(&rank->net, channel->out.comm, channel->out.fifo, bytes,
                                NET_HOST_MEMORY, &channel->out.region)) != NET_OK ||
        CALL(rank, REG, net_reg(&rank->net, channel->in.comm, channel->in.fifo, bytes,
                                NET_HOST_MEMORY, &channel->in.region)) != NET_OK)
        return false;
    channel->connected = true;
    return true;
}

/* Users register and deregister their buffers while others are in use. */
static void churn(struct rank *rank) {
    static char spare[SPARE];
    void *comm = rank->channels[0].out.comm, *region;
    int i;
    region = NULL;
    rank->gpu_refused =
        net_reg(&rank->net, comm, spare, sizeof(spare), NET_GPU_MEMORY, &region) != NET_OK;
    for (i = 0; i < CHURN && !rank->failed; i++) {
        region = NULL;
        if (CALL(rank, REG, net_reg(&rank->net, comm, spare, sizeof(spare), NET_HOST_MEMORY,
                                    &region)) != NET_OK)
            return;
        usleep(500);
        if (CALL(rank, REG, rank->net.table->dereg(comm, region)) != NET_OK) return;
    }
}

static void await_progress(struct rank *rank, int64_t began, int64_t *lost) {
    pthread_mutex_lock(&rank->lock);
    while (!rank->ended) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 100000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&rank->progress_ended, &rank->lock, &until);
        pthread_mutex_unlock(&rank->lock);
        still_on(rank, began, lost);
        pthread_mutex_lock(&rank->lock);
    }
    pthread_mutex_unlock(&rank->lock);
}

static void close_one(struct rank *rank, int (*close_comm)(void *), void **comm) {
    int64_t from = now_ns();
    if (*comm == NULL) return;
    CALL(rank, CLOSE, close_comm(*comm));
    *comm = NULL;
    if (now_ns() - from > rank->close_ns) rank->close_ns = now_ns() - from;
}

/* With requests pending, where something has failed. */
static void close_all(struct rank *rank) {
    const struct net_table *table = rank->net.table;
    int c;
    for (c = 0; c < rank->options.channels; c++) {
        struct channel *channel = &rank->channels[c];
        channel->connected = false;
        if (channel->out.region != NULL)
            CALL(rank, REG, table->dereg(channel->out.comm, channel->out.region));
        if (channel->in.region != NULL)
            CALL(rank, REG, table->dereg(channel->in.comm, channel->in.region));
        channel->out.region = channel->in.region = NULL;
        close_one(rank, table->close_send, &channel->out.comm);
        close_one(rank, table->close_receive, &channel->in.comm);
        close_one(rank, table->close_listen, &channel->listening);
    }
}

static void note_round(struct rank *rank) {
    struct round *round = &rank->round[rank->rounds++];
    int c;
    for (c = 0; c < rank->options.channels; c++) {
        struct channel *channel = &rank->channels[c];
        round->sent[c] = channel->out.bytes;
        round->received[c] = channel->in.bytes;
        round->connect_ns[c] = channel->connect_ns;
        channel->out.bytes = channel->in.bytes = 0;
        channel->out.seen = channel->in.seen = 0;
    }
    round->after = census_settled(rank->before);
}

static void connect_all(struct rank *rank, int64_t began, int64_t *lost) {
    int c;
    for (c = 0; c < rank->options.channels; c++)
        if (!connect_one(rank, c, began, lost)) return;
}

bool service_open(struct rank *rank) {
    int64_t began = now_ns(), lost = 0;
    if (start(rank) && listen_all(rank)) connect_all(rank, began, &lost);
    return !rank->failed;
}

bool service_round(struct rank *rank) {
    pthread_t progress;
    int64_t began = now_ns(), lost = 0;
    char done = 1, all[MOST_RANKS];
    rank->ended = false;
    if (start(rank) && listen_all(rank)) {
        pthread_create(&progress, NULL, progress_thread, rank);
        connect_all(rank, began, &lost);
        if (!rank->failed) churn(rank);
        await_progress(rank, began, &lost);
        pthread_join(progress, NULL);
    }
    if (rank->net.table != NULL) {
        close_all(rank);
        if (rank->name != NULL) CALL(rank, OTHER, net_finalize(&rank->net));
    }
    net_unload(&rank->net);
    strays_go();
    note_round(rank);
    if (!rank->failed && !rendezvous_gather(&rank->meeting, &done, 1, all))
        fail(rank, RENDEZVOUS, NET_OK, "somebody is gone after the round");
    return !rank->failed;
}
