/* What a translated kernel and the code that executes it share. */
#ifndef KERNEL_H
#define KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* Why a thread's function has returned. */
enum outcome { EXITED, AT_BARRIER, AT_WARP_BARRIER, YIELDED, FAULTED };

enum shuffle { NONE, UP, DOWN, BFLY, IDX };

/* A block of threads as its threads see it. */
struct block {
    uint32_t block_dim[3], index[3], grid_dim[3];
    char *parameters; /* of the kernel */
    char *globals;    /* the module's variables */
    char *shared;
    uint32_t shared_bytes;         /* variables, then dynamic memory */
    uint32_t dynamic_shared_bytes; /* given at launch */
};

/* The start of each thread's frame. Its registers follow. */
struct thread {
    int resume; /* number of the suspension point where the thread goes on */
    int state;  /* the last outcome */
    uint32_t index[3], number;
    unsigned polls;
    int fault; /* cudaError_t */
    uint64_t fault_address;
    const char *fault_instruction;
    int predicate, result; /* of a barrier's reduction, or of a shuffle */
    enum shuffle shuffle;
    uint32_t operand, step, clamp; /* of a shuffle */
};

/* A parameter's place in the parameter memory. */
struct parameter {
    uint32_t offset, bytes;
};

enum kernel_flags {
    SUSPENDS = 1,     /* its threads wait for each other: each needs a frame */
    POLLS_MEMORY = 2, /* it waits for memory that other blocks or devices write */
};

struct kernel {
    const char *name;
    int (*step)(struct thread *thread, const struct block *block);
    size_t frame_bytes;
    uint32_t shared_bytes, parameter_bytes, max_threads;
    int flags;
    uint32_t parameter_count;
    const struct parameter *parameters;
};

/* The symbol "emulated_module" of a compiled module. */
struct module_image {
    uint32_t kernel_count, globals_bytes;
    const struct kernel *kernels;
    const unsigned char *globals; /* the initial contents of its variables */
};

#endif
