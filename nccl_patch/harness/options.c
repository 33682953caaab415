/* SPDX-License-Identifier: Apache-2.0 */
#include "rank.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const call_names[CALLS] = {
    "listen", "connect", "accept", "regMr",      "isend", "irecv",
    "test",   "close",   "other",  "rendezvous", "limit",
};

static const char usage[] =
    "nccl-harness --plugin FILE --rank R --ranks N --root HOST:PORT [option ...]\n"
    "  --version V       of the interface, 6 to 12 (12)\n"
    "  --device D        (0)\n"
    "  --pattern P       ring: an all-reduce with checked sums; stream: rank 0 sends to rank 1\n"
    "  --channels N      comms to the next rank, each with its part of the bytes (1)\n"
    "  --orders A,B,...  rings, as ranks joined by -; channel c uses number c modulo theirs\n"
    "  --trees N         of the channels, the last ones, are told to be a tree's (0)\n"
    "  --bytes B         of the tensor, or of the stream (1048576)\n"
    "  --slice B         most bytes in a message (1048576)\n"
    "  --outstanding N   requests per comm and direction, 1 to 32 (8)\n"
    "  --iterations N    per round (1)\n"
    "  --rounds R        of load, init, finalize and unload (1)\n"
    "  --compute-ms T    pause before each iteration (0)\n"
    "  --idle-us T       sleep of the progress thread when nothing moves; 0: it only yields (0)\n"
    "  --null-handles    every other request without a region and a parent\n"
    "  --limit S         seconds that a round may take (60)\n"
    "  --strays N        connections of strangers to each listening socket, before the peers' (0)\n"
    "  --die-at CALL     be killed after listen, connect, accept, isend, irecv, test or close\n"
    "  --stall-at CALL   be stopped instead\n"
    "  --fault-after N   after so many of that call (1)\n";

static void refuse(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    fprintf(stderr, "nccl-harness: ");
    vfprintf(stderr, format, rest);
    fprintf(stderr, "\n");
    va_end(rest);
    exit(2);
}

static uint64_t number(const char *name, const char *text, uint64_t least, uint64_t most) {
    char *end;
    unsigned long long value;
    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || value < least ||
        value > most)
        refuse("--%s: must be a whole number in %llu to %llu, is '%s'", name,
               (unsigned long long)least, (unsigned long long)most, text);
    return value;
}

static int whole(const char *name, const char *text, int least, int most) {
    return (int)number(name, text, (uint64_t)least, (uint64_t)most);
}

static enum call faulty_call(const char *name, const char *text) {
    int i;
    for (i = LISTEN; i <= CLOSE; i++)
        if (i != REG && strcmp(text, call_names[i]) == 0) return (enum call)i;
    refuse("--%s: must be listen, connect, accept, isend, irecv, test or close, is '%s'", name,
           text);
    return CALLS;
}

static void one_order(struct options *options, const char *text, int *order) {
    bool there[MOST_RANKS] = {false};
    const char *whole_text = text;
    char *end;
    int i;
    for (i = 0; i < options->ranks; i++) {
        long rank = strtol(text, &end, 10);
        if (end == text || rank < 0 || rank >= options->ranks || there[rank] ||
            *end != (i + 1 < options->ranks ? '-' : '\0'))
            refuse("--orders: must name each of %d ranks once, is '%s'", options->ranks, whole_text);
        there[rank] = true;
        order[i] = (int)rank;
        text = end + 1;
    }
}

static void read_orders(struct options *options, char *text) {
    char *rest = NULL, *one;
    int i;
    for (i = 0; i < options->ranks; i++) options->order[0][i] = i;
    options->orders = 1;
    if (text == NULL) return;
    options->orders = 0;
    for (one = strtok_r(text, ",", &rest); one != NULL; one = strtok_r(NULL, ",", &rest)) {
        if (options->orders == MOST_CHANNELS) refuse("--orders: at most %d", MOST_CHANNELS);
        one_order(options, one, options->order[options->orders++]);
    }
    if (options->orders == 0) refuse("--orders: must not be empty");
}

