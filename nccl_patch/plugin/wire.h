/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.h - what two plugins say to each other. All integers are little-endian.
 *
 * A comm has `lanes` data connections and one for control, all opened by the sender. Each begins
 * with a hello. Then a data connection carries pieces, a header and its bytes, in any mixture of
 * requests but in their order; the control connection carries notes, both ways: the first one is the
 * answer of the receiver's accept, and the comm is the sender's from then on. Nothing but a FIN
 * comes back on a data connection: what comes after a sender's close would make its kernel drop bytes
 * that are not delivered yet.
 */
#ifndef FLOWSLOT_NCCL_WIRE_H
#define FLOWSLOT_NCCL_WIRE_H

#include <endian.h>
#include <stdint.h>

#define WIRE_MAGIC UINT64_C(0x31746c7366636e66) /* "fncfslt1" */
#define WIRE_VERSION 2u
#define WIRE_PIECE UINT32_C(0x65636570) /* "pece" */
#define WIRE_NOTE UINT32_C(0x65746f6e)  /* "note" */
#define WIRE_WAIT UINT32_C(0x74696177)  /* "wait": a note before accept was called */
#define WIRE_KEY 16
#define MOST_LANES 64

/* In NCCL's handle, which it carries from the listener to the connector. 64 bytes at most. */
struct wire_handle {
    uint64_t magic;
    uint32_t version;
    uint16_t lanes;
    uint16_t family; /* 4 or 6 */
    uint8_t address[16];
    uint16_t port;
    uint16_t zero0;
    uint32_t zero1;
    uint8_t key[WIRE_KEY]; /* random: who has it may connect */
    uint64_t ticket;       /* the connector's own: which of its attempts this is; 0: none yet */
};

struct wire_hello {
    uint64_t magic;
    uint32_t version;
    uint16_t lane; /* == lanes: control */
    uint16_t lanes;
    uint8_t key[WIRE_KEY];
    uint64_t connection; /* random: the lanes of one comm have the same */
};

struct wire_piece {
    uint32_t magic;
    uint32_t request; /* number of the isend, from 0, modulo 2^32 */
    uint64_t offset;  /* in the message */
    uint64_t total;   /* bytes of the message */
    uint32_t length;  /* bytes of the piece, which follow */
    uint32_t zero;
};

struct wire_note { /* a sign of life */
    uint32_t magic;
    int32_t rank;    /* its own; -1: not known */
    int32_t channel; /* the receiver's number for this comm; -1: not known */
};

_Static_assert(sizeof(struct wire_handle) == 64, "handle");
_Static_assert(sizeof(struct wire_hello) == 40, "hello");
_Static_assert(sizeof(struct wire_piece) == 32, "piece");
_Static_assert(sizeof(struct wire_note) == 12, "note");

#endif
