/* SPDX-License-Identifier: Apache-2.0 */
/* Network interfaces that NCCL may use: one device for each, with one address. */
#include "plugin.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <stdio.h>

#define UNKNOWN_SPEED 10000 /* Mbit/s */
#define AMAZON 0x1d0f
#define GOOGLE 0x1ae0

struct device devices[MOST_DEVICES];
int device_count;

socklen_t address_size(const struct sockaddr_storage *address) {
    return address->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                          : sizeof(struct sockaddr_in);
}

void address_text(char to[MOST_TEXT], const struct sockaddr_storage *address) {
    uint8_t ip[16];
    uint16_t port = 0;
    char host[INET6_ADDRSTRLEN] = "?";
    uint8_t family = flowslot__address(address, ip, &port);
    if (family != 0) inet_ntop(family, ip, host, sizeof(host));
    snprintf(to, MOST_TEXT, family == AF_INET6 ? "[%s]:%u" : "%s:%u", host, port);
}

/* The first line of a file as a number in this base; -1: there is none. */
static long read_number(const char *folder, const char *name, const char *file, int base) {
    char path[PATH_MAX], line[32], *end;
    long value;
    FILE *from;
    snprintf(path, sizeof(path), "%s/%s/%s", folder, name, file);
    from = fopen(path, "re");
    if (from == NULL) return -1;
    if (fgets(line, sizeof(line), from) == NULL) line[0] = '\0';
    fclose(from);
    value = strtol(line, &end, base);
    return end == line ? -1 : value;
}

/* Does a list such as "eth,ib0" name this interface, by its beginning or, `exactly`, as a whole? */
static bool is_named(const char *list, const char *name, bool exactly) {
    while (*list != '\0') {
        size_t size = strcspn(list, ",");
        if (size > 0 && strncmp(list, name, size) == 0 && (!exactly || name[size] == '\0'))
            return true;
        list += size + (list[size] == ',');
    }
    return false;
}

/* As NCCL_SOCKET_IFNAME has it: "^": all but these; "=": whole names. */
static bool is_chosen(const char *list, const char *name) {
    bool but = list[0] == '^', exactly;
    list += but;
    exactly = list[0] == '=';
    return is_named(list + exactly, name, exactly) != but;
}

static bool is_usable(const struct ifaddrs *at, bool loopback) {
    unsigned int up = IFF_UP | IFF_RUNNING;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)at->ifa_addr;
    if (at->ifa_addr == NULL || (at->ifa_flags & up) != up) return false;
    if (at->ifa_addr->sa_family != AF_INET && at->ifa_addr->sa_family != AF_INET6) return false;
    if (options.family != AF_UNSPEC && at->ifa_addr->sa_family != options.family) return false;
    if ((at->ifa_flags & IFF_LOOPBACK) && !loopback) return false;
    /* A link-local address means nothing on another host. */
    return at->ifa_addr->sa_family == AF_INET || !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
}

/* How NCCL's own transport would be set up: by who made the device. */
static void set_lanes(struct device *device) {
    long vendor = read_number("/sys/class/net", device->name, "device/vendor", 16);
    int threads = vendor == AMAZON ? 2 : vendor == GOOGLE ? 4 : 0;
    int each = vendor == AMAZON ? 8 : 1;
    if (options.threads >= 0) threads = options.threads;
    if (options.lanes_per_thread >= 0) each = options.lanes_per_thread;
    device->threads = threads;
    device->lanes = (threads > 0 ? threads : 1) * each;
    if (device->lanes > MOST_LANES) {
        warn("NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD must be at most %d, got %d: %d "
             "sockets are used",
             MOST_LANES, device->lanes, MOST_LANES);
        device->lanes = MOST_LANES;
    }
}

static void add(const struct ifaddrs *at) {
    struct device *device;
    char path[PATH_MAX];
    long speed;
    for (int i = 0; i < device_count; i++)
        if (strcmp(devices[i].name, at->ifa_name) == 0) return;
    if (device_count == MOST_DEVICES) return;
    device = &devices[device_count++];
    memset(device, 0, sizeof(*device));
    snprintf(device->name, sizeof(device->name), "%s", at->ifa_name);
    memcpy(&device->address, at->ifa_addr,
           at->ifa_addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                               : sizeof(struct sockaddr_in));
    snprintf(path, sizeof(path), "/sys/class/net/%s/device", device->name);
    device->pci_path = realpath(path, NULL);
    speed = read_number("/sys/class/net", device->name, "speed", 10);
    device->speed = speed > 0 && speed <= INT_MAX ? (int)speed : UNKNOWN_SPEED;
    set_lanes(device);
    snprintf(path, sizeof(path), "%s", device->name);
    inform("%s: %d sockets, %d threads", path, device->lanes, device->threads);
}

bool devices_find(void) {
    /* Without a choice, as NCCL: IP over InfiniBand, else real interfaces, else those of containers,
     * else the loopback. */
    static const char *const choices[] = {"ib", "^docker,lo,virbr", "docker", "=lo"};
    const size_t last = sizeof(choices) / sizeof(choices[0]) - 1;
    struct ifaddrs *all, *at;
    bool told = options.interfaces[0] != '\0';
    if (device_count > 0) return true;
    if (getifaddrs(&all) != 0) {
        warn("cannot list network interfaces: %s", strerror(errno));
        return false;
    }
    for (size_t i = 0; i <= (told ? 0 : last) && device_count == 0; i++) {
        const char *list = told ? options.interfaces : choices[i];
        for (at = all; at != NULL; at = at->ifa_next)
            if (is_usable(at, told || i == last) && is_chosen(list, at->ifa_name)) add(at);
    }
    freeifaddrs(all);
    if (device_count == 0)
        warn("no interface with an address matches NCCL_SOCKET_IFNAME=\"%s\" and "
             "NCCL_SOCKET_FAMILY",
             options.interfaces);
    return device_count > 0;
}

/* Whether any port of this adapter is active ("4: ACTIVE"). */
static bool adapter_active(const char *adapter) {
    char folder[PATH_MAX];
    struct dirent *port;
    bool active = false;
    DIR *ports;
    snprintf(folder, sizeof(folder), "/sys/class/infiniband/%s/ports", adapter);
    ports = opendir(folder);
    if (ports == NULL) return false;
    while (!active && (port = readdir(ports)) != NULL)
        active = port->d_name[0] != '.' && read_number(folder, port->d_name, "state", 10) == 4;
    closedir(ports);
    return active;
}

bool infiniband_active(void) {
    struct dirent *adapter;
    bool active = false;
    DIR *adapters = opendir("/sys/class/infiniband");
    if (adapters == NULL) return false;
    while (!active && (adapter = readdir(adapters)) != NULL)
        active = adapter->d_name[0] != '.' && adapter_active(adapter->d_name);
    closedir(adapters);
    return active;
}
