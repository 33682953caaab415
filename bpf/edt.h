/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Tables that edt.bpf.c shares with the daemon (Python: flowslotd/pace/edt.py). */
#ifndef FLOWSLOT_EDT_H
#define FLOWSLOT_EDT_H

#define FS_EDT_SLOTS 4096

/* Written by the daemon. */
struct fs_edt_ctl {
	__u64 rate; /* payload bytes/s; 0: not paced */
	__u64 deadline_ns; /* CLOCK_MONOTONIC; past it the flow is not paced */
};

/* Written by the program. */
struct fs_edt_stat {
	__u64 next_ns; /* when the next packet may leave */
	__u64 last_ns; /* when the last one does */
	__u64 rate; /* that next_ns was reckoned with */
	__u64 bytes; /* payload */
};

#endif
