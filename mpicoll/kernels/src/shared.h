/* What other files use of the memory that the ranks of a group share, see shared.c.
 *
 * A call whose data goes by other ways than slots takes one round, in which every rank publishes on
 * its *board* what the others need to know: a slot, free for it in this round. It begins with
 * mpicoll_board_begin and mpicoll_board_publish. Then, at some time, comes mpicoll_board_end, and
 * last mpicoll_board_close. */

#ifndef MPICOLL_SHARED_H
#define MPICOLL_SHARED_H

#include <stddef.h>
#include <stdint.h>

struct mpicoll_shared;
struct mpicoll_kind;

/* A block of an array, or an array of a list, of a caller; calls.c has the same. */
struct mpicoll_block {
    char *data;
    size_t count; /* elements */
};

/* A call through slots: of blocks of `count` elements; and all_to_all. See shared.c. */
int mpicoll_shared_lists(const struct mpicoll_kind *kind, const struct mpicoll_block *send,
                         const struct mpicoll_block *recv, size_t count, uint32_t root,
                         uint32_t number);
int mpicoll_shared_all_to_all(struct mpicoll_kind *kind, const struct mpicoll_block *send,
                              const struct mpicoll_block *recv, size_t count, uint32_t root,
                              uint32_t number);
int mpicoll_shared_all_to_all_by_slots(struct mpicoll_kind *kind, const struct mpicoll_block *send,
                                       const struct mpicoll_block *recv, size_t count,
                                       uint32_t root, uint32_t number);

/* What these return. UNMOVED and MISFIT are of all_to_all. */
enum { DIFFERED, MOVED, UNMOVED, MISFIT };

/* Bytes of a board. */
size_t mpicoll_board_size(const struct mpicoll_shared *shared);

/* A rank's board in this round. */
char *mpicoll_board(const struct mpicoll_shared *shared, uint32_t rank);

/* Says what this call is about, as all ranks must have it alike; see mpicoll_shared_all_reduce. */
void mpicoll_board_begin(struct mpicoll_shared *shared, uint32_t number, uint64_t what,
                         uint64_t total);

/* Shows this rank's board, and waits until all others show theirs. Returns 1; 0 if the ranks' calls
 * differ, on all of them: then the call is over; and -1 if this rank has left. */
int mpicoll_board_publish(struct mpicoll_shared *shared);

/* Says that this rank has done its part. */
void mpicoll_board_end(const struct mpicoll_shared *shared);

/* Whether a rank has shown its board, and whether it has done its part. */
int mpicoll_board_is_shown(const struct mpicoll_shared *shared, uint32_t rank);
int mpicoll_board_is_ended(const struct mpicoll_shared *shared, uint32_t rank);

/* Waits until all ranks have done their parts, which are of about so many bytes; returns 0 if this
 * rank has left instead. */
int mpicoll_board_wait(const struct mpicoll_shared *shared, size_t bytes);

/* Ends the round. */
void mpicoll_board_close(struct mpicoll_shared *shared);

/* Whether any rank is far from this one, as it was measured last; and a measurement, if it is time
 * to, after so many bytes: all ranks call, once all boards are shown. */
int mpicoll_is_any_far(const struct mpicoll_shared *shared);
void mpicoll_look_around(struct mpicoll_shared *shared, size_t bytes);

/* Whether this rank does not wait any more. */
int mpicoll_has_left(const struct mpicoll_shared *shared);

/* Copies past the caches, which a result of this size would leave before anybody reads it. */
void mpicoll_copy_past_caches(char *into, const char *from, size_t size);

#endif
