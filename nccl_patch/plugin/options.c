/* SPDX-License-Identifier: Apache-2.0 */
/* Settings from the environment, NCCL's own and ours; the log. */
#include "plugin.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <strings.h>
#include <sys/random.h>

struct options options;
static net_log_fn *_Atomic log_to;

static void say(int level, const char *text) {
    net_log_fn *log = log_to;
    if (log != NULL)
        log(level, NET_LOG_INIT | NET_LOG_NET, "flowslot", 0, "NET/flowslot: %s", text);
    else if (level == NET_LOG_WARN)
        fprintf(stderr, "NET/flowslot: %s\n", text);
}

void warn(const char *format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof(text), format, values);
    va_end(values);
    say(NET_LOG_WARN, text);
}

void inform(const char *format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof(text), format, values);
    va_end(values);
    say(NET_LOG_INFO, text);
}

uint64_t now_ns(void) {
    return flowslot__now(CLOCK_MONOTONIC);
}

uint64_t random64(void) {
    uint64_t value = 0;
    if (getrandom(&value, sizeof(value), 0) != sizeof(value)) value = now_ns() * 2654435761u;
    return value;
}

static const char *text(const char *name) {
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

/* `most` is below 2^63. */
static long long number(const char *name, long long least, long long most, long long otherwise) {
    const char *value = text(name);
    char *end;
    long long result;
    if (value == NULL) return otherwise;
    errno = 0;
    result = strtoll(value, &end, 0);
    if (errno == 0 && *end == '\0' && result >= least && result <= most) return result;
    warn("%s must be a number from %lld to %lld, got \"%.40s\": it is left out", name, least, most,
         value);
    return otherwise;
}

static int family(void) {
    const char *value = text("NCCL_SOCKET_FAMILY");
    if (value == NULL) return AF_UNSPEC;
    if (strcmp(value, "AF_INET") == 0) return AF_INET;
    if (strcmp(value, "AF_INET6") == 0) return AF_INET6;
    warn("NCCL_SOCKET_FAMILY must be AF_INET or AF_INET6, got \"%.40s\": it is left out", value);
    return AF_UNSPEC;
}

/* Once: others read them all the time. */
void options_read(net_log_fn *log) {
    static bool done;
    const char *interfaces = text("NCCL_SOCKET_IFNAME"), *daemon = text("FLOWSLOT_SOCKET");
    log_to = log;
    if (done) return;
    done = true;
    options.threads = (int)number("NCCL_SOCKET_NTHREADS", 0, MOST_THREADS, -1);
    options.lanes_per_thread = (int)number("NCCL_NSOCKS_PERTHREAD", 1, MOST_LANES, -1);
    options.send_buffer = (int)number("NCCL_SOCKET_SNDBUF", 0, INT_MAX, 0);
    options.receive_buffer = (int)number("NCCL_SOCKET_RCVBUF", 0, INT_MAX, 0);
    options.retries = (int)number("NCCL_SOCKET_RETRY_CNT", 0, 1000000, 3);
    options.retry_ms = (int)number("NCCL_SOCKET_RETRY_SLEEP_MSEC", 0, 1000000, 100);
    options.timeout_ms = 1000 * (int)number("FLOWSLOT_NCCL_TIMEOUT", 1, 86400, 120);
    options.bootstrap = number("NCCL_OOB_NET_ENABLE", 0, 1, 0) != 0;
    options.totals = number("FLOWSLOT_TOTALS", 0, 1, 0) != 0;
    options.iteration_bytes =
        (uint64_t)number("FLOWSLOT_ITERATION_BYTES", 0, (long long)1 << 50, 0);
    options.family = family();
    snprintf(options.interfaces, sizeof(options.interfaces), "%s", interfaces ? interfaces : "");
    snprintf(options.daemon, sizeof(options.daemon), "%s", daemon ? daemon : "");
    flowslot_nccl_name(options.job, sizeof(options.job));
}

bool options_insist(void) {
    const char *net = text("NCCL_NET");
    return (net != NULL && strcasecmp(net, NET_NAME) == 0) ||
           number("NCCL_IB_DISABLE", INT_MIN, INT_MAX, 0) != 0;
}
