/* How the C library's loops are vectorised. */

#ifndef MPICOLL_VECTORS_H
#define MPICOLL_VECTORS_H

#include <stdint.h> /* and with it __GLIBC__, of the GNU C library */

/* One library for several vector units: glibc picks the version of a function when it loads it.
 * Of AVX-512, elements of 16 bits need BW and VL as well, hence whole levels of the architecture
 * where the compiler knows them. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCH 1
#ifdef __SANITIZE_THREAD__
#define VECTORISED /* its runtime does not stand yet when glibc asks which version to take */
#elif __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define VECTORISED
#endif

/* The result may be exactly one of the operands, which compilers cannot guess. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT
#endif

#endif
