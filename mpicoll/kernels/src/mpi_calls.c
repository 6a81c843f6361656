/* MPI's collectives for the native fast path: functions of the MPI library that mpi4py has loaded,
 * called without Python.
 *
 * One binary serves every MPI library, so that there is no mpi.h here: Python passes the addresses
 * of the functions, MPI_IN_PLACE and the handles. A handle is a C int (MPICH, Intel MPI) or a
 * pointer (Open MPI, the ABI of MPI 5). Both are passed as intptr_t, an int with its sign extended.
 * In the calling conventions of x86-64 and aarch64, each argument has a register, or on the stack 8
 * bytes, of its own, and a function that takes an int reads the lower half. Others, as of POWER and
 * RISC-V, expect the sign extended. */

#include "kernels.h"
#include "shared.h"

#include <stdlib.h>
#include <string.h>

/* The functions by their arguments. */
typedef int barrier_function(intptr_t comm);
typedef int broadcast_function(void *buffer, int count, intptr_t type, int root, intptr_t comm);
typedef int combine_function(const void *send, void *recv, int count, intptr_t type, intptr_t op,
                             intptr_t comm);
typedef int reduce_function(const void *send, void *recv, int count, intptr_t type, intptr_t op,
                            int root, intptr_t comm);
typedef int move_function(const void *send, int count, intptr_t type, void *recv, int recv_count,
                          intptr_t recv_type, intptr_t comm);
typedef int rooted_function(const void *send, int count, intptr_t type, void *recv, int recv_count,
                            intptr_t recv_type, int root, intptr_t comm);

/* The type of a function; mpicoll/routes/host/mpi.py mirrors it. */
enum { BARRIER, BROADCAST, COMBINE, REDUCE, MOVE, ROOTED };

/* What all calls of one kind share. */
struct mpicoll_mpi_plan {
    void *function;
    intptr_t comm, datatype, op;
    const void *in_place; /* MPI_IN_PLACE if the input is in the output; NULL */
    double divisor;       /* of the combined result */
    uint64_t size;        /* bytes of an element */
    uint32_t n, me;
    int32_t type;
    int32_t format;               /* of the numbers to divide */
    uint32_t numbers_per_element; /* to divide */
    int32_t lists_in, lists_out;  /* the input, or output, is a list of one array per rank */
    int32_t discards;             /* exscan of the first rank, whose result is undefined */
};

EXPORT const struct mpicoll_field mpicoll_mpi_plan_fields[] = {
    FIELD(mpicoll_mpi_plan, function), FIELD(mpicoll_mpi_plan, comm),
    FIELD(mpicoll_mpi_plan, datatype), FIELD(mpicoll_mpi_plan, op),
    FIELD(mpicoll_mpi_plan, in_place), FIELD(mpicoll_mpi_plan, divisor),
    FIELD(mpicoll_mpi_plan, size), FIELD(mpicoll_mpi_plan, n), FIELD(mpicoll_mpi_plan, me),
    FIELD(mpicoll_mpi_plan, type), FIELD(mpicoll_mpi_plan, format),
    FIELD(mpicoll_mpi_plan, numbers_per_element), FIELD(mpicoll_mpi_plan, lists_in),
    FIELD(mpicoll_mpi_plan, lists_out), FIELD(mpicoll_mpi_plan, discards),
    END_OF_FIELDS,
};

#define CALL(TYPE) ((TYPE *)plan->function)

static int call(const struct mpicoll_mpi_plan *plan, const void *send, void *recv, int count,
                uint32_t root)
{
    const intptr_t type = plan->datatype, comm = plan->comm;
    switch (plan->type) {
    case BARRIER:
        return CALL(barrier_function)(comm);
    case BROADCAST:
        return CALL(broadcast_function)(recv, count, type, (int)root, comm);
    case COMBINE:
        return CALL(combine_function)(send, recv, count, type, plan->op, comm);
    case REDUCE:
        return plan->me == root
                   ? CALL(reduce_function)(send, recv, count, type, plan->op, (int)root, comm)
                   : CALL(reduce_function)(recv, NULL, count, type, plan->op, (int)root, comm);
    case MOVE:
        return CALL(move_function)(send, count, type, recv, count, type, comm);
    default:
        return CALL(rooted_function)(send, count, type, recv, count, type, (int)root, comm);
    }
}

/* Returns whether the blocks follow each other in memory. */
static int are_adjacent(const struct mpicoll_block *blocks, size_t n, size_t nbytes)
{
    for (size_t k = 1; k < n; k++)
        if (blocks[k].data != blocks[0].data + k * nbytes)
            return 0;
    return 1;
}

/* Runs a call; see lists_function in calls.c. A side with a block per rank is one block in all if
 * the call is not one on lists. Returns 1, 0 without memory, or MPI's error code times -1. */
EXPORT int mpicoll_mpi_call(const struct mpicoll_mpi_plan *plan, const struct mpicoll_block *send,
                            const struct mpicoll_block *recv, size_t count, uint32_t root,
                            uint32_t number)
{
    const int rooted = plan->type == ROOTED, is_root = plan->me == root;
    const size_t nbytes = count * plan->size, n = plan->n;
    const int sends = !rooted || !plan->lists_in || is_root;
    const int receives = plan->type == REDUCE || (rooted && plan->lists_out) ? is_root : 1;
    const int joins = sends && plan->lists_in && !are_adjacent(send, n, nbytes);
    const int splits = receives && plan->lists_out && !are_adjacent(recv, n, nbytes);
    const void *from = plan->in_place ? plan->in_place : sends ? send->data : NULL;
    char *into = receives || !rooted ? recv->data : NULL, *joined = NULL;
    (void)number;
    if (joins || splits || plan->discards) {
        joined = malloc(plan->discards ? nbytes : n * nbytes);
        if (!joined)
            return 0;
        if (joins)
            from = joined;
        else
            into = joined;
    }
    for (size_t k = 0; joins && k < n; k++)
        memcpy(joined + k * nbytes, send[k].data, nbytes);
    const int error = call(plan, from, into, (int)count, root);
    for (size_t k = 0; splits && !error && k < n; k++)
        memcpy(recv[k].data, joined + k * nbytes, nbytes);
    free(joined);
    if (!error && plan->divisor != 1 && receives && !plan->discards) {
        const char *const result[] = {into};
        mpicoll_combine(plan->format, 0, result, 1, into, count * plan->numbers_per_element,
                        plan->divisor);
    }
    return error ? -error : 1;
}
