/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * For the lab's budgets: at clsact's ingress, where a link ends, every TCP packet leaves a record.
 * A ring: the lab reads it, by mmap, before it is written again.
 */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

#define TC_ACT_UNSPEC -1
#define ETHERNET 14
#define IP 0x0800
#define RECORDS (1 << 17)

/* flowslot_lab/tap.py has the same. Sequence numbers as on the wire; `src`, `dst`: the last bytes of
 * the addresses; `len`: payload of the packet, or of a super-packet; `window`: as on the wire. */
struct record {
	__u64 ns; /* CLOCK_MONOTONIC */
	__u32 seq;
	__u32 ack;
	__u16 sport;
	__u16 dport;
	__u8 src;
	__u8 dst;
	__u16 len;
	__u16 window;
	__u16 syn;
	__u32 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, RECORDS);
	__type(key, __u32);
	__type(value, struct record);
} tap_records SEC(".maps");

/* How many there ever were. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} tap_written SEC(".maps");

SEC("tc/tap")
int tap(struct __sk_buff *ctx)
{
	__u32 zero = 0, at, heads;
	struct record *record;
	struct tcphdr tcp;
	struct iphdr ip;
	__u64 *written;

	if (ctx->protocol != bpf_htons(IP) || bpf_skb_load_bytes(ctx, ETHERNET, &ip, sizeof(ip)) ||
	    ip.protocol != IPPROTO_TCP ||
	    bpf_skb_load_bytes(ctx, ETHERNET + ip.ihl * 4, &tcp, sizeof(tcp)))
		return TC_ACT_UNSPEC;
	written = bpf_map_lookup_elem(&tap_written, &zero);
	if (!written)
		return TC_ACT_UNSPEC;
	at = __sync_fetch_and_add(written, 1) % RECORDS;
	record = bpf_map_lookup_elem(&tap_records, &at);
	if (!record)
		return TC_ACT_UNSPEC;
	heads = ETHERNET + ip.ihl * 4 + tcp.doff * 4;
	record->ns = bpf_ktime_get_ns();
	record->seq = bpf_ntohl(tcp.seq);
	record->ack = bpf_ntohl(tcp.ack_seq);
	record->sport = bpf_ntohs(tcp.source);
	record->dport = bpf_ntohs(tcp.dest);
	record->src = bpf_ntohl(ip.saddr) & 0xff;
	record->dst = bpf_ntohl(ip.daddr) & 0xff;
	record->len = bpf_ntohs(ip.tot_len) - (heads - ETHERNET);
	record->window = bpf_ntohs(tcp.window);
	record->syn = tcp.syn;
	return TC_ACT_UNSPEC;
}
