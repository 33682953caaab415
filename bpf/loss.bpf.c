/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * A path of the lab that loses packets: at the ingress of the host where it ends, behind the last
 * queue, where what is sent is packets and no longer super-packets. Of those that come from one
 * host, packet number n is lost if the hash of n and the seed is small: the same numbers each time.
 */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

#define TC_ACT_UNSPEC -1 /* others look at it, too */
#define TC_ACT_SHOT 2
#define ETH_P_IP 0x0800
#define SOURCE (14 + 12) /* Ethernet; its place in an IPv4 header */

/* The loader replaces these numbers. */
volatile const __u32 from_host = 0xf1075109;  /* address, in network order */
volatile const __u32 lost_below = 0xf107510a; /* of 2^32 */
volatile const __u32 seed = 0xf107510b;

enum { MET, LOST };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} loss_counts SEC(".maps");

/* Murmur3's finalizer. */
static __always_inline __u32 mixed(__u32 h)
{
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	return h ^ h >> 16;
}

SEC("tc/lose")
int lose(struct __sk_buff *ctx)
{
	__u32 source = 0, met = MET, lost = LOST;
	__u64 *count, n;

	if (ctx->protocol != bpf_htons(ETH_P_IP) ||
	    bpf_skb_load_bytes(ctx, SOURCE, &source, sizeof(source)) || source != from_host)
		return TC_ACT_UNSPEC;
	count = bpf_map_lookup_elem(&loss_counts, &met);
	if (!count)
		return TC_ACT_UNSPEC;
	n = __sync_fetch_and_add(count, 1);
	if (mixed(mixed((__u32)n) ^ seed) >= lost_below)
		return TC_ACT_UNSPEC;
	count = bpf_map_lookup_elem(&loss_counts, &lost);
	if (count)
		__sync_fetch_and_add(count, 1);
	return TC_ACT_SHOT;
}
