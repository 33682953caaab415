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
	__u32 key = ctl->uplink;
	struct fs_uplink *up = bpf_map_lookup_elem(&fs_uplinks, &key);
	__u64 taken = 0;

	if (!key || !up)
		return FS_UNPACED;
	for (__u32 i = 0; i < FS_RIVALS; i++)
		if (now < up->rivals[i].until_ns && up->rivals[i].slot != f->slot)
			taken += up->rivals[i].rate;
	return ctl->line > taken ? ctl->line - taken : 0;
}

/*
 * Tell the others whether this flow has something to send, at `rate`, which is reserved for it. A
 * last segment is as good as sent. A flow whose peer takes no more, or that yields to loss, leaves
 * the link to others.
 */
static __always_inline void claim(struct sock *sk, struct flow *f, struct fs_ctl *ctl, __u64 rate,
				  __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u64 mss = max64(tp->mss_cache, 1), lasts;
	bool has = (__u32)(tp->write_seq - tp->snd_nxt) > mss && f->mode == FS_RESERVED &&
		   (__s32)(tp->snd_una + tp->snd_wnd - tp->snd_nxt) > (__s32)mss;
	__u32 key = ctl ? ctl->uplink : 0;
	struct fs_uplink *up = bpf_map_lookup_elem(&fs_uplinks, &key);
	struct fs_rival *place;

	if (!key || !up)
		return;
	place = &up->rivals[f->slot % FS_RIVALS];
	if (place->slot != f->slot && (!has || (now < place->until_ns && place->rate >= rate)))
		return; /* it is another flow's */
	lasts = max64(2 * mss * FS_SECOND / max64(rate, 1), FS_RIVAL_NS);
	place->rate = rate;
	place->slot = f->slot;
	place->until_ns = has ? now + min64(lasts, FS_RIVAL_MOST_NS) : 0;
}

#endif
