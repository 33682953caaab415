/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pair.c - two processes send to each other through the plugin, as NCCL would call it.
 *
 *     pair LIBRARY VERSION [name=value ...]
 *
 * Prints one line, name=value, about the sender. Values, with their defaults:
 *   size=1048576 count=8   bytes of a message, messages
 *   window=8 room=0        requests at a time; bytes that a receive has too many
 *   comms=1                each way
 *   groups=1               communicators, to which comms belong in turn; comm i sends i + 1 times as much
 *   late=0 pause=0         ms that the receiver begins late; ms between iterations
 *   iterations=1 tell=0    `count` messages each; tell=1: call flowslot_iteration()
 *   meet=0                 1: each waits for the other's end of an iteration, before it pauses
 *   enqueue=-1             ms between a call of flowslot_collective() and the iteration's messages
 *   sizes=a,b,...          instead of `size`, in turns
 *   die=STAGE              the receiver kills itself: listen, connect, accept, send, receive, test, idle
 *   stop=STAGE             the receiver stops itself, its kernel goes on
 *   shy=0                  ms before the second process connects and accepts
 *   accept=0               1: the first process only accepts
 *   strays=0               connections of strangers before the sender's
 *   alien=0                1: the other end's handle is of NCCL's own transport, 2: nonsense
 *   rest=0                 ms that both do nothing at the end
 *   nap=0                  us to sleep between looks (else it yields)
 *   oneway=0               1: only the first process sends
 *   leave=0                1: a process closes when it has done, the other may still receive
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "pair_net.h"

static int channel[2][2];
static const char *arguments[64];
static int argument_count;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double used(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

static const char *text(const char *name, const char *otherwise) {
    size_t size = strlen(name);
    for (int i = 0; i < argument_count; i++)
        if (strncmp(arguments[i], name, size) == 0 && arguments[i][size] == '=')
            return arguments[i] + size + 1;
    return otherwise;
}

static long value(const char *name, long otherwise) {
    const char *found = text(name, NULL);
    return found ? atol(found) : otherwise;
}

/* ---- The two processes ------------------------------------------------------------------- */

static void tell(const void *data, size_t size) {
    if (write(channel[me][1], data, size) != (ssize_t)size) fail("telling", 0);
}
static void hear(void *data, size_t size) {
    if (read(channel[other][0], data, size) != (ssize_t)size) fail("hearing", 0);
}

static void stage(const char *name) {
    if (me != 1) return;
    if (strcmp(text("die", ""), name) == 0) kill(getpid(), SIGKILL);
    if (strcmp(text("stop", ""), name) == 0) kill(getpid(), SIGSTOP);
}

static void rest(void) {
    long nap = value("nap", 0);
    if (nap > 0)
        usleep((unsigned)nap);
    else
        sched_yield();
}

/* Their connections stay. */
static void strange(const void *handle, int count) {
    struct sockaddr_in to = {.sin_family = AF_INET};
    memcpy(&to.sin_addr, (const char *)handle + 16, 4);
    to.sin_port = htons(*(const uint16_t *)(const void *)((const char *)handle + 32));
    for (int i = 0; i < count; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof(to)) != 0) fail("stray", 0);
        if (i % 2) (void)!send(fd, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
    }
}

static int groups;
static double took; /* s, of connect and accept */

/* Both ends of each comm, in both directions. */
static void connect_all(int comms, void **out, void **in) {
    char handle[MOST][128] = {{0}}, theirs[MOST][128];
    void *listeners[MOST];
    double began;
    for (int i = 0; i < comms; i++) {
        int result = net_listen(i % groups, handle[i], &listeners[i]);
        if (result != 0) fail("listen", result);
    }
    tell(handle, sizeof(handle));
    hear(theirs, sizeof(theirs));
    stage("listen");
    if (strcmp(text("die", ""), "listen") == 0) usleep(100000); /* else it might still be there */
    if (me == 0 && value("strays", 0) > 0) strange(theirs[0], (int)value("strays", 0));
    if (value("alien", 0) > 0) memset(theirs[0], value("alien", 0) == 1 ? 0 : 0xff, 128);
    if (value("alien", 0) == 1) {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(4711)};
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        memcpy(theirs[0], &address, sizeof(address));
    }
    if (me == 1) usleep((unsigned)value("shy", 0) * 1000);
    began = now();
    for (int i = 0; i < comms; i++) {
        out[i] = in[i] = NULL;
        while (out[i] == NULL || in[i] == NULL) {
            int result = 0;
            if (out[i] == NULL && !(me == 0 && value("accept", 0)))
                result = net_connect(i % groups, theirs[i], &out[i]);
            if (out[i] != NULL) stage("connect");
            if (result == 0 && in[i] == NULL) result = net_accept(listeners[i], &in[i]);
            if (result != 0) {
                printf("error=%d stage=setup seconds=%.3f\n", result, now() - began);
                exit(0);
            }
            rest();
        }
        stage("accept");
        T(6)->close_listen(listeners[i]);
    }
    took = now() - began;
}

