/* MPI's collectives for the native fast path: functions of the MPI library that mpi4py has loaded,
 * called without Python.
 *
 * One binary serves every MPI library, so this file does not include mpi.h. Python passes the
 * addresses of the functions, the handles and MPI_IN_PLACE. A handle is a C int (MPICH, Intel MPI)
 * or a pointer (Open MPI, MPI 5's ABI). Both are passed as intptr_t, an int with its sign extended:
 * the calling conventions of Linux's 64-bit processors give each argument a register or 8 bytes of
 * the stack, and a function that takes an int reads the lower half. */

#include "kernels.h"
#include "shared.h"

#include <stdlib.h>

/* The functions by their arguments; mpicoll/routes/host/mpi.py has the same names. */
enum { BARRIER, BROADCAST, COMBINE, REDUCE, MOVE, ROOTED };
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

/* What all calls of one kind share. */
struct mpicoll_mpi_plan {
    void *function;
    intptr_t comm, datatype, op;
    const void *in_place; /* MPI_IN_PLACE if the input is in the output, else NULL */
    double divisor;       /* of the combined elements */
    uint64_t size;        /* of an element in bytes */
    uint32_t n, me;
    int32_t type;
    int32_t format;               /* of the numbers to divide */
    uint32_t numbers_per_element; /* to divide */
    int32_t many_in, many_out;    /* the input, or output, has a block for each rank */
    int32_t lists_in, lists_out;  /* and is a list of arrays */
    int32_t discards;             /* MPI's result is undefined: exscan of the first rank */
};

EXPORT const struct mpicoll_field mpicoll_mpi_plan_fields[] = {
    FIELD(mpicoll_mpi_plan, function), FIELD(mpicoll_mpi_plan, comm),
    FIELD(mpicoll_mpi_plan, datatype), FIELD(mpicoll_mpi_plan, op),
    FIELD(mpicoll_mpi_plan, in_place), FIELD(mpicoll_mpi_plan, divisor),
    FIELD(mpicoll_mpi_plan, size), FIELD(mpicoll_mpi_plan, n), FIELD(mpicoll_mpi_plan, me),
    FIELD(mpicoll_mpi_plan, type), FIELD(mpicoll_mpi_plan, format),
    FIELD(mpicoll_mpi_plan, numbers_per_element), FIELD(mpicoll_mpi_plan, many_in),
    FIELD(mpicoll_mpi_plan, many_out), FIELD(mpicoll_mpi_plan, lists_in),
    FIELD(mpicoll_mpi_plan, lists_out), FIELD(mpicoll_mpi_plan, discards),
    END_OF_FIELDS,
};

/* Calls MPI, and returns its error code. */
static int call(const struct mpicoll_mpi_plan *plan, const void *send, void *recv, int count,
                int root)
{
    void *const f = plan->function;
    const intptr_t type = plan->datatype, op = plan->op, comm = plan->comm;
    switch (plan->type) {
    case BARRIER:
        return ((barrier_function *)f)(comm);
    case BROADCAST:
        return ((broadcast_function *)f)(recv, count, type, root, comm);
    case COMBINE:
        return ((combine_function *)f)(send, recv, count, type, op, comm);
    case REDUCE:
        return ((reduce_function *)f)(send, recv, count, type, op, root, comm);
    case MOVE:
        return ((move_function *)f)(send, count, type, recv, count, type, comm);
    default:
        return ((rooted_function *)f)(send, count, type, recv, count, type, root, comm);
    }
}

/* Returns whether the blocks of a list follow each other in memory. */
static int are_adjacent(const struct mpicoll_block *blocks, size_t n, size_t nbytes)
{
    for (size_t k = 1; k < n; k++)
        if (blocks[k].data != blocks[0].data + k * nbytes)
            return 0;
    return 1;
}

/* Returns this rank's block of an input or output. */
static const char *own_block(const struct mpicoll_mpi_plan *plan,
                             const struct mpicoll_block *blocks, int many, int listed,
                             size_t nbytes)
{
    return listed ? blocks[plan->me].data : blocks->data + (many ? plan->me * nbytes : 0);
}

/* Only the blocks of lists are read one by one. */
EXPORT int mpicoll_mpi_call(const struct mpicoll_mpi_plan *plan, const struct mpicoll_block *send,
                            const struct mpicoll_block *recv, size_t count, uint32_t root,
                            uint32_t number)
{
    const size_t nbytes = count * plan->size, n = plan->n;
    const int is_root = plan->me == root, rooted = plan->type == ROOTED;
    const int sends = !(rooted && plan->lists_in) || is_root;
    const int receives = !((rooted && plan->lists_out) || plan->type == REDUCE) || is_root;
    /* MPI does not accept an input that is this rank's block of the output, or the reverse. */
    const int in_place = nbytes && sends && receives && !plan->in_place && plan->type >= COMBINE &&
                         own_block(plan, send, plan->many_in, plan->lists_in, nbytes) ==
                             own_block(plan, recv, plan->many_out, plan->lists_out, nbytes);
    const int joins = in_place || (sends && plan->lists_in && !are_adjacent(send, n, nbytes));
    const int splits = receives && plan->lists_out && !are_adjacent(recv, n, nbytes);
    const void *from = !sends ? NULL : plan->in_place && receives ? plan->in_place : send->data;
    char *into = receives ? recv->data : NULL, *input = NULL, *output = NULL;
    (void)number;
    if ((joins && !(from = input = malloc((plan->many_in ? n : 1) * nbytes))) ||
        ((splits || plan->discards) &&
         !(into = output = malloc((plan->discards ? 1 : n) * nbytes)))) {
        free(input);
        return 0;
    }
    for (size_t k = 0; joins && k < (plan->many_in ? n : 1); k++)
        mpicoll_copy(input + k * nbytes, plan->lists_in ? send[k].data : send->data + k * nbytes,
                     nbytes);
    const int error = call(plan, from, into, (int)count, (int)root);
    for (size_t k = 0; splits && !error && k < n; k++)
        mpicoll_copy(recv[k].data, output + k * nbytes, nbytes);
    if (!error && plan->divisor != 1 && receives && !plan->discards) {
        const char *const combined[] = {into};
        mpicoll_combine(plan->format, 0, combined, 1, into, count * plan->numbers_per_element,
                        plan->divisor);
    }
    free(input);
    free(output);
    return error ? -error : 1;
}
