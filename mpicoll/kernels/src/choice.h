/* Choices between ways of running a call that give the same bits, see choice.c. */

#ifndef MPICOLL_CHOICE_H
#define MPICOLL_CHOICE_H

#include <stddef.h>
#include <stdint.h>

/* A way is a combination of these. */
enum {
    ONE_SHOT = 1,     /* all_reduce: every rank combines all elements, not only its share */
    STREAM_SLOTS = 2, /* non-temporal stores into slots */
    STREAM_OUT = 4,   /* non-temporal stores into the result */
    BY_KERNEL = 8,    /* one copy by the kernel, see single_copy.c */
    PARALLEL = 16,    /* on several threads */
    BY_MPI = 32       /* one call of MPI, see mpi_calls.c */
};

struct mpicoll_choices;

/* A call whose way was chosen. */
struct mpicoll_trial {
    struct mpicoll_choice *choice; /* of its size class; NULL if there is nothing to choose */
    int way;
    uint32_t candidate;      /* index of `way` in the candidates */
    int in_series;           /* of trials */
    int is_timed, is_last;   /* is_last: of the series */
    int has_note;            /* the ranks exchange their notes, or one of an earlier trial */
    uint32_t note;           /* ns of an earlier trial on this rank; sent to all ranks */
    double scale;            /* of durations, which depend on the bytes in the size class */
    uint64_t start, paused;
};

/* Returns a call's way; all ranks choose the same if their earlier calls of this plan were the same.
 *
 * choices: of the call's plan; NULL: the default way.
 * bytes:   of the call, the same number on all ranks.
 * one_shot: maximum bytes of a call that is run in one shot by default.
 * allowed: the parts of ways that the call supports. */
struct mpicoll_trial mpicoll_choose(struct mpicoll_choices *choices, size_t bytes, size_t one_shot,
                                    int allowed);

/* The first round has shown that the calls match. note: the maximum of the ranks' notes. */
void mpicoll_trial_agreed(const struct mpicoll_trial *trial, uint32_t note);

/* Stop and continue the clock of a trial: waiting for late ranks does not count. */
void mpicoll_trial_pause(struct mpicoll_trial *trial);
void mpicoll_trial_resume(struct mpicoll_trial *trial);

/* The call has ended; `failed`, on all ranks: the chosen way does not work. */
void mpicoll_trial_end(const struct mpicoll_trial *trial, int failed);

#endif