static unsigned char pattern(size_t message, size_t at) {
    return (unsigned char)(message * 131 + at * 7 + (at >> 8));
}

struct flow {
    void *comm;
    char *buffer;
    void *requests[64];
    long posted, done;
};

static size_t sizes[64];
static int size_count;
static size_t largest;

static void read_sizes(void) {
    const char *list = text("sizes", NULL);
    sizes[0] = (size_t)value("size", 1 << 20);
    size_count = 1;
    if (list != NULL)
        for (size_count = 0; *list != '\0'; list += strcspn(list, ","), list += *list == ',')
            sizes[size_count++] = (size_t)atol(list);
    for (int i = 0; i < size_count; i++)
        if (sizes[i] > largest) largest = sizes[i];
}

static long window;
static size_t room;
static bool verify, oneway;
static uint64_t bytes;

/* 0, or the error. */
static int advance(struct flow *flow, bool sends, long until) {
    int done, result, got;
    if (flow->posted < until && flow->posted - flow->done < window) {
        long k = flow->posted;
        size_t size = sizes[k % size_count];
        char *data = flow->buffer + (size_t)(k % window) * (largest + room);
        void *request = NULL;
        if (sends && verify)
            for (size_t i = 0; i < size; i++) data[i] = (char)pattern((size_t)k, i);
        result = sends ? net_send(flow->comm, data, size, &request)
                       : net_receive(flow->comm, data, size + room, &request);
        if (result != 0) return result;
        if (request == (void *)1) fail("request", 1);
        if (request != NULL) flow->requests[flow->posted++ % window] = request;
    }
    if (flow->done == flow->posted) return 0;
    got = -1;
    result = net_done(flow->requests[flow->done % window], &done, flow->done % 2 ? NULL : &got);
    if (result != 0 || !done) return result;
    if (flow->done % 2 == 0 && (size_t)got != sizes[flow->done % size_count]) fail("size", got);
    if (!sends && verify) {
        char *data = flow->buffer + (size_t)(flow->done % window) * (largest + room);
        for (size_t i = 0; i < sizes[flow->done % size_count]; i++)
            if ((unsigned char)data[i] != pattern((size_t)flow->done, i)) fail("data", (int)i);
    }
    bytes += sizes[flow->done % size_count];
    flow->done++;
    return 0;
}

static int transfer(struct flow *out, struct flow *in, int comms, long each) {
    for (;;) {
        bool all = true, moved = false;
        for (int i = 0; i < comms; i++) {
            long until = groups > 1 ? each * (i + 1) : each;
            long before = out[i].done + in[i].done + out[i].posted + in[i].posted;
            int result = advance(&out[i], true, oneway && me == 1 ? 0 : until);
            if (out[i].posted > 0) stage("send");
            if (result == 0) result = advance(&in[i], false, oneway && me == 0 ? 0 : until);
            if (in[i].posted > 0) stage("receive");
            if (out[i].done > 0) stage("test");
            if (result != 0) return result;
            all = all && (out[i].done == until || (oneway && me == 1)) &&
                  (in[i].done == until || (oneway && me == 0));
            moved = moved || before != out[i].done + in[i].done + out[i].posted + in[i].posted;
        }
        if (all) return 0;
        if (!moved) rest();
    }
}

/* Both have all that was sent. */
static void meet(void) {
    char byte = 0;
    tell(&byte, 1);
    hear(&byte, 1);
}

