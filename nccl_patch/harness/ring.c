/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring all-reduce of one channel. The tensor has one chunk per rank. In step s, the rank at
 * position p sends chunk p - s and receives chunk p - s - 1, all modulo N. The first N - 1 steps
 * add, the others replace. Chunks go in slices: slice q of an iteration belongs to step
 * q / slices, and can go once the same slice of the step before has come.
 *
 * Elements are bytes, sums are modulo 256.
 */
#include "rank.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A prime, so that no slice looks like one a power of two away. */
enum { PATTERN = 65521, OF_RANK = 41, OF_ITERATION = 29 };
static uint8_t pattern[PATTERN];

static uint8_t *allocate(uint64_t size) {
    void *at = mmap(NULL, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

static void release(uint8_t **at, uint64_t size) {
    if (*at != NULL) munmap(*at, size + 1);
    *at = NULL;
}

static uint64_t fifo_bytes(const struct options *options) {
    return options->slice * (uint64_t)options->outstanding;
}

bool ring_prepare(struct rank *rank) {
    const struct options *o = &rank->options;
    uint32_t random = 1;
    int c, i;
    for (i = 0; i < PATTERN; i++) {
        random = random * 1664525u + 1013904223u;
        pattern[i] = (uint8_t)(random >> 24);
    }
    for (c = 0; c < o->channels; c++) {
        struct channel *channel = &rank->channels[c];
        const int *order = o->order[c % o->orders];
        uint64_t from = o->bytes * (uint64_t)c / (uint64_t)o->channels;
        uint64_t to = o->bytes * (uint64_t)(c + 1) / (uint64_t)o->channels;
        for (i = 0; i < o->ranks; i++)
            if (order[i] == o->rank) channel->position = i;
        channel->before = order[(channel->position + o->ranks - 1) % o->ranks];
        channel->after = order[(channel->position + 1) % o->ranks];
        channel->bytes = to - from;
        channel->data = allocate(o->stream ? 0 : channel->bytes);
        channel->out.fifo = allocate(fifo_bytes(o));
        channel->in.fifo = allocate(fifo_bytes(o));
        if (channel->data == NULL || channel->out.fifo == NULL || channel->in.fifo == NULL)
            return false;
        memset(channel->out.fifo, 1, fifo_bytes(o));
        memset(channel->in.fifo, 2, fifo_bytes(o));
    }
    return true;
}

void ring_release(struct rank *rank) {
    const struct options *o = &rank->options;
    int c;
    for (c = 0; c < o->channels; c++) {
        struct channel *channel = &rank->channels[c];
        release(&channel->data, o->stream ? 0 : channel->bytes);
        release(&channel->out.fifo, fifo_bytes(o));
        release(&channel->in.fifo, fifo_bytes(o));
    }
}

/* The next run of elements from `at`: at most up to the pattern's end. */
static uint64_t run(uint64_t at, uint64_t bytes) {
    uint64_t n = PATTERN - at % PATTERN;
    return n < bytes - at ? n : bytes - at;
}

void ring_fill(struct rank *rank, int iteration) {
    const struct options *o = &rank->options;
    uint8_t mine = (uint8_t)(OF_RANK * o->rank + OF_ITERATION * iteration);
    uint64_t at, n, i;
    int c;
    for (c = 0; c < o->channels && !o->stream; c++) {
        struct channel *channel = &rank->channels[c];
        for (at = 0; at < channel->bytes; at += n) {
            const uint8_t *from = pattern + at % PATTERN;
            n = run(at, channel->bytes);
            for (i = 0; i < n; i++) channel->data[at + i] = (uint8_t)(from[i] + mine);
        }
    }
}

bool ring_right(const struct rank *rank, int iteration) {
    const struct options *o = &rank->options;
    uint8_t ranks = (uint8_t)o->ranks, wrong = 0;
    uint8_t all = (uint8_t)(OF_RANK * (o->ranks * (o->ranks - 1) / 2) +
                            OF_ITERATION * iteration * o->ranks);
    uint64_t at, n, i;
    int c;
    for (c = 0; c < o->channels && !o->stream; c++) {
        const struct channel *channel = &rank->channels[c];
        for (at = 0; at < channel->bytes; at += n) {
            const uint8_t *from = pattern + at % PATTERN;
            n = run(at, channel->bytes);
            for (i = 0; i < n; i++)
                wrong |= (uint8_t)(channel->data[at + i] ^ (uint8_t)(from[i] * ranks + all));
        }
    }
    return wrong == 0;
}

void ring_begin(const struct rank *rank, struct channel *channel) {
    const struct options *o = &rank->options;
    uint64_t ranks = (uint64_t)o->ranks;
    uint64_t chunk = o->stream ? channel->bytes : (channel->bytes + ranks - 1) / ranks;
    channel->slices = (chunk + o->slice - 1) / o->slice;
    if (channel->slices == 0) channel->slices = 1; /* of 0 bytes */
    channel->out.staged = channel->out.posted = channel->out.finished = 0;
    channel->in.posted = channel->in.finished = 0;
    if (o->stream) {
        channel->out.total = o->rank == 0 ? channel->slices : 0;
        channel->in.total = channel->slices - channel->out.total;
    } else {
        channel->out.total = channel->in.total = 2 * (ranks - 1) * channel->slices;
    }
}

bool ring_ready(const struct rank *rank, const struct channel *channel, uint64_t slice) {
    return rank->options.stream || slice < channel->in.finished + channel->slices;
}

/* Where slice q of the chunk `behind` our position lies in the tensor; its size. */
static uint64_t place(const struct rank *rank, const struct channel *channel, uint64_t q,
                      uint64_t behind, uint64_t *offset) {
    const struct options *o = &rank->options;
    uint64_t ranks = (uint64_t)o->ranks, chunk, end;
    if (o->stream) {
        *offset = q * o->slice;
        end = channel->bytes;
    } else {
        /* Of 2N, because a step is below 2N - 2. */
        chunk = ((uint64_t)channel->position + 2 * ranks - q / channel->slices - behind) % ranks;
        end = channel->bytes * (chunk + 1) / ranks;
        *offset = channel->bytes * chunk / ranks + q % channel->slices * o->slice;
    }
    if (*offset > end) *offset = end;
    return end - *offset < o->slice ? end - *offset : o->slice;
}

void ring_stage(const struct rank *rank, struct channel *channel, uint64_t q, uint8_t *slot) {
    uint64_t offset, size = place(rank, channel, q, 0, &offset), serial;
    if (!rank->options.stream) {
        memcpy(slot, channel->data + offset, size);
    } else if (size >= sizeof(serial)) {
        serial = channel->out.seen + q - channel->out.finished;
        memcpy(slot, &serial, sizeof(serial));
    }
}

uint64_t ring_size_sent(const struct rank *rank, const struct channel *channel, uint64_t q) {
    uint64_t offset;
    return place(rank, channel, q, 0, &offset);
}

uint64_t ring_size(const struct rank *rank, const struct channel *channel, uint64_t q) {
    uint64_t offset;
    return place(rank, channel, q, 1, &offset);
}

bool ring_consume(const struct rank *rank, struct channel *channel, uint64_t q,
                  const uint8_t *slot) {
    uint64_t offset, size = place(rank, channel, q, 1, &offset), serial, i;
    uint8_t *restrict to = channel->data + offset;
    if (rank->options.stream) {
        memcpy(&serial, slot, sizeof(serial));
        return size < sizeof(serial) || serial == channel->in.seen;
    }
    if (q / channel->slices < (uint64_t)rank->options.ranks - 1)
        for (i = 0; i < size; i++) to[i] = (uint8_t)(to[i] + slot[i]);
    else
        memcpy(to, slot, size);
    return true;
}
