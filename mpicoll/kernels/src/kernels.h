/* Functions that the files of the C library use of each other. All of them except calls.c are plain C
 * for ctypes: they do not include Python.h and define no module. */

#ifndef MPICOLL_KERNELS_H
#define MPICOLL_KERNELS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT size_t mpicoll_size(int format);
EXPORT void mpicoll_widen(int format, const void *source, void *out, size_t count);
EXPORT void mpicoll_narrow(int format, const void *source, void *out, size_t count);
void mpicoll_add_narrow(int format, const void *left, const void *right, void *out, double divisor,
                        size_t count);
EXPORT void mpicoll_combine(int format, int operation, const char *const *sources, size_t n,
                            char *out, size_t count, double divisor);

/* One library for several vector units: glibc selects the version of a function when it loads the
 * library. AVX-512 on elements of 16 bits also needs BW and VL, so whole architecture levels are
 * named where the compiler supports them. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCH 1
#ifdef __SANITIZE_THREAD__
#define VECTORISED /* its runtime is not initialised when glibc selects a version */
#elif __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define VECTORISED
#endif

/* The result may be exactly one of the operands, which compilers cannot infer. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT
#endif

/* Copies to separate memory; the second with non-temporal stores, which fetch no lines. */
void mpicoll_copy(char *into, const char *from, size_t size);
void mpicoll_copy_past_caches(char *into, const char *from, size_t size);

/* Parts of a call on several threads: runs function(argument, part) for all parts from 0 on, on the
 * calling thread and on up to parts - 1 further threads; parts begin in ascending order. If another
 * call uses these threads, the calling thread runs all parts. It calls `check` every 50 ms while it
 * waits for other threads. */
void mpicoll_run_parts(void (*function)(void *argument, uint32_t part), void *argument,
                       uint32_t parts, void (*check)(void *argument));

static inline uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* The fields of the structures that Python fills in, up to a field without a name: name, offset in
 * bytes, and type as a code of Python's struct module. */
struct mpicoll_field {
    const char *name;
    size_t offset;
    char type;
};

#define FIELD(structure, field)                                                                    \
    {#field, offsetof(struct structure, field),                                                    \
     _Generic(((struct structure *)0)->field,                                                      \
              double: 'd', int32_t: 'i', uint32_t: 'I', atomic_uint: 'I', uint64_t: 'Q', default: 'P')}
#define END_OF_FIELDS {NULL, 0, 0}

void mpicoll_exact_sum(int format, const char *const *sources, size_t n, char *out, size_t count,
                       double divisor);

#endif