static void read_values(void) {
    window = value("window", 8);
    room = (size_t)value("room", 0);
    verify = value("verify", 1) != 0;
    oneway = value("oneway", 0) != 0;
    groups = (int)value("groups", 1);
    read_sizes();
}

static int iterate(struct flow *out, struct flow *in, int comms) {
    void (*begin)(uint64_t), (*collective)(uint64_t, uint64_t, uint64_t);
    long count = value("count", 8), enqueue = value("enqueue", -1);
    int result = 0;
    *(void **)&begin = dlsym(library, "flowslot_iteration");
    *(void **)&collective = dlsym(library, "flowslot_collective");
    for (long k = 0; k < value("iterations", 1) && result == 0; k++) {
        if (k > 0 && value("meet", 0)) meet();
        if (k > 0) usleep((unsigned)value("pause", 0) * 1000);
        if (value("tell", 0)) begin((uint64_t)k + 100);
        if (enqueue >= 0) { /* one that is as all are, and one that is too small to count */
            collective(1, 4711, 1 << 20);
            collective(1, 17, 8);
            usleep((unsigned)enqueue * 1000);
        }
        result = transfer(out, in, comms, (k + 1) * count);
    }
    return result;
}

/* CPU time of that, s. */
static double do_nothing(void) {
    double idle_cpu = used();
    if (me == 1 && strcmp(text("die", ""), "idle") == 0) {
        usleep(200000);
        stage("idle");
    }
    usleep((unsigned)value("rest", 0) * 1000);
    return used() - idle_cpu;
}

static int go(const char *path) {
    struct flow out[MOST] = {{0}}, in[MOST] = {{0}};
    void *comms_out[MOST], *comms_in[MOST];
    int comms = (int)value("comms", 1), result = 0;
    double began, cpu, closed, idle_cpu = 0;
    read_values();
    load(path);
    for (int i = 0; i < groups && result == 0; i++) result = net_init(i);
    if (result != 0) {
        printf("error=%d stage=init\n", result);
        return 0;
    }
    connect_all(comms, comms_out, comms_in);
    for (int i = 0; i < comms; i++) {
        out[i].comm = comms_out[i];
        in[i].comm = comms_in[i];
        out[i].buffer = calloc((size_t)window, largest + room + 1);
        in[i].buffer = calloc((size_t)window, largest + room + 1);
    }
    if (me == 1) usleep((unsigned)value("late", 0) * 1000);
    began = now();
    cpu = used();
    result = iterate(out, in, comms);
    began = now() - began;
    cpu = used() - cpu;
    if (result != 0)
        printf("error=%d stage=transfer seconds=%.3f ", result, began);
    else if (value("rest", 0) > 0)
        idle_cpu = do_nothing();
    if (result == 0 && !value("leave", 0)) meet(); /* nobody closes before the other has all */
    closed = now();
    for (int i = 0; i < comms; i++) {
        T(6)->close_send(comms_out[i]);
        T(6)->close_receive(comms_in[i]);
        free(out[i].buffer);
        free(in[i].buffer);
    }
    closed = now() - closed;
    for (int i = 0; i < groups && version >= 11; i++) T(11)->finalize(contexts[i]);
    printf("bytes=%llu seconds=%.4f cpu=%.4f setup=%.4f close=%.4f idle_cpu=%.5f\n",
           (unsigned long long)bytes, began, cpu, took, closed, idle_cpu);
    return 0;
}

int main(int count, char **values) {
    int status = 0, result;
    pid_t child;
    if (count < 3) return 2;
    version = atoi(values[2]);
    for (int i = 3; i < count && argument_count < 64; i++) arguments[argument_count++] = values[i];
    signal(SIGPIPE, SIG_IGN);
    if (pipe(channel[0]) != 0 || pipe(channel[1]) != 0) return 2;
    child = fork();
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    me = child == 0;
    other = !me;
    if (me == 1) {
        (void)!freopen("/dev/null", "w", stdout);
        result = go(values[1]);
        fflush(NULL);
        _exit(result);
    }
    result = go(values[1]);
    fflush(NULL);
    if (text("die", NULL) == NULL && text("stop", NULL) == NULL) {
        waitpid(child, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) result = 4;
    } else {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    return result;
}
