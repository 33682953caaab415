/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * flowslot_edt: earliest departure times for the flows in a table.
 *
 * At a device's egress (clsact) every packet of a flow gets the time at which it may leave, and fq
 * lets it go then. The time is reckoned per flow: a packet of n payload bytes moves the flow's next
 * departure by n / rate. Packets of other sockets are not touched, nor are those of flows whose
 * entry is past its deadline. Nothing is ever dropped here, and filters after this one have their
 * say (TC_ACT_UNSPEC).
 *
 * Two threads that send through one UDP socket at once may read the same next_ns: then one packet
 * goes free. TCP sends under the socket's lock.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "edt.h"

#define NS 1000000000ULL
/* fq's own horizon is 10 s; what would leave later than this leaves then. */
#define HORIZON_NS (2 * NS)

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FS_EDT_SLOTS);
	__type(key, __u64); /* socket cookie */
	__type(value, __u32); /* slot */
} edt_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, FS_EDT_SLOTS);
	__type(key, __u32);
	__type(value, struct fs_edt_ctl);
} edt_ctl SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, FS_EDT_SLOTS);
	__type(key, __u32);
	__type(value, struct fs_edt_stat);
} edt_stat SEC(".maps");

/* Bytes of the transport header at this offset from the network header. */
static __always_inline __u32 transport_header(struct __sk_buff *skb, __u8 protocol, __u32 at)
{
	__u8 offset = 0;

	if (protocol == IPPROTO_UDP)
		return 8;
	if (protocol != IPPROTO_TCP ||
	    bpf_skb_load_bytes_relative(skb, at + 12, &offset, 1, BPF_HDR_START_NET))
		return 0;
	return (offset >> 4) * 4;
}

/* Payload bytes of a packet, or of all packets of a super-packet. */
static __always_inline __u32 payload_of(struct __sk_buff *skb)
{
	__u32 total = 0, header = 0;
	struct ipv6hdr ip6;
	struct iphdr ip4;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes_relative(skb, 0, &ip4, sizeof(ip4), BPF_HDR_START_NET))
			return 0;
		total = bpf_ntohs(ip4.tot_len);
		header = ip4.ihl * 4;
		header += transport_header(skb, ip4.protocol, header);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes_relative(skb, 0, &ip6, sizeof(ip6), BPF_HDR_START_NET))
			return 0;
		header = sizeof(ip6);
		total = bpf_ntohs(ip6.payload_len);
		total = total ? total + header : 0;
		header += transport_header(skb, ip6.nexthdr, header);
	}
	if (!total) /* more than 64 kB: the header does not say */
		total = skb->len - ETH_HLEN;
	return total > header ? total - header : 0;
}

SEC("tc")
int flowslot_edt(struct __sk_buff *skb)
{
	__u64 cookie = bpf_get_socket_cookie(skb), now, leaves, next, rate;
	__u32 *slot = bpf_map_lookup_elem(&edt_slots, &cookie);
	struct fs_edt_stat *st;
	struct fs_edt_ctl *ctl;
	__u32 key, payload;

	if (!slot)
		return TC_ACT_UNSPEC;
	key = *slot;
	ctl = bpf_map_lookup_elem(&edt_ctl, &key);
	st = bpf_map_lookup_elem(&edt_stat, &key);
	if (!ctl || !st)
		return TC_ACT_UNSPEC;
	payload = payload_of(skb);
	__sync_fetch_and_add(&st->bytes, payload);
	now = bpf_ktime_get_ns();
	rate = ctl->rate;
	if (!rate || ctl->deadline_ns <= now)
		return TC_ACT_UNSPEC;

	next = st->next_ns;
	/* What is still owed at an old rate is owed in bytes. */
	if (next > now && st->rate && st->rate != rate)
		next = now + (next - now) / 1000 * st->rate / rate * 1000;
	st->rate = rate;
	leaves = next > now ? next : now;
	if (leaves < st->last_ns) /* packets stay in order */
		leaves = st->last_ns;
	if (leaves > now + HORIZON_NS)
		leaves = now + HORIZON_NS;
	st->last_ns = leaves;
	st->next_ns = leaves + payload * NS / rate;
	if (leaves > now)
		bpf_skb_set_tstamp(skb, leaves, BPF_SKB_TSTAMP_DELIVERY_MONO);
	return TC_ACT_UNSPEC;
}