enum {
    PLUGIN = 256, VERSION, RANK, RANKS, ROOT, DEVICE, PATTERN, NUMBER_OF_CHANNELS, ORDERS, TREES, BYTES,
    SLICE, OUTSTANDING, ITERATIONS, ROUNDS, COMPUTE, IDLE, NULL_HANDLES, HOW_LONG, STRAYS,
    DIE, STALL, AFTER, HELP
};
static const struct option known[] = {
    {"plugin", 1, NULL, PLUGIN},         {"version", 1, NULL, VERSION},
    {"rank", 1, NULL, RANK},             {"ranks", 1, NULL, RANKS},
    {"root", 1, NULL, ROOT},             {"device", 1, NULL, DEVICE},
    {"pattern", 1, NULL, PATTERN},       {"channels", 1, NULL, NUMBER_OF_CHANNELS},
    {"orders", 1, NULL, ORDERS},         {"trees", 1, NULL, TREES},
    {"bytes", 1, NULL, BYTES},
    {"slice", 1, NULL, SLICE},           {"outstanding", 1, NULL, OUTSTANDING},
    {"iterations", 1, NULL, ITERATIONS}, {"rounds", 1, NULL, ROUNDS},
    {"compute-ms", 1, NULL, COMPUTE},    {"idle-us", 1, NULL, IDLE},
    {"null-handles", 0, NULL, NULL_HANDLES}, {"limit", 1, NULL, HOW_LONG},
    {"strays", 1, NULL, STRAYS},
    {"die-at", 1, NULL, DIE},            {"stall-at", 1, NULL, STALL},
    {"fault-after", 1, NULL, AFTER},     {"help", 0, NULL, HELP},
    {NULL, 0, NULL, 0},
};

static void take(struct options *o, int which, const char *name, char *text, char **orders) {
    switch (which) {
    case PLUGIN: o->plugin = text; break;
    case VERSION: o->version = whole(name, text, NET_OLDEST, NET_NEWEST); break;
    case RANK: o->rank = whole(name, text, 0, MOST_RANKS - 1); break;
    case RANKS: o->ranks = whole(name, text, 2, MOST_RANKS); break;
    case ROOT: o->root = text; break;
    case DEVICE: o->device = whole(name, text, 0, 1023); break;
    case PATTERN:
        o->stream = strcmp(text, "stream") == 0;
        if (!o->stream && strcmp(text, "ring") != 0)
            refuse("--pattern: must be ring or stream, is '%s'", text);
        break;
    case NUMBER_OF_CHANNELS: o->channels = whole(name, text, 1, MOST_CHANNELS); break;
    case ORDERS: *orders = text; break;
    case TREES: o->trees = whole(name, text, 0, MOST_CHANNELS); break;
    case BYTES: o->bytes = number(name, text, 0, MOST_BYTES); break;
    case SLICE: o->slice = number(name, text, 1, MOST_SLICE); break;
    case OUTSTANDING: o->outstanding = whole(name, text, 1, NET_REQUESTS); break;
    case ITERATIONS: o->iterations = whole(name, text, 1, MOST_ITERATIONS); break;
    case ROUNDS: o->rounds = whole(name, text, 1, MOST_ROUNDS); break;
    case COMPUTE: o->compute_ms = whole(name, text, 0, 3600000); break;
    case IDLE: o->idle_us = whole(name, text, 0, 1000000); break;
    case NULL_HANDLES: o->null_handles = true; break;
    case HOW_LONG: o->limit_s = whole(name, text, 1, 3600); break;
    case STRAYS: o->strays = whole(name, text, 0, 10000); break;
    case STALL:
    case DIE:
        o->stall = which == STALL;
        o->fault = faulty_call(name, text);
        break;
    case AFTER: o->fault_after = number(name, text, 1, UINT64_MAX); break;
    case HELP: printf("%s", usage); exit(0);
    default: exit(2); /* getopt has named the option */
    }
}

void options_read(struct options *o, int argc, char **argv) {
    char *orders = NULL;
    int which, index = 0;
    *o = (struct options){.version = NET_NEWEST, .rank = -1, .channels = 1, .outstanding = 8,
                          .rounds = 1, .iterations = 1, .limit_s = 60, .bytes = 1 << 20,
                          .slice = 1 << 20, .fault = CALLS, .fault_after = 1};
    while ((which = getopt_long(argc, argv, "", known, &index)) != -1)
        take(o, which, which == '?' ? "" : known[index].name, optarg, &orders);
    if (optind < argc) refuse("%s: is no option", argv[optind]);
    if (o->plugin == NULL) refuse("--plugin: must be given");
    if (o->root == NULL) refuse("--root: must be given");
    if (o->ranks == 0) refuse("--ranks: must be given");
    if (o->rank < 0 || o->rank >= o->ranks) refuse("--rank: must be in 0 to %d", o->ranks - 1);
    if (o->trees > o->channels) refuse("--trees: must be in 0 to %d", o->channels);
    if (o->stream && o->ranks != 2) refuse("--pattern: stream needs --ranks 2");
    read_orders(o, orders);
}
