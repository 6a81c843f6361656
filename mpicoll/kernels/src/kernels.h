/* Functions that the files of the C library use of each other. */

#ifndef MPICOLL_KERNELS_H
#define MPICOLL_KERNELS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT size_t mpicoll_size(int format);
EXPORT void mpicoll_widen(int format, const void *source, void *out, size_t count);
EXPORT void mpicoll_narrow(int format, const void *source, void *out, size_t count);
void mpicoll_add_narrow(int format, const void *left, const void *right, void *out, double divisor,
                        size_t count);
EXPORT void mpicoll_combine(int format, int operation, const char *const *sources, size_t n,
                            char *out, size_t count, double divisor);

/* Nanoseconds of latency from which on a rank is far: it does not share a cache with this one. */
enum { FAR_NS = 80 };

EXPORT uint32_t mpicoll_far_ns(void);
EXPORT uint32_t mpicoll_latency(atomic_uint *mine, const atomic_uint *other, int leads,
                                uint32_t measurement, uint64_t timeout_ns);
void mpicoll_exact_sum(int format, const char *const *sources, size_t n, char *out, size_t count,
                       double divisor);

#endif
