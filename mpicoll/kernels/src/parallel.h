/* Parts of a call on several threads, see parallel.c. */

#ifndef MPICOLL_PARALLEL_H
#define MPICOLL_PARALLEL_H

#include <stdint.h>

/* Runs function(argument, part) for all parts from 0 on, in ascending order of their beginnings: on
 * the calling thread and on up to parts - 1 further threads. If another call uses these threads, the
 * calling thread runs all parts. It calls `check` every 50 ms while it waits for other threads. */
void mpicoll_run_parts(void (*function)(void *argument, uint32_t part), void *argument,
                       uint32_t parts, void (*check)(void *argument));

#endif
