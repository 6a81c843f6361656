/* Vectorisation of the C library's loops. */

#ifndef MPICOLL_VECTORS_H
#define MPICOLL_VECTORS_H

#include <stdint.h> /* also defines __GLIBC__ if this is the GNU C library */

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

#endif
