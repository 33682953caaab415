/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What switches' ports of the lab do beyond a FIFO, for rivals that need it: `mark`, at clsact's
 * egress, marks packets while the queue is longer than a threshold (ECN, for DCTCP), and bounds
 * what all queues of the port hold together; `spread`, a classifier of HTB, gives each flow a queue.
 * The length of the queue is what the port's root qdisc holds.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

#define TC_ACT_OK 0
#define TC_ACT_SHOT 2
#define FIRST 0x10 /* minor of the first queue's class */
#define QUEUES 256

/* Bytes; the loader replaces these numbers by the port's. */
volatile const __u32 mark_above = 0xf1075107;
volatile const __u32 drop_above = 0xf1075108;

enum { MARKED, UNMARKED };

/* Packets that met a long queue: marked, and those that cannot be (no ECN). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} mark_counts SEC(".maps");

extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym;

SEC("tc/mark")
int mark(struct __sk_buff *ctx)
{
	struct sk_buff *skb = bpf_cast_to_kern_ctx(ctx);
	__u32 which, queue = BPF_CORE_READ(skb, dev, qdisc, qstats.backlog);
	__u64 *count;

	if (queue + ctx->len > drop_above)
		return TC_ACT_SHOT;
	if (queue <= mark_above)
		return TC_ACT_OK;
	which = bpf_skb_ecn_set_ce(ctx) ? MARKED : UNMARKED;
	count = bpf_map_lookup_elem(&mark_counts, &which);
	if (count)
		__sync_fetch_and_add(count, 1);
	return TC_ACT_OK;
}

SEC("tc/spread")
int spread(struct __sk_buff *ctx)
{
	bpf_set_hash_invalid(ctx); /* the sender's own, which its timeouts change */
	ctx->tc_classid = FIRST + bpf_get_hash_recalc(ctx) % QUEUES;
	return TC_ACT_OK;
}
