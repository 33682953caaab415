/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#ifndef FLOWSLOT_MAPS_H
#define FLOWSLOT_MAPS_H

/* The loader may set another size for all three before it loads. */
#define FS_SLOTS 16384

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, FS_SLOTS);
	__type(key, __u32);
	__type(value, struct fs_ctl);
} fs_ctl SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, FS_SLOTS);
	__type(key, __u32);
	__type(value, struct fs_stat);
} fs_stat SEC(".maps");

/* What is reserved on one of the host's links for flows that have something to send, by slot modulo
 * FS_RIVALS. Of several flows in one place the one with the highest rate counts. */
#define FS_RIVALS 32
struct fs_rival {
	__u64 until_ns;
	__u64 rate;
	__u64 slot;
};
struct fs_uplink {
	struct fs_rival rivals[FS_RIVALS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FS_UPLINKS + 1);
	__type(key, __u32);
	__type(value, struct fs_uplink);
} fs_uplinks SEC(".maps");

/* Free slots, filled by the loader, lowest on top: slots in use stay dense at the front. */
struct {
	__uint(type, BPF_MAP_TYPE_STACK);
	__uint(max_entries, FS_SLOTS);
	__type(value, __u32);
} fs_free SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} fs_events SEC(".maps");

#endif
