/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank found, as one line of JSON. */
#include "rank.h"

#include <dirent.h>
#include <stdio.h>
#include <unistd.h>

/* Of a directory of /proc; its own descriptor and the dots are not counted. */
static int entries(const char *path) {
    DIR *directory = opendir(path);
    int n = 0;
    if (directory == NULL) return -1;
    while (readdir(directory) != NULL) n++;
    closedir(directory);
    return n - 2;
}

struct census census_take(void) {
    struct census counted = {entries("/proc/self/fd") - 1, entries("/proc/self/task")};
    return counted;
}

struct census census_settled(struct census before) {
    struct census now = census_take();
    int i;
    for (i = 0; i < 50 && now.threads > before.threads; i++) {
        usleep(4000);
        now = census_take();
    }
    return now;
}

static double seconds(int64_t ns) {
    return (double)ns / 1e9;
}

static void print_text(const char *name, const char *text) {
    printf("\"%s\":", name);
    if (text == NULL) {
        printf("null");
        return;
    }
    putchar('"');
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        putchar((unsigned char)*text < ' ' ? ' ' : *text);
    }
    putchar('"');
}

static void print_rounds(const struct rank *rank) {
    int r, c;
    printf("\"rounds\":[");
    for (r = 0; r < rank->rounds; r++) {
        const struct round *round = &rank->round[r];
        printf("%s{\"descriptors\":%d,\"threads\":%d,\"comms\":[", r ? "," : "",
               round->after.descriptors, round->after.threads);
        for (c = 0; c < rank->options.channels; c++)
            printf("%s{\"to\":%d,\"sent\":%llu,\"from\":%d,\"received\":%llu,\"connect_s\":%.6f}",
                   c ? "," : "", rank->channels[c].after, (unsigned long long)round->sent[c],
                   rank->channels[c].before, (unsigned long long)round->received[c],
                   seconds(round->connect_ns[c]));
        printf("]}");
    }
    printf("]");
}

static void print_errors(const struct rank *rank) {
    int i, noted = rank->errors < MOST_ERRORS ? rank->errors : MOST_ERRORS;
    printf("\"errors\":[");
    for (i = 0; i < noted; i++) {
        const struct failure *one = &rank->error[i];
        printf("%s{\"call\":\"%s\",\"result\":%d,\"at\":%.6f,\"call_s\":%.6f,"
               "\"since_progress_s\":%.6f,",
               i ? "," : "", call_names[one->call], one->result, seconds(one->at),
               seconds(one->call_ns), seconds(one->since_progress_ns));
        print_text("what", one->what);
        printf("}");
    }
    printf("]");
}

static void print_times(const struct rank *rank) {
    int i;
    printf("\"iteration_s\":[");
    for (i = 0; i < rank->iterations; i++)
        printf("%s%.6f", i ? "," : "", seconds(rank->iteration_ns[i]));
    printf("],\"slowest_s\":{");
    for (i = 0; i <= OTHER; i++)
        printf("%s\"%s\":%.6f", i ? "," : "", call_names[i], seconds(rank->slowest[i]));
    printf("},\"calls\":{");
    for (i = 0; i <= OTHER; i++)
        printf("%s\"%s\":%llu", i ? "," : "", call_names[i], (unsigned long long)rank->calls[i]);
    printf("}");
}

void report_print(const struct rank *rank) {
    const struct options *o = &rank->options;
    printf("{\"rank\":%d,\"ranks\":%d,\"version\":%d,", o->rank, o->ranks, o->version);
    print_text("plugin", rank->name);
    printf(",\"ok\":%s,\"sums_right\":%s,\"gpu_refused\":%s,", rank->failed ? "false" : "true",
           rank->sums_right && rank->iterations > 0 ? "true" : "false",
           rank->gpu_refused ? "true" : "false");
    print_text("device", rank->device.name);
    printf(",\"speed\":%d,\"before\":{\"descriptors\":%d,\"threads\":%d},", rank->device.speed,
           rank->before.descriptors, rank->before.threads);
    print_rounds(rank);
    printf(",");
    print_errors(rank);
    printf(",");
    print_times(rank);
    printf(",\"close_s\":%.6f,\"busy_cpu_s\":%.6f,\"idle_cpu_s\":%.6f,\"idle_s\":%.6f}\n",
           seconds(rank->close_ns), seconds(rank->busy_cpu_ns), seconds(rank->idle_cpu_ns),
           seconds(rank->idle_ns));
    fflush(stdout);
}
