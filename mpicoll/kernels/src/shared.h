/* The interface of shared.c to other files.
 *
 * A call whose data does not go through slots takes two rounds. In the first one every rank publishes
 * a *descriptor*: its slot. The second one shows that the ranks have finished their parts, if others
 * wait for that. The call begins with mpicoll_round_begin and mpicoll_round_publish, may call
 * mpicoll_round_end and mpicoll_round_wait, and ends with mpicoll_round_close, after which this rank
 * must not read other ranks' descriptors. */

#ifndef MPICOLL_SHARED_H
#define MPICOLL_SHARED_H

#include <stddef.h>
#include <stdint.h>

#include "choice.h"

struct mpicoll_shared;
struct mpicoll_plan;
struct mpicoll_mpi_plan;

/* A block of an array, or an array of a list. */
struct mpicoll_block {
    char *data;
    size_t count; /* elements */
};

/* Results of calls. Only for all_to_all: NO_ROOM, WRONG_SIZE. NOT_COPIED: see mpicoll_single_copy. */
enum { MISMATCHED, MOVED, NO_ROOM, WRONG_SIZE, NOT_COPIED };

/* Runs a call by MPI. Returns 1; 0 without memory; or MPI's positive error code times -1. */
int mpicoll_mpi_call(const struct mpicoll_mpi_plan *plan, const struct mpicoll_block *send,
                     const struct mpicoll_block *recv, size_t count, uint32_t root,
                     uint32_t number);

struct mpicoll_processes;

/* Address and size in bytes of a block. */
struct mpicoll_span {
    char *data;
    size_t size;
};

/* Moves a call's data by the kernel, after mpicoll_round_begin; see single_copy.c. spans: n blocks
 * that this rank sends, by receiver, and n that it receives, by sender. Returns MOVED; MISMATCHED; or
 * NOT_COPIED on all ranks, if one of them could not copy: the call must be repeated through slots. */
int mpicoll_single_copy(const struct mpicoll_processes *processes,
                        const struct mpicoll_span *spans, struct mpicoll_trial *trial);

/* Returns a rank's descriptor in this round. */
char *mpicoll_descriptor(const struct mpicoll_shared *shared, uint32_t rank);

/* Sets the call record, which must match on all ranks, and waits until this rank's slot is free.
 * number: the group's call number, the same on every rank. trial: of the call, or NULL. Returns 0
 * if this rank was aborted. */
int mpicoll_round_begin(struct mpicoll_shared *shared, uint32_t number, uint64_t signature,
                        uint64_t count, const struct mpicoll_trial *trial);

/* Publishes this rank's descriptor and waits until all other ranks have published theirs. Returns
 * 1; 0 on all ranks after a collective mismatch: then the call is over; -1 if this rank was
 * aborted. */
int mpicoll_round_publish(struct mpicoll_shared *shared, struct mpicoll_trial *trial);

/* Signals that this rank has finished its part. */
void mpicoll_round_end(const struct mpicoll_shared *shared);

/* Return whether a rank has published the same call, and whether it has finished its part. */
int mpicoll_has_same_call(const struct mpicoll_shared *shared, uint32_t rank);
int mpicoll_has_ended(const struct mpicoll_shared *shared, uint32_t rank);

/* Waits until all ranks finish their parts of about `bytes` bytes. Returns 0 if aborted. */
int mpicoll_round_wait(const struct mpicoll_shared *shared, size_t bytes);

/* Ends the rounds. */
void mpicoll_round_close(struct mpicoll_shared *shared);

/* Returns 1 if this rank must stop waiting: it was aborted, or a rank has closed the group. Checked
 * only once a wait takes long, so that short waits do not pay for it. */
int mpicoll_is_aborted(const struct mpicoll_shared *shared);

#endif
