/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Flows of one host on one of its links. What others have reserved there is known and need not be
 * probed for. Nor could it be: TCP's small queues keep what a socket has in its host's port so short
 * that no flow sees it as a queue, and all flows there would share alike, whatever is reserved.
 */
#ifndef FLOWSLOT_UPLINK_H
#define FLOWSLOT_UPLINK_H

/* What other flows leave of the link while they have something to send; all ones: not known. */
static __always_inline __u64 left_by_others(struct flow *f, struct fs_ctl *ctl, __u64 now)
{
	__u32 key = ctl->uplink, mine = f->slot % FS_RIVALS;
	struct fs_uplink *up = bpf_map_lookup_elem(&fs_uplinks, &key);
	__u64 taken = 0;

	if (!key || !up)
		return FS_UNPACED;
	for (__u32 i = 0; i < FS_RIVALS; i++)
		if (i != mine && now - up->rivals[i].at_ns < FS_RIVAL_NS)
			taken += up->rivals[i].rate;
	return ctl->line > taken ? ctl->line - taken : 0;
}

/* Tell the others whether this flow has something to send. A last segment is as good as sent. */
static __always_inline void claim(struct sock *sk, struct flow *f, struct fs_ctl *ctl, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	bool has = (__u32)(tp->write_seq - tp->snd_nxt) > tp->mss_cache;
	__u32 key = ctl ? ctl->uplink : 0, mine = f->slot % FS_RIVALS;
	struct fs_uplink *up = bpf_map_lookup_elem(&fs_uplinks, &key);

	if (!key || !up)
		return;
	up->rivals[mine].rate = ctl->reserved;
	up->rivals[mine].at_ns = has && f->mode != FS_OPEN ? now : 0;
}

#endif
