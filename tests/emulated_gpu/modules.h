/* Kernels: compilation and execution. */
#ifndef MODULES_H
#define MODULES_H

#include "device.h"
#include "kernel.h"

/* translate.c: Return the path of the compiled module of PTX text, or NULL if it is invalid. All
 * processes share the compiled modules. The caller frees the path. */
char *translate_ptx(const char *text);

/* execute.c: a launch. It is the argument of `execute_launch`, which runs it to its end. */
struct launch {
    const struct kernel *kernel;
    char *globals;
    uint32_t grid_dim[3], block_dim[3];
    uint32_t dynamic_shared_bytes;
    char parameters[] __attribute__((aligned(16)));
};

cudaError_t execute_launch(void *argument);

#endif
